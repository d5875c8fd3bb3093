import io
import os
import pty
import subprocess
import sys
from pathlib import Path

from moolink.launch.output import PrefixedStream, Screen
from tests.waiting import PROCESS_LIMIT


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def feed(chunks: list[bytes], stdout: io.BytesIO) -> bytes:
    stream = PrefixedStream(Screen(stdout, io.BytesIO()), "stdout", b"[1] ")
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    return stdout.getvalue()


def test_lines_are_prefixed_however_the_bytes_are_cut():
    text = b"first\nsecond\r\n\nlast"
    expected = b"[1] first\n[1] second\n[1] \n[1] last\n"
    for size in range(1, len(text) + 1):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert feed(chunks, io.BytesIO()) == expected


def test_progress_is_one_line_when_not_on_a_terminal():
    assert feed([b"\r 10%", b"\r 50%", b"\r100%", b"\ndone\n"], io.BytesIO()) == (
        b"[1] 100%\n[1] done\n"
    )
    assert feed([b" 10%\r", b" 50%\r", b"100%\r", b"\ndone\n"], io.BytesIO()) == (
        b"[1] 100%\n[1] done\n"
    )


def test_progress_is_overwritten_in_place_on_a_terminal():
    shown = feed([b"10%\r", b"20%\r", b"\n"], Terminal())
    assert shown == b"[1] 10%\r\x1b[K[1] 20%\r\x1b[K[1] 20%\n"


def test_a_line_of_another_peer_does_not_cut_the_live_line():
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    progress = PrefixedStream(screen, "stdout", b"[0] ")
    other = PrefixedStream(screen, "stderr", b"[1] ")
    progress.feed(b"50%\r")
    other.feed(b"hello\n")
    assert terminal.getvalue() == b"[0] 50%\r\x1b[K[1] hello\n[0] 50%"


def test_an_endless_line_is_cut_and_not_kept_in_memory():
    shown = feed([b"x" * 200_000], io.BytesIO())
    assert shown.count(b"x") == 200_000


def test_on_a_terminal_a_process_controls_no_more_than_colours():
    hostile = b"\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J\t\x00\xc2\x9b2J\xe2\x82\xac\n"
    assert feed([hostile], Terminal()) == (
        b"[1] ?]0;title?\x1b[31mred\x1b[0m?[2J\t??2J\xe2\x82\xac\n"
    )
    assert b"\x1b[2J" not in feed([b"\x1b[2J 10%\r"], Terminal())
    assert b"\x1b[2J" in feed([hostile], io.BytesIO())  # a file has what was written


def peers_word(folder: Path, stdout: int) -> None:
    """Runs a peer that says what it was told of the launcher's output."""
    script = folder / "peer.py"
    script.write_text("import os; print('told', os.environ['MOOLINK_TERMINAL'])")
    command = [sys.executable, "-m", "moolink", "run", "-n", "1", str(script)]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.DEVNULL, timeout=PROCESS_LIMIT)
    assert done.returncode == 0


def test_peers_are_told_whether_a_line_can_change_in_place(tmp_path):
    path = tmp_path / "output"
    with path.open("wb") as file:
        peers_word(tmp_path, file.fileno())
    assert "told 0" in path.read_text()
    own, theirs = pty.openpty()
    try:
        peers_word(tmp_path, theirs)
        assert b"told 1" in os.read(own, 65536)
    finally:
        os.close(own)
        os.close(theirs)
