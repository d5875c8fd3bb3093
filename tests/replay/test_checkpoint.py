"""Checkpoints of a replay: whole or not there, and of the same configuration only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.replay import Fifo, Prioritized, SampleToInsertRatio, Table

TABLE = Table("t", 50, Prioritized(0.6), limiter=SampleToInsertRatio(2.0, 5, 200.0))


def filled() -> moolink.Replay:
    replay = moolink.Replay([TABLE, Table("other", 9, Fifo())], seed=1)
    writer = replay.writer(keep=3)
    for i in range(70):
        writer.append({"obs": np.full(4, i, np.float32), "i": np.int64(i)})
        if len(writer) >= 3:
            parts = {"obs": writer.history["obs"][-3:], "i": writer.history["i"][-1]}
            writer.create_item(parts, priority=1.0 + i, table="t")
    replay.insert({"x": np.float32(3)}, table="other")
    replay.sample(11, table="t")
    return replay


def test_a_restored_replay_goes_on_where_it_was(tmp_path: Path) -> None:
    replay = filled()
    replay.checkpoint(tmp_path / "replay")
    restored = moolink.Replay.restore(tmp_path / "replay", replay.tables())
    assert restored.stats()["tables"] == replay.stats()["tables"]
    seen: dict[int, tuple[float, float]] = {}
    for of in (replay, restored):
        batch = of.sample(100, table="t")
        for row, key in enumerate(batch.keys.tolist()):
            i = batch.data["i"][row]
            assert batch.data["obs"][row, :, 0].tolist() == [i - 2, i - 1, i]
            what = (batch.priorities[row], batch.probabilities[row])
            assert seen.setdefault(key, what) == what  # to the last bit
    assert restored.sample(1, table="other").data["x"].tolist() == [3.0]


def test_a_changed_configuration_is_an_error_that_says_so(tmp_path: Path) -> None:
    filled().checkpoint(tmp_path / "replay")
    with pytest.raises(ValueError, match="max_size of table 't' is 60, in the checkpoint 50"):
        moolink.Replay.restore(
            tmp_path / "replay",
            [Table("t", 60, TABLE.sampler, limiter=TABLE.limiter), Table("other", 9, Fifo())],
        )
    with pytest.raises(ValueError, match="table 'other' is only in the checkpoint"):
        moolink.Replay.restore(tmp_path / "replay", TABLE)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    replay = filled()
    path = tmp_path / "replay"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no checkpoint"):
        moolink.Replay.restore(path, replay.tables())
    replay.checkpoint(path)
    whole = path.read_bytes()
    for end in (20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="is cut off"):
            moolink.Replay.restore(path, replay.tables())


def test_a_checkpoint_that_fails_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = filled()
    path = tmp_path / "replay"
    replay.checkpoint(path)
    before = path.read_bytes()

    def refuse(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="full"):
        replay.checkpoint(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["replay"]


def test_writers_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    replay = moolink.Replay(Table("t", 200, Fifo()), seed=1)
    replay.insert({"a": np.int64(-1), "b": np.full(1000, -1, np.int64)})
    stop = threading.Event()

    def write() -> None:
        i = 0
        while not stop.is_set():
            replay.insert({"a": np.int64(i), "b": np.full(1000, i, np.int64)})
            i += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        restored: list[Any] = []
        for _ in range(5):
            replay.checkpoint(tmp_path / "replay")
            restored.append(moolink.Replay.restore(tmp_path / "replay", replay.tables()))
    finally:
        stop.set()
        thread.join(20)
    for of in restored:
        size = of.stats()["tables"]["t"]["size"]
        for _ in range(size):
            batch = of.sample(1)
            assert (batch.data["b"] == batch.data["a"][:, None]).all()
            of.remove(batch.keys)
