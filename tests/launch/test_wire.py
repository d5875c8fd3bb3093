"""What launcher and agent say to one another, however the bytes are cut."""

from __future__ import annotations

import pytest

from moolink.launch import wire


def test_frames_are_read_in_any_pieces_and_noise_before_them_is_kept() -> None:
    sent = b"Welcome\n\n" + wire.GREETING + b"\n" + wire.control(**{"is": "up"})
    sent += wire.output(7, "stderr", b"\0\n\xff") + wire.output(8, "stdout", b"")
    for size in (1, 2, 5, len(sent)):
        frames = wire.Frames()
        got = [
            item
            for start in range(0, len(sent), size)
            for item in frames.feed(sent[start : start + size])
        ]
        assert got == [{"is": "up"}, (7, "stderr", b"\0\n\xff"), (8, "stdout", b"")]
        assert frames.noise == [b"Welcome", b""]


def test_lines_are_read_in_any_pieces() -> None:
    lines = wire.Lines()
    sent = wire.line(do="start", command=["a\n"]) + wire.line(do="alive")
    got = [item for byte in sent for item in lines.feed(bytes([byte]))]
    assert got == [{"do": "start", "command": ["a\n"]}, {"do": "alive"}]


@pytest.mark.parametrize("data", [b"x" * 20, b"c\0\0\0\0\xff\0\0\0", b"c\0\0\0\0\0\0\0\x02{]"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    frames = wire.Frames()
    with pytest.raises(wire.WireFormatError):
        list(frames.feed(wire.GREETING + b"\n" + data))
