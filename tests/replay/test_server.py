"""A replay that is served: clients, writers, mapped batches, servers that are restarted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import moolink
from moolink.replay import (
    Fifo,
    MinSize,
    Prioritized,
    ReplayClient,
    ReplayServer,
    SampleToInsertRatio,
    Table,
    Writer,
    client,
    names,
)
from tests import processes, waiting


class Net:
    def __init__(self, table: Table) -> None:
        self.table = table
        self.peers: list[moolink.Rpc] = []
        self.address = "127.0.0.1:0"
        self.start(moolink.Replay(table, seed=1))

    def start(self, replay: moolink.Replay) -> None:
        self.replay = replay
        self.rpc = moolink.Rpc("replay")
        self.server = ReplayServer(self.rpc, replay)
        self.address = self.rpc.listen(self.address)[0]

    def stop(self) -> None:
        self.rpc.close()
        self.server.close()
        self.replay.close()

    def stats_of(self, count: str) -> int:
        return int(self.replay.stats()["tables"]["t"][count])

    def client(self, name: str = "client", **options: Any) -> ReplayClient:
        self.peers.append(moolink.Rpc(name))
        self.peers[-1].connect(self.address)
        return ReplayClient(self.peers[-1], server="replay", **options)


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    net = Net(getattr(request, "param", Table("t", 100, Fifo())))
    yield net
    for peer in net.peers:
        peer.close()
    net.stop()


def table(**options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("net", [Table("t", **options)], indirect=True, ids=[""])


def item(i: int) -> dict[str, Any]:
    return {"obs": np.full((3, 2), i, np.uint8), "reward": float(i)}


@table(max_size=100, sampler=Prioritized(1.0))
def test_a_client_does_what_a_replay_does(net: Net) -> None:
    client = net.client()
    key = client.insert(item(0), priority=0.0)
    keys = client.extend({"obs": np.ones((2, 3, 2), np.uint8), "reward": np.ones(2, "f4")}, [3, 1])
    batch = client.sample(4000)
    assert batch.data["obs"].shape == (4000, 3, 2)
    assert set(batch.keys.tolist()) == set(keys.tolist())
    assert batch.data["reward"].dtype == np.float32
    np.testing.assert_allclose(np.mean(batch.keys == keys[0]), 0.75, atol=0.03)
    assert client.update_priorities([*keys, 12345 << 32], [0.0, 0.0, 1.0]) == 2
    assert client.update_priorities([key], [1.0]) == 1
    assert set(client.sample(10).keys.tolist()) == {key}
    assert client.remove(keys) == 2
    assert client.stats()["tables"]["t"]["size"] == 1
    assert client.tables() == net.replay.tables()
    client.reset()
    assert client.stats()["tables"]["t"]["size"] == 0


def test_batches_are_mapped_on_one_host(net: Net) -> None:
    client = net.client()
    client.extend({"x": np.zeros((50, 84, 84, 4), np.uint8)})
    client.sample(1)  # what items are made of is known from the first batch on
    sent = net.rpc.stats()["bytes_written"]
    batch = client.sample(64)
    assert batch.data["x"].nbytes == 64 * 84 * 84 * 4
    assert not batch.data["x"].flags.writeable
    assert net.rpc.stats()["bytes_written"] - sent < 20_000


def test_torch_batches_can_be_written(net: Net) -> None:
    import torch

    client = net.client()
    client.insert({"x": torch.ones(300, 300, dtype=torch.bfloat16)})
    for _ in range(2):
        x = client.sample(2).data["x"]
        assert x.dtype == torch.bfloat16
        x += 1
        assert (x == 2).all()


@table(max_size=100, sampler=Fifo(), limiter=MinSize(3))
def test_who_waits_in_vain_is_told_why(net: Net) -> None:
    client = net.client()
    client.insert(item(1))
    with pytest.raises(moolink.QueueFull, match="table 't' at 'replay' has 1 items after 1 insert"):
        client.sample(1, timeout=0)
    with pytest.raises(moolink.TimeoutError, match=r"nothing to sample for 0\.05 s"):
        client.sample(1, timeout=0.05)
    sampled: list[int] = []
    thread = threading.Thread(target=lambda: sampled.append(len(client.sample(2))))
    thread.start()
    waiting.until(lambda: net.stats_of("waiting_samples") == 1, "a sample that waits")
    net.client("other").extend({"obs": np.ones((2, 3, 2), np.uint8), "reward": np.ones(2, "f4")})
    thread.join(waiting.TIMEOUT)
    assert sampled == [2]


@table(max_size=2, sampler=Fifo(), remover=None, max_times_sampled=1)
def test_a_full_table_makes_writers_wait(net: Net) -> None:
    client = net.client()
    with pytest.raises(moolink.QueueFull, match="2 of 3 items are in"):
        client.extend({"i": np.arange(3)}, timeout=0)
    inserted: list[int] = []
    thread = threading.Thread(target=lambda: inserted.append(client.insert({"i": 3})))
    thread.start()
    waiting.until(lambda: net.stats_of("waiting_inserts") == 1, "an insert that waits")
    assert net.client("other").sample(2).data["i"].tolist() == [0, 1]
    thread.join(waiting.TIMEOUT)
    assert len(inserted) == 1


@table(max_size=2, sampler=Fifo(), remover=None, max_times_sampled=1)
def test_a_full_table_costs_a_writer_with_a_short_time_limit_no_item(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "TURN", 0.2)
    client = net.client()
    rpc = net.peers[-1]
    rpc.set_timeout(0.1)
    with client.writer(keep=1) as writer:
        for i in range(6):
            writer.append({"i": i})
            writer.create_item({"i": writer.history["i"][-1]})
        flush = threading.Thread(target=writer.flush)
        flush.start()
        ended = rpc.stats()["calls_succeeded"]
        waiting.until(
            lambda: rpc.stats()["calls_succeeded"] + rpc.stats()["calls_failed"] > ended + 1,
            "a call whose items found no room",
        )
        taken = [net.replay.sample(1, timeout=waiting.TIMEOUT).data["i"].item() for _ in range(6)]
        flush.join(waiting.TIMEOUT)
        assert not flush.is_alive()
    assert taken == [0, 1, 2, 3, 4, 5]


@table(max_size=1, remover=None)
def test_a_client_that_dies_waits_no_more(net: Net) -> None:
    net.client().insert({"i": 0})
    with processes.killed_at_the_end() as started:
        program = (
            "import moolink, sys; rpc = moolink.Rpc('dying'); rpc.connect(sys.argv[1]);"
            "moolink.ReplayClient(rpc, server='replay').insert({'i': 1})"
        )
        started.append(processes.start_python("-c", program, net.address))
        waiting.until(lambda: net.stats_of("waiting_inserts") == 1, "an insert that waits")
        started[0].kill()
        waiting.until(lambda: net.stats_of("waiting_inserts") == 0, "its end")


def test_items_of_a_writer_share_their_steps(net: Net) -> None:
    client = net.client()
    with client.writer(keep=4) as writer:
        for i in range(20):
            writer.append({"obs": np.full(3, i, np.float32), "action": i})
            if len(writer) >= 4:
                obs, action = writer.history["obs"], writer.history["action"]
                assert writer.create_item({"obs": obs[-4:], "action": action[-1]}) is None
    batch = client.sample(17)
    assert batch.data["obs"].shape == (17, 4, 3)
    np.testing.assert_array_equal(batch.data["action"], 3)  # the oldest
    assert net.replay.stats()["stores"][0]["steps"] == 20
    assert net.replay.stats()["tables"]["t"]["size"] == 17


def test_a_writer_that_is_closed_leaves_nothing_and_can_go_on(net: Net) -> None:
    writer = net.client().writer(keep=3)
    for _ in range(2):
        for i in range(5):
            writer.append({"i": i})
        writer.create_item({"i": writer.history["i"][-1]})
        writer.close()
        waiting.until(lambda: net.server.stats()["writers"] == 0, "the writer's end")
    assert net.replay.stats()["stores"][0]["steps"] == 2
    assert net.replay.stats()["tables"]["t"]["size"] == 2


@table(max_size=40, sampler=Fifo(), remover=None, max_times_sampled=1)
def test_writers_of_many_episodes_lose_nothing(net: Net) -> None:
    def write(name: str) -> None:
        with net.client(name).writer(keep=3, chunk=5) as writer:
            for i in range(100):
                writer.append({"x": i, "last": i % 7 == 6})
                if len(writer) >= 2:
                    x = writer.history["x"]
                    writer.create_item({"pair": x[-2:], "last": writer.history["last"][-1]})
                if i % 7 == 6:
                    writer.end_episode()

    threads = [threading.Thread(target=write, args=(f"writer{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    reader = net.client("reader")
    pairs = []
    while len(pairs) < 3 * 85:
        batch = reader.sample(10, timeout=20)
        pairs += [tuple(pair) for pair in batch.data["pair"].tolist()]
    for thread in threads:
        thread.join(waiting.TIMEOUT)
    expected = [(i - 1, i) for i in range(100) if i % 7 != 0]
    assert sorted(pairs) == sorted(3 * expected)


def test_a_writer_s_mistakes_are_its_errors(net: Net) -> None:
    client = net.client()
    writer = client.writer(keep=2)
    writer.append({"x": np.zeros(3), "n": 0})
    with pytest.raises(ValueError, match=r"x: expected float64 \(3,\), got float64 \(4,\)"):
        writer.append({"x": np.zeros(4), "n": 0})
    with pytest.raises(ValueError, match=r"n: expected int64, got the number 0\.5"):
        writer.append({"x": np.zeros(3), "n": 0.5})
    with pytest.raises(ValueError, match="without waiting"):
        writer.create_item({"x": writer.history["x"][-1]}, timeout=0)
    for priority in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            writer.create_item({"x": writer.history["x"][-1]}, priority)
    writer.create_item({"x": writer.history["x"][-1]}, table="nowhere")
    with pytest.raises(moolink.RemoteError, match="there is no table 'nowhere'"):
        writer.flush()


def test_a_writer_takes_arrays_of_several_libraries(net: Net) -> None:
    writer = net.client().writer(keep=8, chunk=100)
    bf16 = ml_dtypes.bfloat16
    for i in range(8):
        of_torch = torch.full((2,), i, dtype=torch.bfloat16)
        writer.append({"x": of_torch if i in (0, 1, 4) else np.full(2, i, bf16)})
    writer.create_item({"x": writer.history["x"][:]})
    writer.flush()
    assert net.replay.sample(1).data["x"][0, :, 0].tolist() == list(range(8))


def test_the_steps_of_a_writer_that_has_died_are_given_up(net: Net) -> None:
    with processes.killed_at_the_end() as started:
        program = (
            "import moolink, sys; rpc = moolink.Rpc('dying'); rpc.connect(sys.argv[1]);"
            "writer = moolink.ReplayClient(rpc, server='replay').writer(keep=50, chunk=10)\n"
            "for i in range(20): writer.append({'i': i})\n"
            "writer.create_item({'i': writer.history['i'][-1]}); writer.flush()\n"
            "sys.stdin.read()"
        )
        started.append(processes.start_python("-c", program, net.address))
        waiting.until(lambda: net.replay.stats()["tables"]["t"]["size"] == 1, "an item")
        assert net.replay.stats()["stores"][0]["steps"] == 20
        started[0].kill()
        started[0].wait()
    connected = {"dying"}
    waiting.until(
        lambda: connected.isdisjoint(p["name"] for p in net.rpc.peers() if p["connected"]),
        "its end",
    )
    with net.client().writer(keep=1) as writer:
        writer.append({"i": 7})
        writer.create_item({"i": writer.history["i"][-1]})
    assert net.replay.stats()["stores"][0]["steps"] == 2


def restarted(net: Net, path: Path) -> None:
    """Another server, from a checkpoint."""
    net.replay.checkpoint(path)
    net.stop()
    net.start(moolink.Replay.restore(path, net.table))


def test_a_server_that_is_restarted_from_its_checkpoint_is_found_again(
    net: Net, tmp_path: Path
) -> None:
    client = net.client()

    def write(writer: Writer, i: int) -> None:
        writer.append({"i": i})
        if len(writer) >= 2:
            writer.create_item({"pair": writer.history["i"][-2:]})

    writer = client.writer(keep=2)
    for i in range(5):
        write(writer, i)
    writer.flush()
    with client.batches(1) as batches:
        next(batches)
        restarted(net, tmp_path / "replay")
        assert client.sample(1).data["pair"].tolist() == [[0, 1]]
        for i in range(5, 10):
            write(writer, i)
        writer.flush()
        next(batches)
    last = client.sample(1, timeout=20)
    assert last.data["pair"].tolist() == [[0, 1]]
    assert client.stats()["tables"]["t"]["size"] >= 8
    pairs = net.replay.sample(1000).data["pair"]
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()


def test_batches_end_with_the_client_s_peer(net: Net) -> None:
    client = net.client()
    batches = client.batches(1)
    net.peers[-1].close()
    with pytest.raises(moolink.Closed):
        next(batches)


def test_two_replays_of_one_peer(net: Net) -> None:
    with (
        moolink.Replay(Table("u", 10)) as other,
        ReplayServer(net.rpc, other, "other"),
    ):
        client = net.client(name="other")
        second = ReplayClient(net.peers[-1], "other", server="replay")
        second.insert({"i": 1})
        assert client.stats()["tables"]["t"]["size"] == 0
        assert second.stats()["tables"]["u"]["size"] == 1
        with pytest.raises(ValueError, match=r"this peer has a replay server of .* already"):
            ReplayServer(net.rpc, other, "other")


def test_writers_whose_steps_name_their_arrays_in_another_order(net: Net) -> None:
    for first, second in ("ab", "ba"):
        with net.client(first).writer(keep=2) as writer:
            for _ in range(2):
                writer.append({first: np.array(ord(first)), second: np.array(ord(second))})
            history = writer.history
            writer.create_item({second: history[second][-1], first: history[first][-1]})
    data = net.replay.sample(1).data
    assert {name: set(column.tolist()) for name, column in data.items()} == {"a": {97}, "b": {98}}
    net.replay.remove(net.replay.sample(1).keys)
    data = net.replay.sample(1).data
    assert {name: set(column.tolist()) for name, column in data.items()} == {"a": {97}, "b": {98}}


def test_a_writer_goes_on_with_the_right_steps_after_an_error(net: Net) -> None:
    writer = net.client().writer(keep=3, chunk=1)
    raised = 0
    for i in range(20):
        try:
            writer.append({"i": i})
        except moolink.RemoteError:
            raised += 1
            continue
        if i == 3:
            writer.create_item({"i": writer.history["i"][-1]}, table="nowhere")
        elif raised:
            writer.create_item({"i": writer.history["i"][-1]})
            break
    writer.flush()
    assert raised == 1
    assert net.replay.sample(1).data["i"].tolist() == [i]


@table(max_size=100, sampler=Fifo(), limiter=SampleToInsertRatio(1.0, 1, 1.0))
def test_a_batch_that_the_limiter_grants_bit_by_bit_is_whole(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "TURN", 0.05)
    reader = net.client()
    batches: list[moolink.replay.Batch] = []
    thread = threading.Thread(target=lambda: batches.append(reader.sample(6)))
    thread.start()
    asked = net.rpc.stats()["calls_received"]
    for i in range(6):
        net.replay.insert({"i": i}, timeout=20)
        waiting.until(
            lambda n=i: net.rpc.stats()["calls_received"] > asked + n + 1 or bool(batches),  # type: ignore[misc]
            "the next turn",
        )
    thread.join(waiting.TIMEOUT)
    assert len(batches[0]) == 6
    assert batches[0].data["i"].shape == batches[0].keys.shape == (6,)


def test_a_sample_in_time_from_a_server_that_is_not_there(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_GRACE", 0.05)
    nowhere = ReplayClient(net.client()._rpc, server="nowhere")
    with pytest.raises(moolink.TimeoutError, match="the replay 'replay' at 'nowhere'"):
        nowhere.sample(1, timeout=0.05)
    net.server.close()
    with pytest.raises(moolink.TimeoutError, match="the replay 'replay' at 'replay'"):
        net.client("other").sample(1, timeout=0.05)


def test_a_writer_that_an_exception_ends_leaves_nothing(net: Net) -> None:
    with pytest.raises(ArithmeticError), net.client().writer(keep=3, chunk=1) as writer:
        for i in range(5):
            writer.append({"i": i})
        writer.create_item({"i": writer.history["i"][-1]})
        waiting.until(lambda: net.server.stats()["writers"] == 1, "the writer")
        raise ArithmeticError
    waiting.until(lambda: net.server.stats()["writers"] == 0, "the writer's end")


def test_a_writer_s_error_leaves_no_second_writer_at_the_server(net: Net) -> None:
    writer = net.client().writer(keep=2)
    for table in ("nowhere", None):
        writer.append({"x": 1})
        writer.create_item({"x": writer.history["x"][-1]}, table=table)
        if table:
            with pytest.raises(moolink.RemoteError, match="nowhere"):
                writer.flush()
    writer.flush()
    waiting.until(lambda: net.server.stats()["writers"] == 1, "the end of the first one")
    assert net.stats_of("size") == 1


def test_values_that_are_no_arrays_are_named(net: Net) -> None:
    with pytest.raises(TypeError, match="a str is in a step: only arrays"):
        net.client().insert({"x": "text"})
    with pytest.raises(ValueError, match=r"expected one priority, or 2, got .* shape \(3,\)"):
        net.client("other").extend({"x": np.zeros(2)}, [1, 2, 3])


def test_a_message_that_no_client_sends_harms_nobody(net: Net) -> None:
    good = net.client().writer(keep=2)
    good.append({"x": 1})
    good.create_item({"x": good.history["x"][-1]})
    good.flush()
    call = net.peers[-1].sync
    write = "moolink.replay/replay/write"
    steps = [(1, {"x": np.zeros(1, np.int64)})]
    ok = ({"x": 0}, 1, [(0, 0, 0)], None, [0], np.ones(1))
    wrong: list[tuple[Any, ...]] = [
        (-1, steps, []),
        (5, steps, []),
        (0, [(2**40, steps[0][1])], [ok]),
        (0, [*steps, (1, {"x": np.zeros(1)})], [ok]),
        (0, steps, [({"x": 0}, 1, [(0, 0, 0)], None, [-1], np.ones(1))]),
        (0, steps, [({"x": 7}, 1, [(0, 0, 0)], None, [0], np.ones(1))]),
        (0, steps, [({"x": 0}, 1, [(9, 0, 0)], None, [0], np.ones(1))]),
        (0, steps, [({"x": 0}, 2**32 - 1, [(0, 0, 2**32 - 1)], None, [0], np.ones(1))]),
        (0, steps, [({"x": 0}, 1, [(0, 0, 0)], None, [0], np.array([np.nan]))]),
        (0, steps, [({"x": 0}, 1, [(0, 0, 0)], None, [0], np.ones(2))]),
        (0, steps, [({"x": 0}, 1, [(0, 0, 0)], None, [0], 1.0)]),
        (0, [], [ok]),
        (0, [(1, {"x": "text"})], [ok]),
        ("first", steps, [ok]),
        (0, steps, 7),
        (0, 7, [ok]),
    ]
    for i, arguments in enumerate(wrong):
        with pytest.raises(moolink.RemoteError):
            call("replay", write, f"client/{i}", 0, *arguments)
    with pytest.raises(moolink.RemoteError):
        call("replay", "moolink.replay/replay/sample", None, -1, 1.0, False)
    good.create_item({"x": good.history["x"][-1]})
    good.flush()
    assert net.replay.sample(4).data["x"].tolist() == [1, 1, 1, 1]


def test_the_server_s_end_ends_what_waits_there(net: Net) -> None:
    reader = net.client()
    batches: list[moolink.replay.Batch] = []
    thread = threading.Thread(target=lambda: batches.append(reader.sample(1)))
    thread.start()
    waiting.until(lambda: net.stats_of("waiting_samples") == 1, "a sample that waits")
    net.server.close()
    assert net.stats_of("waiting_samples") == 0
    net.server = ReplayServer(net.rpc, net.replay)
    net.replay.insert({"i": 3})
    thread.join(waiting.TIMEOUT)
    assert batches[0].data["i"].tolist() == [3]
