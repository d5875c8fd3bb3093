"""Replay in one process: items, batches, priorities, limits, writers."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.internal import deadlines
from moolink.replay import (
    Fifo,
    Lifo,
    MaxHeap,
    MinHeap,
    MinSize,
    Prioritized,
    SampleToInsertRatio,
    Table,
    Uniform,
)
from moolink.replay.local_steps import LocalSteps
from tests import waiting
from tests.replay.drift import check_probabilities


def item(i: int) -> dict[str, Any]:
    return {"obs": np.full((3, 2), i, np.uint8), "reward": float(i), "done": i % 2 == 0}


def test_a_batch_is_the_items_stacked() -> None:
    replay = moolink.Replay(Table("t", 10, Fifo()), seed=1)
    key = replay.insert(item(7), priority=2.0)
    batch = replay.sample(2)
    assert list(batch.data) == ["obs", "reward", "done"]
    assert batch.data["obs"].shape == (2, 3, 2)
    assert (batch.data["obs"] == 7).all()
    assert batch.data["reward"].dtype == np.float32
    assert batch.data["done"].tolist() == [False, False]
    assert batch.keys.tolist() == [key, key]
    assert batch.priorities.tolist() == [2.0, 2.0]
    assert batch.times_sampled.tolist() == [1, 2]
    assert batch.probabilities.tolist() == [1.0, 1.0]


def test_torch_keeps_its_own_dtypes() -> None:
    import torch

    replay = moolink.Replay(Table("t", 10))
    replay.insert({"x": torch.ones(3, dtype=torch.bfloat16)})
    x = replay.sample(2).data["x"]
    assert x.dtype == torch.bfloat16
    assert x.tolist() == [[1, 1, 1]] * 2


def test_priorities_weigh_and_weights_make_up_for_it() -> None:
    replay = moolink.Replay(Table("t", 10, Prioritized(0.5)), seed=3)
    keys = replay.extend({"i": np.arange(3)}, [1.0, 4.0, 0.0])
    batch = replay.sample(6000)
    counts = np.bincount(batch.data["i"], minlength=3) / 6000
    np.testing.assert_allclose(counts, [1 / 3, 2 / 3, 0], atol=0.03)
    weights = batch.weights(1.0)
    np.testing.assert_allclose(weights[batch.data["i"] == 1], 0.5)
    np.testing.assert_allclose(weights[batch.data["i"] == 0], 1.0)
    assert replay.update_priorities(keys, [0.0, 0.0, 9.0]) == 3
    assert set(replay.sample(50).data["i"].tolist()) == {2}


def test_probabilities_are_exact_after_a_million_updates() -> None:
    check_probabilities(1_000_000)


def test_wrong_priorities_change_nothing() -> None:
    replay = moolink.Replay(Table("t", 10, Prioritized(1.0)))
    keys = replay.extend({"i": np.arange(2)}, 1.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="priority"):
            replay.update_priorities(keys, [5.0, wrong])
    assert replay.sample(20).priorities.tolist() == [1.0] * 20


def test_an_item_that_differs_is_refused_by_name() -> None:
    replay = moolink.Replay(Table("t", 10))
    replay.insert(item(1))
    with pytest.raises(ValueError, match=r"obs: expected uint8 \(3, 2\), got uint8 \(4,\)"):
        replay.insert({**item(1), "obs": np.zeros(4, np.uint8)})
    with pytest.raises(ValueError, match="without reward"):
        replay.insert({"obs": item(1)["obs"], "done": True})
    with pytest.raises(TypeError, match="str"):
        moolink.Replay(Table("t", 10)).insert({"name": "text"})
    assert replay.stats()["stores"][0]["steps"] == 1


def test_who_would_have_to_wait_is_told_why() -> None:
    replay = moolink.Replay(Table("t", 10, limiter=MinSize(3)))
    replay.insert(item(1))
    with pytest.raises(moolink.QueueFull, match="'t' has 1 items after 1 inserts"):
        replay.sample(2, timeout=0)
    with pytest.raises(moolink.TimeoutError, match=r"0\.05 s"):
        replay.sample(2, timeout=0.05)
    full = moolink.Replay(Table("t", 1, remover=None))
    full.insert(item(1))
    with pytest.raises(moolink.QueueFull):
        full.insert(item(2), timeout=0)
    assert full.stats()["stores"][0]["steps"] == 1


@pytest.mark.parametrize("kind", [dict, OrderedDict, functools.partial(defaultdict, None)])
def test_inserts_of_other_kinds_of_dicts(kind: Callable[[Any], Any]) -> None:
    replay = moolink.Replay(Table("t", 10))
    for number in range(3):
        replay.insert(kind({"x": np.float32(number), "inner": kind({"y": np.ones(2)})}))
    replay.insert({"x": np.float32(3), "inner": {"y": np.ones(2)}})
    assert replay.sample(4).data["inner"]["y"].shape == (4, 2)
    replay.close()


def test_a_sample_waits_for_inserts_of_another_thread() -> None:
    replay = moolink.Replay(Table("t", 10, Fifo(), limiter=SampleToInsertRatio(1.0, 2, 1.0)))
    thread = threading.Thread(target=lambda: [replay.insert(item(i)) for i in range(4)])
    thread.start()
    assert len(replay.sample(3, timeout=20)) == 3  # the error is 4 - 3 then: min_diff
    thread.join(20)
    assert not thread.is_alive()


def test_close_ends_whoever_waits() -> None:
    replay = moolink.Replay(Table("t", 10))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            replay.sample(1)
        except moolink.Closed as closed:
            raised.append(closed)

    thread = threading.Thread(target=wait)
    thread.start()
    while replay.stats()["tables"]["t"]["waiting_samples"] == 0 and thread.is_alive():
        pass
    replay.close()
    thread.join(20)
    assert len(raised) == 1


def test_a_queue_gives_each_item_once_in_order() -> None:
    replay = moolink.Replay(Table.queue("q", 5))
    replay.extend({"i": np.arange(5)})
    with pytest.raises(moolink.QueueFull):
        replay.insert({"i": np.int64(9)}, timeout=0)
    assert replay.sample(2).data["i"].tolist() == [0, 1]
    assert replay.sample(9, timeout=0).data["i"].tolist() == [2, 3, 4]
    assert replay.stats()["stores"][0]["steps"] == 0


def test_items_of_a_writer_share_their_steps() -> None:
    replay = moolink.Replay(Table("t", 100, Fifo()))
    writer = replay.writer(keep=4)
    for i in range(10):
        writer.append({"obs": np.full(2, i, np.uint8), "reward": float(i)})
        if len(writer) >= 4:
            history = writer.history
            writer.create_item(
                {"obs": history["obs"][-4:], "next": history["obs"][-1], "r": history["reward"][-3]}
            )
    writer.close()
    assert replay.stats()["stores"][0]["steps"] == 10  # 7 items of 4 steps each
    batch = replay.sample(1)
    assert batch.data["obs"][0, :, 0].tolist() == [0, 1, 2, 3]
    assert batch.data["next"].tolist() == [[3, 3]]
    assert batch.data["r"].tolist() == [1.0]


def test_no_item_reaches_back_into_another_episode_or_further_than_kept() -> None:
    writer = moolink.Replay(Table("t", 100)).writer(keep=3)
    for i in range(5):
        writer.append({"i": np.int64(i)})
    with pytest.raises(ValueError, match="larger `keep`"):
        writer.create_item({"i": writer.history["i"][-4:]})
    writer.end_episode()
    with pytest.raises(IndexError):
        writer.create_item({"i": writer.history["i"][-1]})


def test_an_interrupted_append_shifts_no_later_item(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = moolink.Replay(Table("t", 10, Fifo(), max_times_sampled=1))
    append = LocalSteps.append

    def interrupted(steps: LocalSteps, step: Any) -> None:
        append(steps, step)
        if step["x"] == 1:
            raise KeyboardInterrupt  # Ctrl-C, once the step is stored

    monkeypatch.setattr(LocalSteps, "append", interrupted)
    with replay.writer(keep=2) as writer:
        writer.append({"x": 0})
        with pytest.raises(KeyboardInterrupt):
            writer.append({"x": 1})
        for i in (2, 3):
            writer.append({"x": i})
        writer.create_item(writer.history["x"][-2:])
        writer.end_episode()
        for i in (4, 5):
            writer.append({"x": i})
        writer.create_item(writer.history["x"][-2:])
    assert replay.sample(2).data.tolist() == [[2, 3], [4, 5]]


def test_batches_are_sampled_ahead_and_end_with_the_replay() -> None:
    replay = moolink.Replay(Table("t", 10))
    replay.extend({"i": np.arange(4)})
    with replay.batches(8, prefetch=2) as batches:
        assert [len(next(batches)) for _ in range(3)] == [8, 8, 8]
    with pytest.raises(moolink.Closed):
        next(batches)
    waiting = moolink.Replay(Table("t", 10)).batches(1)
    waiting.close()  # while it waits for an item that never comes


def test_torch_in_torch_out() -> None:
    torch = pytest.importorskip("torch")
    replay = moolink.Replay(Table("t", 10))
    replay.insert({"x": torch.arange(3.0)})
    batch = replay.sample(2)
    assert isinstance(batch.data["x"], torch.Tensor)
    assert batch.data["x"].tolist() == [[0.0, 1.0, 2.0]] * 2


def test_closing_batches_ends_those_who_wait_for_one() -> None:
    with moolink.Replay(Table("t", 10)) as replay:
        batches = replay.batches(1)
        raised: list[BaseException] = []

        def take() -> None:
            try:
                next(batches)
            except moolink.Closed as closed:
                raised.append(closed)

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        waiting.until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 1, "a sample")
        batches.close()
        for thread in threads:
            thread.join(waiting.TIMEOUT)
        assert len(raised) == 2


def test_an_item_that_was_refused_fixes_nothing() -> None:
    with moolink.Replay(Table("t", 10)) as replay:
        with pytest.raises(ValueError, match="finite and not negative"):
            replay.insert({"x": 1}, priority=-1.0)
        with pytest.raises(ValueError, match="finite and not negative"):
            replay.extend({"x": np.zeros(2)}, [1.0, float("nan")])
        with pytest.raises(ValueError, match="a time limit must be"):
            replay.insert({"x": 1}, timeout=-1)
        for wrong in (np.array(["a"]), np.array([1], object), "text"):
            with pytest.raises(TypeError):
                replay.insert({"x": wrong})
        replay.insert({"y": 2.0})
        assert replay.sample(1).data["y"].tolist() == [2.0]


def test_a_step_that_cannot_be_stored_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with moolink.Replay(Table("t", 10)) as replay:
        with pytest.raises(TypeError, match="a str is in a step"):
            replay.writer(1).append({"x": "text"})
        gc.collect()
    assert not unraisable


def test_items_whose_dicts_are_in_another_order_are_alike() -> None:
    with moolink.Replay(Table("t", 10)) as replay, replay.writer(1) as writer:
        writer.append({"a": 1, "b": 2})
        history = writer.history
        writer.create_item({"x": history["a"][-1], "y": history["b"][-1]})
        writer.create_item({"y": history["b"][-1], "x": history["a"][-1]})
        data = replay.sample(20).data
        assert set(data["x"].tolist()) == {1}
        assert set(data["y"].tolist()) == {2}


def test_options_that_are_no_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"sampler of table 't' must be a Selector, .* Uniform"):
        Table("t", 10, sampler=Uniform)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="remover of table 't' must be a Selector or None"):
        Table("t", 10, remover="fifo")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="limiter of table 't' must be a Limiter"):
        Table("t", 10, limiter=MinSize)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_size of table 't' must be an int"):
        Table("t", 1e6)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_buffer must be at least"):
        SampleToInsertRatio(1.0, 1, float("nan"))
    with pytest.raises(TypeError, match="expected a Table or several, got a str"):
        moolink.Replay("t")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "table",
    [
        Table("t", 3),
        Table.queue("t", 3),
        Table("t", 3, Prioritized(0.6), Lifo(), SampleToInsertRatio(4, 2, 8), 5),
        Table("t", 3, MinHeap(), MaxHeap(), MinSize(2)),
        Table("t", 3, remover=None),
    ],
)
def test_a_table_is_made_again_of_its_description(table: Table) -> None:
    assert Table.described(table.describe()) == table


def test_a_selector_that_is_not_known_is_named() -> None:
    options = {**Table("t", 3).describe(), "sampler": ["median", 1.0]}
    with pytest.raises(ValueError, match="no selector 'median'"):
        Table.described(options)


def test_a_step_beyond_the_episode_is_named() -> None:
    with moolink.Replay(Table("t", 10)) as replay, replay.writer(5) as writer:
        writer.append({"x": 1})
        with pytest.raises(IndexError, match="step -2 of an episode that has 1 steps"):
            writer.history["x"][-2]


def test_numbers_that_are_none_are_named() -> None:
    with moolink.Replay(Table("t", 10)) as replay:
        replay.insert({"x": 1})
        for wrong in (2.5, "3", None):
            with pytest.raises(TypeError, match="batch_size must be an integer, got"):
                replay.sample(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            replay.batches(0)
        with pytest.raises(ValueError, match=r"keys must have one dimension, got shape \(1, 2\)"):
            replay.update_priorities([[1, 2]], [[1.0, 2.0]])
        with pytest.raises(ValueError, match="arrays must be"):
            moolink.Replay(Table("t", 10), arrays="tensorflow")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "later", "dtype"), [(0, 0.5, "int64"), (False, 2, "bool"), (True, 0.5, "bool")]
)
def test_no_number_is_cut_to_what_the_first_item_had(first: Any, later: Any, dtype: str) -> None:
    with moolink.Replay(Table("t", 10)) as replay, replay.writer(1) as writer:
        replay.insert({"r": first})
        with pytest.raises(ValueError, match=f"r: expected {dtype}, got the number {later}"):
            replay.insert({"r": later})
        writer.append({"r": first})
        with pytest.raises(ValueError, match=f"r: expected {dtype}, got the number {later}"):
            writer.append({"r": later})
        replay.insert({"r": False})
        assert replay.sample(1).data["r"].dtype == dtype


def test_a_long_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "_LINES", (0.01,))
    with moolink.Replay(Table("t", 1, remover=None)) as replay:
        with pytest.raises(moolink.TimeoutError):
            replay.sample(3, timeout=0.2)
        assert "a sample of 3 items waits for table 't'" in caplog.text
        with pytest.raises(moolink.TimeoutError):
            replay.extend({"x": np.zeros(2)}, timeout=0.2)
        assert "an insert of 2 items waits for table 't'" in caplog.text
