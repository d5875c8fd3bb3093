"""Metrics of a process: the user's own, and those of moolink's objects."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import moolink
from moolink import metrics
from moolink.metrics.family import HistogramValue
from moolink.metrics.registry import Registry
from moolink.metrics.rounds import PHASES
from moolink.metrics.sources import Sources, Value
from moolink.metrics.table import BY_NAME, TABLE
from moolink.replay import Table
from moolink.rpc import report
from tests.env_pool.pool_environments import Counter
from tests.waiting import TIMEOUT, until


def values(metric: str, /, **labels: str) -> list[float | HistogramValue]:
    return [
        sample.value
        for family in metrics.collect()
        if family.name == metric
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    ]


@pytest.fixture
def rpc() -> Iterator[moolink.Rpc]:
    with moolink.Rpc() as one:
        yield one


def test_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(metrics, "registry", registry)
    metrics.counter("episodes_total", env="Pong").inc()
    metrics.counter("episodes_total", env="Pong").inc(2)
    metrics.gauge("return", "Mean return.").set(-21)
    metrics.gauge("return").inc(1.5)
    times = metrics.histogram("step_seconds", bounds=[0.1, 1])
    for seconds in (0.1, 0.5, 7):
        times.observe(seconds)
    episodes, returns, steps = registry.families()
    assert episodes == ("episodes_total", "counter", "", [({"env": "Pong"}, 3.0)])
    assert returns == ("return", "gauge", "Mean return.", [({}, -19.5)])
    (sample,) = steps.samples
    assert sample.value == ((0.1, 1), (1, 1, 1), 7.6)


def test_what_is_no_metric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    monkeypatch.setattr(metrics, "registry", registry)
    metrics.gauge("x")
    with pytest.raises(ValueError, match="'x' is a gauge, and no counter"):
        metrics.counter("x")
    for name in ("moolink_x", "process_cpu_seconds_total"):
        with pytest.raises(ValueError, match="are moolink's own"):
            metrics.gauge(name)
    for label in ("le", "peer"):
        with pytest.raises(ValueError, match=f"'{label}' is a label that is set by others"):
            metrics.gauge("x", **{label: "1"})
    with pytest.raises(ValueError, match="'a b' is no name"):
        metrics.gauge("a b")
    with pytest.raises(ValueError, match="'é' is no name"):
        metrics.gauge("x", é="1")
    with pytest.raises(ValueError, match="only grows"):
        metrics.counter("y").inc(-1)
    with pytest.raises(ValueError, match="only grows"):
        metrics.counter("y").inc(math.nan)
    with pytest.raises(ValueError, match="'__name__': labels that begin"):
        metrics.gauge("x", __name__="z")
    for bounds in ([1, 1], [2, 1], [], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match=r"must ascend|must be finite"):
            metrics.histogram("z", bounds=bounds)
    metrics.histogram("z", bounds=[1, 2])
    with pytest.raises(ValueError, match=r"'z' has the bounds \(1.0, 2.0\), not \(1.0,\)"):
        metrics.histogram("z", bounds=[1])
    for name in ("z_count", "z_bucket"):
        with pytest.raises(ValueError, match=f"'{name}' and 'z' would both be '{name}'"):
            metrics.gauge(name)
    with pytest.raises(ValueError, match="'y_total' and 'y' would both be 'y_total'"):
        metrics.counter("y_total")
    assert [family.name for family in registry.families()] == ["x", "y", "z"]


def test_values_of_other_libraries_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 would stop to grow at 2^24, and JSON has no numpy scalars and no tensors."""
    registry = Registry()
    monkeypatch.setattr(metrics, "registry", registry)
    metrics.counter("x").inc(np.float32(2**24))
    metrics.counter("x").inc(np.float32(1))
    metrics.gauge("y").inc(torch.tensor(1.5).item())
    metrics.gauge("y").inc(torch.tensor(1.0))
    times = metrics.histogram("z", bounds=np.array([0.5, 1.0, np.inf]).tolist())
    for value in (np.float32(0.5), math.nan, math.inf):
        times.observe(value)
    x, y, z = json.loads(json.dumps(registry.families()))
    assert x[3] == [[{}, 2**24 + 1]]
    assert y[3] == [[{}, 2.5]]
    assert z[3] == [[{}, [[0.5, 1.0], [1, 0, 2], math.inf]]]


def test_labels_of_any_name_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "registry", Registry())
    found = metrics.gauge("x", name="Pong", number=1)  # type: ignore[arg-type]
    assert metrics.gauge("x", number="1", name="Pong") is found
    assert metrics.gauge("x", name="Pong", number="1") is found
    assert metrics.gauge("x", name="Pong", number=True) is not found  # type: ignore[arg-type]
    metrics.gauge("x", name="\ud800")
    assert "\ud800".encode("utf-8", "replace") == b"?"
    assert [s.labels["name"] for s in metrics.registry.families()[0].samples][-1] == "?"


def test_the_collector_may_close_a_pool_while_metrics_are_collected() -> None:
    sources, closed = Sources(), []

    class Owner:
        """Is in a cycle, so that the collector frees it, and with it what it owns."""

        def __init__(self) -> None:
            self.source = Source()
            self.itself = self
            weakref.finalize(self, close, self.source)

    class Source:
        def _metrics(self) -> list[Value]:
            return []

    def close(source: Source) -> None:
        sources.remove(source)
        closed.append(source)

    kept = [Source() for _ in range(3)]
    for source in kept:
        sources.add(source)
    owner = Owner()
    sources.add(owner.source)
    del owner
    with sources._lock:  # as a thread has it in which the collector runs
        gc.collect()
        assert closed == []
    gc.collect()
    assert len(closed) == 1
    assert len(sources.of(None)) == 3


def test_a_child_has_locks_of_its_own() -> None:
    registry = Registry()
    counter = registry.counter("x_total", "", {})
    with registry.lock:
        child = os.fork()
        if child == 0:
            counter.inc()
            os._exit(0 if counter.read() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_peer_s_calls(rpc: moolink.Rpc) -> None:
    def total(name: str) -> float:
        return sum(value for value in values(name) if isinstance(value, float | int))

    with moolink.Rpc("server") as server:
        server.define("f", lambda: None)
        rpc.connect(server.listen("127.0.0.1:0")[0])
        before = total("moolink_calls_sent_total")
        rpc.sync("server", "f")
        assert total("moolink_calls_sent_total") == before + 1
        own = {family.name: family for family in metrics.sources.families(rpc)}
        assert own["moolink_calls_succeeded_total"].samples == [({}, 1)]
        of_server = {family.name: family for family in metrics.sources.families(server)}
        assert of_server["moolink_calls_received_total"].samples == [({}, 1)]
        assert of_server["moolink_calls_sent_total"].samples == [({}, 0)]
    assert not any(
        family.name.startswith("moolink_calls") for family in metrics.sources.families(server)
    )


def test_rounds() -> None:
    with moolink.Broker(first=True) as broker, moolink.Rpc("alone") as rpc:
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        group = moolink.Group(rpc, "metrics-rounds")
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        labels = {"group": "metrics-rounds", "name": "model"}
        with moolink.Accumulator("model", model.parameters(), group=group) as accumulator:
            for step in accumulator.steps(optimizer, until=lambda totals: totals["n"] >= 3):
                model(torch.ones(1, 2)).sum().backward()
                step.reduce(batch_size=4, counters={"n": 1})
            assert values("moolink_group_members", group="metrics-rounds") == [1]
            assert values("moolink_rounds_total", **labels) == [3]
            assert values("moolink_model_version", **labels) == [3]
            assert values("moolink_contributions_total", **labels) == [3]
            assert values("moolink_samples_total", **labels) == [12]
            assert values("moolink_leader", **labels) == [1]
            (seconds,) = values("moolink_round_seconds", **labels)
            assert isinstance(seconds, HistogramValue)
            assert sum(seconds.counts) == 2
            phases = values("moolink_round_phase_seconds", **labels)
            assert [sum(phase.counts) for phase in phases if not isinstance(phase, float)] == [
                3
            ] * 3
            assert accumulator.get_gradient_stats()["phase_seconds"].keys() == set(PHASES)
        assert values("moolink_rounds_total", **labels) == []
        group.close()
        assert values("moolink_group_members", group="metrics-rounds") == []


def test_histograms_of_objects_with_the_same_labels_are_added() -> None:
    class Rounds:
        def _metrics(self) -> list[Value]:
            of_each = HistogramValue((1.0, 2.0), (1, 2, 3), 4.5)
            return [("moolink_round_seconds", {"group": "g", "name": "n"}, of_each)]

    sources, rounds = Sources(), [Rounds(), Rounds()]
    for source in rounds:
        sources.add(source)
    (family,) = [f for f in sources.families() if f.name == "moolink_round_seconds"]
    assert [sample.value for sample in family.samples] == [
        HistogramValue((1.0, 2.0), (2, 4, 6), 9.0)
    ]


def test_the_data_plane(rpc: moolink.Rpc) -> None:
    replay = moolink.Replay(Table("metrics", 10))
    replay.extend({"x": np.arange(3)})
    replay.sample(2)
    assert values("moolink_replay_items", table="metrics") == [3]
    assert values("moolink_replay_inserts_total", table="metrics") == [3]
    assert values("moolink_replay_samples_total", table="metrics") == [2]
    replay.close()
    assert values("moolink_replay_items", table="metrics") == []

    with moolink.Publisher(rpc, "weights") as publisher:
        assert values("moolink_published_version", name="weights") == []
        publisher.publish({"w": np.ones(2)}, 7)
        with moolink.Rpc() as other:
            other.connect(rpc.listen("127.0.0.1:0")[0])
            with moolink.Subscriber(other, "weights", rpc.get_name()) as subscriber:
                subscriber.wait(7, 20)
                assert values("moolink_subscribed_version", name="weights") == [7]
            assert values("moolink_subscribed_version", name="weights") == []
        assert values("moolink_published_version", name="weights") == [7]
    assert values("moolink_published_version", name="weights") == []

    with moolink.TrajectoryQueue(rpc, "queue", max_size=4):
        assert values("moolink_queue_items", name="queue") == [0]
    assert values("moolink_queue_items", name="queue") == []

    with moolink.InferenceServer(rpc, "policy", lambda batch: batch.inputs, buckets=[1]):
        assert values("moolink_inference_clients", name="policy") == [0]
        assert values("moolink_inference_rows_total", name="policy") == [0]
    assert values("moolink_inference_clients", name="policy") == []


def test_environments() -> None:
    before = len(values("moolink_environments"))
    with moolink.env_pool.EnvPool(Counter, num_processes=2, batch_size=3, num_batches=1) as pool:
        for _ in range(4):
            pool.step(0, np.zeros(3, np.int64)).result()
        assert len(values("moolink_environments")) == before + 1
        assert values("moolink_environments")[-1] == 3
        assert values("moolink_environment_steps_total")[-1] == 12
        assert values("moolink_environment_restarts_total")[-1] == 0
    assert len(values("moolink_environments")) == before


@pytest.fixture
def all_objects(rpc: moolink.Rpc) -> Iterator[None]:
    """One of each object that has metrics, used once."""
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(moolink.Broker(first=True))
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        group = stack.enter_context(moolink.Group(rpc, "metrics-all"))
        parameter = torch.nn.Parameter(torch.zeros(2))
        accumulator = moolink.Accumulator("model", [parameter], group=group)
        stack.enter_context(accumulator)
        optimizer = torch.optim.SGD([parameter], 0.1)
        for step in accumulator.steps(optimizer, until=lambda totals: totals["n"] >= 1):
            parameter.sum().backward()
            step.reduce(batch_size=1, counters={"n": 1})
        pool = moolink.env_pool.EnvPool(Counter, num_processes=1, batch_size=1, num_batches=1)
        stack.enter_context(pool).step(0, np.zeros(1, np.int64)).result()
        replay = moolink.Replay(Table("metrics-all", 10))
        replay.extend({"x": np.arange(3)})
        queue = moolink.TrajectoryQueue(rpc, "queue")
        publisher = moolink.Publisher(rpc, "weights")
        server = moolink.InferenceServer(rpc, "policy", lambda batch: batch.inputs, buckets=[1])
        other = moolink.Rpc()
        other.connect(rpc.listen("127.0.0.1:0")[0])
        subscriber = moolink.Subscriber(other, "weights", rpc.get_name())
        for one in (queue, publisher, server, other, subscriber):
            stack.enter_context(one)
        publisher.publish({"w": np.ones(2)})
        subscriber.wait(0, TIMEOUT)
        yield


@pytest.mark.usefixtures("all_objects")
def test_every_metric_of_the_table_is_collected_with_its_labels() -> None:
    found = metrics.sources.families()
    assert {family.name for family in found} == BY_NAME.keys()
    for family in found:
        assert family.samples, family.name
        for sample in family.samples:
            assert set(sample.labels) == set(BY_NAME[family.name].labels), family.name
            assert isinstance(sample.value, HistogramValue) or math.isfinite(sample.value)


def test_a_report_of_a_member() -> None:
    with moolink.Broker(first=True) as broker, moolink.Rpc("member") as rpc:
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        with moolink.Group(rpc, "g") as group, moolink.Rpc("asks") as asks:
            until(group.update, "the first view")
            asks.connect(rpc.listen("127.0.0.1:0")[0])
            told = json.loads(asks.sync("member", "moolink.metrics/report"))
            assert told["pid"] == os.getpid()
            assert told["metrics"]["moolink_group_members"] == [[{"group": "g"}, 1]]
            assert {(name, group) for name, _, _, group in told["paths"]} == {
                ("broker", ""),
                ("asks", ""),
            }
            explained = asks.sync("member", "moolink.metrics/explain", "broker")
            assert explained["connected"]
            with pytest.raises(moolink.RemoteError, match="peer must be a str"):
                asks.sync("member", "moolink.metrics/explain", 3)


def test_a_report_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "registry", Registry())
    with moolink.Broker(first=True) as broker, moolink.Rpc("member") as rpc:
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        until(lambda: bool(rpc.peers()), "the broker")
        for episode in range(report.MOST_OWN + 5):
            metrics.gauge("return", episode=str(episode)).set(1)
        metrics.gauge("more").set(1)
        report._warn_of_more.cache_clear()
        told = json.loads(report._report(rpc))
        assert [len(samples) for _, _, _, samples in told["own"]] == [report.MOST_OWN]
        assert "with ever new values" in caplog.text


def test_the_documentation_has_every_metric() -> None:
    rows = [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in TABLE
    ]
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    table = text.partition("| name | kind | labels | meaning |\n|---|---|---|---|\n")[2]
    assert table.splitlines() == rows
