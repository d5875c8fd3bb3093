"""Damaged data files: each damage raises a FileError that names the file; nothing is loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import moolink
from examples.common import checkpoint
from moolink.replay import Fifo, Prioritized, Table

TABLES = [Table("train", 50, Prioritized(0.6)), Table.queue("q", 9)]


def make_replay(path: Path, elements: int) -> None:
    with moolink.Replay(TABLES, seed=0) as replay:
        replay.extend({"obs": np.ones((3, elements), np.float32)}, [1.0, 2.0, 3.0], table="train")
        replay.insert({"x": 5}, table="q")
        replay.checkpoint(path)


def load_replay(path: Path) -> None:
    moolink.Replay.restore(path, TABLES).close()


def make_learner(path: Path, elements: int) -> None:
    tree = {"parameters": {"w": np.ones(elements, np.float32)}, "totals": {"steps": 3}}
    checkpoint.save(path.parent, tree).rename(path)


def load_learner(path: Path) -> None:
    folder = path.with_suffix(".run")
    folder.mkdir(exist_ok=True)
    place = folder / checkpoint.NAME
    place.unlink(missing_ok=True)
    os.symlink(path, place)
    try:
        assert checkpoint.load(folder) is not None
    finally:
        place.unlink()


class Kind(NamedTuple):
    make: Callable[[Path, int], None]
    load: Callable[[Path], None]
    old: bytes  # the first bytes of a file of version 1


KINDS = {
    "replay": Kind(make_replay, load_replay, b"moolink replay 1\n"),
    "learner": Kind(make_learner, load_learner, b"PK\3\4"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class Damaged:
    """A file of a kind, and the check that other bytes in its place are refused."""

    def __init__(self, kind: Kind, folder: Path, elements: int = 2) -> None:
        self._load, self.path = kind.load, folder / "file.bin"
        kind.make(self.path, elements)
        kind.load(self.path)
        self.whole = self.path.read_bytes()

    def refused(self, data: bytes) -> str:
        """The error's text."""
        self.path.write_bytes(data)
        with pytest.raises(moolink.FileError) as caught:
            self._load(self.path)
        assert self.path.name in str(caught.value) or checkpoint.NAME in str(caught.value)
        assert isinstance(caught.value, ValueError)
        return str(caught.value)

    def flipped(self, bit: int) -> str:
        data = bytearray(self.whole)
        data[bit // 8] ^= 1 << bit % 8
        return self.refused(bytes(data))


def test_a_file_cut_at_any_byte(kind: Kind, tmp_path: Path) -> None:
    file = Damaged(kind, tmp_path)
    for length in range(len(file.whole)):
        file.refused(file.whole[:length])


def test_any_bit_flipped(kind: Kind, tmp_path: Path) -> None:
    file = Damaged(kind, tmp_path)
    for bit in range(8 * len(file.whole)):
        file.flipped(bit)


def test_some_bits_of_a_large_file_flipped(kind: Kind, tmp_path: Path) -> None:
    file = Damaged(kind, tmp_path, 100_000)
    draws = random.Random(1)
    for _ in range(200):
        assert "checksum" in file.flipped(draws.randrange(8 * 2000, 8 * (len(file.whole) - 2000)))


def test_eight_bytes_anywhere_replaced(kind: Kind, tmp_path: Path) -> None:
    """Huge lengths among them: they are compared with the file's size before memory is taken."""
    file = Damaged(kind, tmp_path)
    for value in (b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little")):
        for at in range(len(file.whole) - 7):
            data = file.whole[:at] + value + file.whole[at + 8 :]
            if data != file.whole:
                file.refused(data)


def test_a_file_with_more_at_its_end(kind: Kind, tmp_path: Path) -> None:
    file = Damaged(kind, tmp_path)
    for more in (b"\0", b"x" * 100, file.whole):
        text = file.refused(file.whole + more)
        assert "more than it should have" in text or "should" in text


def test_other_files(kind: Kind, tmp_path: Path) -> None:
    file = Damaged(kind, tmp_path)
    for data in (b"", b"\0" * 5000, b"something else\n" * 100, np.random.default_rng(1).bytes(500)):
        assert "is no checkpoint of a" in file.refused(data)
    assert "of version 1" in file.refused(kind.old + file.whole[17:-40] + OLD_END)
    newer = file.whole.replace(b" 2\n", b" 3\n", 1)
    assert "of version 3" in file.refused(newer)


OLD_END = b"PK\5\6" + bytes(18)  # of a zip archive without a seal; a replay has none


def test_the_examples_first_format_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    np.savez(folder / checkpoint.NAME, w=np.ones(3))
    with pytest.raises(moolink.FileError, match="is of version 1, and this program reads version"):
        checkpoint.load(folder)


def test_what_is_no_file(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "/dev/zero"):
        with pytest.raises((moolink.FileError, IsADirectoryError), match=r"folder|pipe|zero|npz"):
            kind.load(tmp_path / name)
    shutil.rmtree(tmp_path / "folder")


def test_a_damaged_replay_offers_the_checkpoint_before_it(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with moolink.Replay(Table("t", 9, Fifo()), seed=0) as replay:
        for i in range(3):
            replay.insert({"x": i})
            replay.checkpoint(path, keep_previous=True)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(moolink.FileError, match=f"{path} is damaged: .*of 3 steps") as caught:
            moolink.Replay.restore(path, replay.tables())
        previous = caught.value.previous
        assert previous == f"{path}.previous"
        assert f"the previous checkpoint is {previous}" in str(caught.value)
        with moolink.Replay.restore(previous, replay.tables()) as restored:
            assert restored.stats()["tables"]["t"]["size"] == 2
        os.unlink(previous)
        with pytest.raises(moolink.FileError, match="there is no previous checkpoint") as caught:
            moolink.Replay.restore(path, replay.tables())
        assert caught.value.previous is None


def test_a_replay_of_another_configuration(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    make_replay(path, 2)
    others: list[Any] = [TABLES[0], TABLES[::-1], [Table("train", 51), TABLES[1]]]
    for tables in others:
        with pytest.raises(moolink.FileError, match=f"{path} is of another configuration: "):
            moolink.Replay.restore(path, tables)
