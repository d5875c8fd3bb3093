"""TrajectoryQueue and its writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import TrajectoryQueue, TrajectoryWriter
from moolink.internal import deadlines
from tests import processes, waiting


class Net:
    def __init__(self) -> None:
        self.learner = moolink.Rpc("learner")
        self.address = self.learner.listen("127.0.0.1:0")[0]
        self.actors: list[moolink.Rpc] = []

    def writer(self, name: str = "actor", **options: Any) -> TrajectoryWriter:
        self.actors.append(moolink.Rpc(name))
        self.actors[-1].connect(self.address)
        return TrajectoryWriter(self.actors[-1], "unrolls", "learner", **options)


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    for peer in [*net.actors, net.learner]:
        peer.close()


def unroll(value: int, length: int = 3) -> dict[str, Any]:
    return {"obs": np.full((length, 4), value, np.uint8), "reward": np.full(length, value / 2)}


def test_items_of_several_writers_become_a_batch(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls", dim=1) as queue:
        writers = [net.writer(f"actor{i}") for i in range(3)]
        for i, writer in enumerate(writers):
            writer.put(unroll(i), begin=0)
            writer.flush(20)
        batch = queue.get(3, timeout=20)
        assert batch.data["obs"].shape == (3, 3, 4)
        assert batch.data["obs"][0, :, 0].tolist() == [0, 1, 2]
        assert batch.data["reward"].dtype == np.float64
        assert batch.fresh.all()
        assert len(batch) == 3


def test_nothing_older_than_max_lag_is_handed_out(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer = net.writer(ahead=10)
        for begin in range(6):
            writer.put(unroll(begin), begin=begin, end=begin + 1)
        writer.flush(20)
        queue.version = 7
        batch = queue.get(3, max_lag=4, timeout=20)
        assert batch.begin.tolist() == [3, 4, 5]
        assert batch.end.tolist() == [4, 5, 6]
        assert batch.version == 7
        stats = queue.stats()
        assert (stats["put"], stats["taken"], stats["dropped"]) == (6, 3, 3)
        assert stats["largest_lag"] == 4
        assert stats["mean_lag"] == {"acting": 1, "in_flight": 0, "in_queue": 7}


def test_late_items_can_be_masked(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer = net.writer()
        for begin in (0, 5):
            writer.put(unroll(begin), begin=begin)
        writer.flush(20)
        queue.version = 6
        batch = queue.get(2, max_lag=2, late="mask", timeout=20)
        assert batch.fresh.tolist() == [False, True]


def test_writers_wait_while_the_queue_is_full(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls", max_size=2) as queue:
        writer = net.writer(ahead=1)
        for begin in range(3):
            writer.put(unroll(begin), begin=begin)  # the third one waits for room
        with pytest.raises(moolink.TimeoutError, match="its queue is full"):
            writer.put(unroll(3), begin=3, timeout=0.05)
        assert queue.stats()["waiting_for_room"] == 1
        assert queue.get(2, timeout=20).begin.tolist() == [0, 1]
        writer.put(unroll(3), begin=3, timeout=20)
        writer.flush(20)
        assert queue.get(2, timeout=20).begin.tolist() == [2, 3]
        assert writer.stats() == {"put": 4, "accepted": 4, "lost": 0}


def test_a_learner_that_pauses_loses_nothing(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls", max_size=1) as queue:
        writer = net.writer(ahead=3)
        rpc = net.actors[-1]
        rpc.set_timeout(0.05)
        for begin in range(3):
            writer.put(unroll(begin), begin=begin)
        with pytest.raises(moolink.TimeoutError):
            rpc.sync("nobody", "nothing")  # the time limit has passed for the items, too
        assert [queue.get(1, timeout=20).begin[0] for _ in range(3)] == [0, 1, 2]
        writer.flush(20)
        assert writer.stats() == {"put": 3, "accepted": 3, "lost": 0}


def test_late_items_in_a_full_queue_make_room(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls", max_size=1) as queue:
        old, new = net.writer("old"), net.writer("new")
        old.put(unroll(0), begin=0)
        old.flush(20)
        new.put(unroll(9), begin=9)
        waiting.until(lambda: queue.stats()["waiting_for_room"] == 1, "an item in line")
        queue.version = 9
        assert queue.get(1, max_lag=1, timeout=20).begin.tolist() == [9]


def test_a_partial_batch_after_the_time_is_up(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer = net.writer()
        for begin in range(2):
            writer.put(unroll(begin), begin=begin)
        writer.flush(20)
        with pytest.raises(moolink.TimeoutError, match="2 of 3 items of 'unrolls' came"):
            queue.get(3, timeout=0.01)
        batch = queue.get(4, timeout=0.01, at_least=1)
        assert len(batch) == 2
        assert batch.data["obs"].shape == (2, 3, 4)


def test_an_item_of_another_form_is_its_writer_s_error(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        good, bad = net.writer("good"), net.writer("bad")
        good.put(unroll(1), begin=0)
        good.flush(20)
        bad.put(unroll(1, length=2), begin=0)
        with pytest.raises(
            moolink.RemoteError, match=r"obs: expected \(3, 4\) uint8, got \(2, 4\)"
        ):
            bad.flush(20)
        assert len(queue.get(1, timeout=20)) == 1


def test_torch_items_become_torch_batches(net: Net) -> None:
    import torch

    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer = net.writer()
        for i in range(2):
            writer.put((torch.full((3,), i), [torch.ones(2, dtype=torch.bfloat16)]), begin=0)
        data = queue.get(2, timeout=20).data
        assert data[0].tolist() == [[0, 0, 0], [1, 1, 1]]
        assert data[1][0].dtype == torch.bfloat16


def test_a_writer_that_dies_in_line_loses_what_has_no_room_and_holds_up_nobody(net: Net) -> None:
    with (
        TrajectoryQueue(net.learner, "unrolls", max_size=1) as queue,
        processes.killed_at_the_end() as started,
    ):
        dying = processes.start_python("-m", "tests.trajectories.writing", net.address)
        started.append(dying)
        waiting.until(lambda: queue.stats()["waiting_for_room"] == 2, "a full queue")
        dying.kill()
        waiting.until(lambda: queue.stats()["withdrawn"] == 2, "the end of its calls")
        writer = net.writer()
        writer.put(unroll(7), begin=7)
        assert queue.get(1, timeout=20).begin.tolist() == [0]
        assert queue.get(1, timeout=20).begin.tolist() == [7]


def test_a_learner_that_is_restarted_gets_the_next_items(net: Net) -> None:
    writer = net.writer()
    queue = TrajectoryQueue(net.learner, "unrolls", max_size=1)
    for begin in range(2):
        writer.put(unroll(begin), begin=begin)
    port = net.address
    waiting.until(lambda: queue.stats()["waiting_for_room"] == 1, "a full queue")
    net.learner.close()
    net.learner = moolink.Rpc("learner")
    with TrajectoryQueue(net.learner, "unrolls") as successor:
        net.learner.listen(port)
        while writer.stats()["accepted"] < 2:  # one that is put before the end is heard of
            writer.put(unroll(5), begin=5, timeout=20)  # is lost, too
            writer.flush(20)
        assert successor.get(1, timeout=20).begin.tolist() == [5]
        assert writer.stats()["lost"] in (1, 2)


def test_closing_ends_those_who_wait(net: Net) -> None:
    queue = TrajectoryQueue(net.learner, "unrolls")
    raised: list[BaseException] = []

    def get() -> None:
        try:
            queue.get(1)
        except moolink.Closed as closed:
            raised.append(closed)

    thread = threading.Thread(target=get)
    thread.start()
    queue.close()
    thread.join(waiting.TIMEOUT)
    assert len(raised) == 1


def test_what_waits_can_be_taken_after_closing(net: Net) -> None:
    queue = TrajectoryQueue(net.learner, "unrolls")
    writer = net.writer()
    writer.put(unroll(1), begin=0)
    writer.flush(20)
    queue.close()
    assert len(queue.get(1)) == 1
    with pytest.raises(moolink.Closed):
        queue.get(1)


def test_bad_arguments_are_refused(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        with pytest.raises(ValueError, match="at_least must be at most 1, got 2"):
            queue.get(1, at_least=2)
        with pytest.raises(ValueError, match="at_least must be at least 1, got 0"):
            queue.get(1, at_least=0)
        with pytest.raises(TypeError, match=r"at_least must be an integer, got 0\.5"):
            queue.get(1, at_least=0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="count must be an integer, got 1"):
            queue.get(1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="max_lag must be an integer, got '3'"):
            queue.get(1, max_lag="3")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_lag must be at least 0, got -1"):
            queue.get(1, max_lag=-1)
        with pytest.raises(ValueError, match="late must be"):
            queue.get(1, late="keep")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"this peer has a trajectory queue of .* already"):
            TrajectoryQueue(net.learner, "unrolls")
    with pytest.raises(TypeError, match="dim must be an integer"):
        TrajectoryQueue(net.learner, "unrolls", dim="time")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_size must be at least 1"):
        TrajectoryQueue(net.learner, "unrolls", max_size=0)
    with pytest.raises(ValueError, match="ahead must be at least 1"):
        net.writer(ahead=0)


def test_a_batch_that_the_queue_can_never_have_is_refused(net: Net) -> None:
    with (
        TrajectoryQueue(net.learner, "unrolls", max_size=2) as queue,
        pytest.raises(ValueError, match="3 items are more than max_size, 2"),
    ):
        queue.get(3, timeout=0.05)


def test_versions_that_are_no_versions_are_refused_and_harm_nobody(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer = net.writer()
        with pytest.raises(TypeError, match="begin must be an integer, got None"):
            writer.put(unroll(0), begin=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="end, 1, is below begin, 2"):
            writer.put(unroll(0), begin=2, end=1)
        with pytest.raises(TypeError, match="version must be an integer, got 1"):
            queue.version = 1.5  # type: ignore[assignment]
        for begin, end in ((None, 0), ("a", "b"), (0, None), (2, 1), (0, 2**70)):
            with pytest.raises(moolink.Error):
                net.actors[-1].sync(
                    "learner", "moolink.trajectories/unrolls/put", unroll(9), begin, end
                )
        writer.put(unroll(1), begin=np.int64(0))  # type: ignore[arg-type]
        batch = queue.get(1, max_lag=3, timeout=20)
        assert batch.data["obs"].max() == 1


def test_threads_that_take_at_once_get_items_of_their_own(net: Net) -> None:
    with TrajectoryQueue(net.learner, "unrolls", max_size=1000) as queue:
        writer = net.writer(ahead=300)
        for i in range(240):
            writer.put({"x": np.full(200_000, i, np.int16)}, begin=0)
        writer.flush(60)
        taken: list[int] = []

        def take() -> None:
            for _ in range(10):
                x = queue.get(8, timeout=20).data["x"]
                assert (x == x[:, :1]).all()
                taken.extend(x[:, 0].tolist())

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(waiting.TIMEOUT)
        assert sorted(taken) == list(range(240))


def test_closing_ends_the_writers_that_wait_for_room(net: Net) -> None:
    queue = TrajectoryQueue(net.learner, "unrolls", max_size=1)
    writer = net.writer(ahead=3)
    for begin in range(2):
        writer.put(unroll(begin), begin=begin)
    waiting.until(lambda: queue.stats()["waiting_for_room"] == 1, "a full queue")
    queue.close()
    with pytest.raises(moolink.RemoteError, match="the queue 'unrolls' was closed"):
        writer.flush(20)
    assert queue.get(1).begin.tolist() == [0]
    assert queue.stats()["waiting_for_room"] == 0


def test_a_learner_whose_queue_is_not_there_yet_gets_the_next_items(net: Net) -> None:
    writer = net.writer()
    writer.put(unroll(1), begin=0)
    writer.flush(20)
    assert writer.stats() == {"put": 1, "accepted": 0, "lost": 1}
    with TrajectoryQueue(net.learner, "unrolls") as queue:
        writer.put(unroll(2), begin=0)
        assert queue.get(1, timeout=20).data["obs"].max() == 2


def test_a_long_wait_is_logged(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "_LINES", (0.01,))
    with (
        TrajectoryQueue(net.learner, "unrolls") as queue,
        pytest.raises(moolink.TimeoutError),
    ):
        queue.get(2, timeout=0.1)
    assert "the queue 'unrolls' waits for 2 items; 0 are there, 0 were dropped" in caplog.text


@pytest.mark.parametrize("flushes", [False, True])
def test_closing_a_writer_ends_put_and_flush_of_other_threads(flushes: bool) -> None:
    raised: list[BaseException] = []
    with (
        moolink.Rpc("learner") as learner,
        moolink.Rpc("actor") as actor,
        TrajectoryQueue(learner, "q", max_size=1),
    ):
        actor.connect(learner.listen("127.0.0.1:0")[0])
        writer = TrajectoryWriter(actor, "q", "learner")

        def run() -> None:
            try:
                while True:
                    writer.put(np.zeros(3), 0)
                    if flushes:
                        writer.flush()
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        waiting.until(lambda: writer.stats()["put"] >= 2, "items that wait")
        writer.close()
        thread.join()
    assert [type(error) for error in raised] == [moolink.Closed]
