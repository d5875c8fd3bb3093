"""Publisher and Subscriber: whole versions, on one host and on several."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import moolink
from moolink import Publisher, Subscriber
from moolink.internal import deadlines
from moolink.weights import blob, subscriber
from tests import processes, waiting
from tests.waiting import TIMEOUT

MEGABYTE = 1 << 20


def tree_of(value: int, size: int = 1000) -> dict[str, Any]:
    return {
        "layers": [np.full((2, size), value, np.float32), {"bias": np.full(3, value)}],
        "n": value,
    }


def value_of(tree: dict[str, Any]) -> int:
    """The one value that all of a tree's elements have."""
    values = {*np.unique(tree["layers"][0]), *np.unique(tree["layers"][1]["bias"]), tree["n"]}
    assert len(values) == 1, f"a torn tree: {values}"
    return int(values.pop())


class Net:
    """A publisher's peer, and peers that know its address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peers: list[moolink.Rpc] = []
        self.subscribers: list[Subscriber] = []
        self.monkeypatch = monkeypatch
        self.learner = self.peer("learner")
        self.address = self.learner.listen("127.0.0.1:0")[0]

    def peer(self, name: str) -> moolink.Rpc:
        self.peers.append(moolink.Rpc(name))
        return self.peers[-1]

    def subscribe(self, name: str, host: str | None = None, **options: Any) -> Subscriber:
        """One that takes itself for a process of another host, if `host` is given."""
        peer = self.peer(name)
        peer.connect(self.address)
        with self.monkeypatch.context() as patch:
            if host is not None:
                patch.setattr(subscriber, "host_key", lambda: host)
            self.subscribers.append(Subscriber(peer, "w", "learner", **options))
        return self.subscribers[-1]

    def close(self) -> None:
        for one in self.subscribers:
            one.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    net = Net(monkeypatch)
    yield net
    net.close()


def test_subscribers_get_the_newest_version_whole(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        subscribers = [net.subscribe(f"actor{i}") for i in range(3)]
        assert subscribers[0].latest() is None
        for version in range(5):
            assert publisher.publish(tree_of(version)) == version
            for one in subscribers:
                weights = one.wait(version, 20)
                assert weights.version == version
                assert value_of(weights.tree) == version
        assert subscribers[0].latest() is subscribers[0].latest()
        assert publisher.wait_acknowledged(4, 3, 20) == {f"actor{i}": 4 for i in range(3)}
        assert subscribers[0].stats()["bytes_fetched"] == 0  # mapped


def test_arrays_with_gaps_and_without_elements_are_published(net: Net) -> None:
    numbers = np.arange(60_000, dtype=np.float64).reshape(200, 300)
    tree = [numbers.T, numbers[::2, ::3], numbers[:0], np.float32(7), np.array(True)]
    with Publisher(net.learner, "w") as publisher:
        publisher.publish(tree)
        got = net.subscribe("actor").wait(timeout=TIMEOUT).tree
    for array, expected in zip(got, tree, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape


def test_what_is_mapped_cannot_be_written_and_outlives_everything(net: Net) -> None:
    publisher = Publisher(net.learner, "w")
    one = net.subscribe("actor")
    publisher.publish(tree_of(7))
    weights = one.wait(0, 20)
    with pytest.raises(ValueError, match="read-only"):
        weights.tree["layers"][0][0, 0] = 1
    for version in range(8, 12):
        publisher.publish(tree_of(version))
    publisher.close()
    one.close()
    net.close()
    assert value_of(weights.tree) == 7


def test_publish_copies(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        tree = tree_of(1)
        publisher.publish(tree)
        tree["layers"][0][:] = 99
        assert value_of(net.subscribe("actor").wait(0, 20).tree) == 1


def test_other_hosts_fetch_in_a_chain(net: Net) -> None:
    size = 4 * MEGABYTE  # elements of 4 bytes, twice
    with Publisher(net.learner, "w") as publisher:
        subscribers = [net.subscribe(f"actor{host}{i}", host) for host in "pqr" for i in range(2)]
        waiting.until(lambda: publisher.stats()["waiting"] == 6, "six requests")
        publisher.publish(tree_of(3, size))
        for one in subscribers:
            assert value_of(one.wait(0, 20).tree) == 3
        sources = {name: s["source"] for name, s in publisher.stats()["subscribers"].items()}
    assert list(sources.values()).count("") >= 1
    fetched = [one.stats()["bytes_fetched"] for one in subscribers]
    total = publisher.stats()["bytes"]
    # One of each host has fetched it, the other one has mapped that one's copy.
    assert sorted(fetched) == [0, 0, 0, total, total, total]


def test_a_late_joiner_does_not_ask_the_publisher(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        net.subscribe("early", "p")
        publisher.publish(tree_of(3, MEGABYTE))
        publisher.wait_acknowledged(0, 1, 20)
        sent = net.learner.stats()["bytes_written"]
        late = net.subscribe("late", "q")
        assert value_of(late.wait(0, 20).tree) == 3
        assert net.learner.stats()["bytes_written"] - sent < 0.05 * late.stats()["bytes_fetched"]


def test_only_chunks_that_have_changed_are_fetched(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        one = net.subscribe("actor", "p")
        tree = tree_of(0, 5 * MEGABYTE)
        publisher.publish(tree)
        one.wait(0, 20)
        publisher.wait_acknowledged(0, 1, 20)
        before = one.stats()["bytes_fetched"]
        tree["layers"][0][1, -1] = 5
        publisher.publish(tree)
        weights = one.wait(1, 20)
        assert weights.tree["layers"][0][1, -1] == 5
        assert not weights.tree["layers"][0][0].any()
        assert one.stats()["bytes_fetched"] - before <= 2 * blob.CHUNK


def test_a_tree_of_another_shape_is_fetched_whole(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        one = net.subscribe("actor", "p")
        publisher.publish(tree_of(1, 2000))
        one.wait(0, 20)
        publisher.publish([np.arange(4)])
        np.testing.assert_array_equal(one.wait(1, 20).tree[0], np.arange(4))


def test_no_version_is_torn_while_others_are_published(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        subscribers = [net.subscribe("near"), net.subscribe("far", "p"), net.subscribe("by", "q")]
        stop = threading.Event()

        def publish() -> None:
            value = 0
            while not stop.is_set():
                publisher.publish(tree_of(value, MEGABYTE // 2))
                value += 1

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            for _ in range(15):
                for one in subscribers:
                    before = one.version
                    weights = one.wait(0 if before is None else before + 1, 20)
                    assert value_of(weights.tree) == weights.version
        finally:
            stop.set()
            thread.join()


def test_a_publisher_that_is_restarted_goes_on_above_what_subscribers_have(net: Net) -> None:
    one = net.subscribe("actor")
    with Publisher(net.learner, "w") as publisher:
        for version in range(4):
            publisher.publish(tree_of(version))
        one.wait(3, 20)
    with Publisher(net.learner, "w") as publisher:
        waiting.until(lambda: publisher.stats()["waiting"] == 1, "the subscriber")
        assert publisher.publish(tree_of(10)) == 4
        assert value_of(one.wait(4, 20).tree) == 10
        with pytest.raises(ValueError, match="version 2 is not above the last one, 4"):
            publisher.publish(tree_of(11), version=2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floating_point_numbers_are_converted(net: Net, dtype: str) -> None:
    given = np.array(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-9, np.pi, -0.0, np.inf, np.nan, 1e-40], np.float32
    )
    with Publisher(net.learner, "w") as publisher:
        one = net.subscribe("actor", dtype=dtype)
        publisher.publish({"x": given, "d": given.astype(np.float64), "i": np.arange(3)})
        tree = one.wait(0, 20).tree
    expected = given.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert tree["x"].dtype == tree["d"].dtype == expected.dtype
    np.testing.assert_array_equal(tree["x"].astype(np.float32), expected.astype(np.float32))
    assert tree["i"].dtype == np.int64


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_python_numbers_are_converted_and_stay_numbers(net: Net, dtype: str) -> None:
    with Publisher(net.learner, "w") as publisher:
        publisher.publish({"rate": 0.1, "steps": 3})
        tree = net.subscribe("s", dtype=dtype).wait(0, 20).tree
    assert tree == {"rate": pytest.approx(0.1, rel=2**-8), "steps": 3}
    assert isinstance(tree["rate"], float)


class Layers(list[Any]):
    """A container that no peer has registered."""


def test_a_container_that_cannot_be_sent_is_refused_when_it_is_published(net: Net) -> None:
    """Its subscribers would wait for it forever."""
    with Publisher(net.learner, "w") as publisher:
        with pytest.raises(TypeError, match=r"weights: .*Layers cannot be sent.*register"):
            publisher.publish({"layers": Layers([np.ones(3)])})
        assert publisher.version is None
        publisher.publish(tree_of(1))
        assert value_of(net.subscribe("s").wait(0, TIMEOUT).tree) == 1


def test_a_container_that_pickles_travels_between_peers_that_allow_it() -> None:
    with (
        moolink.Rpc("learner", allow_pickle=True) as learner,
        moolink.Rpc("actor", allow_pickle=True) as actor,
        Publisher(learner, "w") as publisher,
    ):
        actor.connect(learner.listen("127.0.0.1:0")[0])
        publisher.publish({"layers": Layers([np.ones(3)])})
        with Subscriber(actor, "w", "learner") as subscriber:
            layers = subscriber.wait(0, TIMEOUT).tree["layers"]
        assert type(layers) is Layers
        assert np.array_equal(layers[0], np.ones(3))


def test_torch_publishes_and_jax_subscribes_and_the_other_way(net: Net) -> None:
    import jax
    import torch

    with Publisher(net.learner, "w") as publisher:
        as_jax, as_torch, same = (
            net.subscribe("jax", arrays="jax"),
            net.subscribe("torch", arrays="torch"),
            net.subscribe("same"),
        )
        publisher.publish({"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)})
        assert isinstance(as_jax.wait(0, 20).tree["w"], jax.Array)
        assert as_jax.wait(0).tree["w"].dtype == jax.numpy.bfloat16
        assert same.wait(0, 20).tree["w"].dtype == torch.bfloat16
        publisher.publish({"w": jax.numpy.arange(6.0).reshape(2, 3)})
        tensor = as_torch.wait(1, 20).tree["w"]
        tensor += 1  # a copy of its own
        assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert isinstance(same.wait(1, 20).tree["w"], jax.Array)


def test_a_source_that_dies_is_replaced(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    # The peers do not reach each other: nobody tells the subscriber of the death.
    monkeypatch.setattr(subscriber, "_TIMEOUT", 1.0)
    size = 4 * MEGABYTE
    with Publisher(net.learner, "w") as publisher, processes.killed_at_the_end() as started:
        dying = processes.start_python("-m", "tests.weights.subscribing", net.address, "p")
        started.append(dying)
        waiting.until(lambda: publisher.stats()["waiting"] == 1, "the process")
        one = net.subscribe("actor", "q")
        waiting.until(lambda: publisher.stats()["waiting"] == 2, "two requests")
        dying.send_signal(signal.SIGSTOP)  # it answers nothing
        publisher.publish(tree_of(1, size))
        waiting.until(
            lambda: publisher.stats()["subscribers"].get("actor", {}).get("source") == "dying",
            "a source that does not answer",
        )
        dying.kill()
        assert value_of(one.wait(0, 20).tree) == 1


def test_a_wait_in_vain_says_why(net: Net) -> None:
    one = net.subscribe("actor")
    with pytest.raises(moolink.TimeoutError, match="no version 3 of 'w' came from 'learner'"):
        one.wait(3, 0.05)
    with Publisher(net.learner, "w") as publisher:
        publisher.publish(tree_of(1))
        one.wait(0, 20)
        says = "there is version 0: there is no newer"
        waiting.until_timeout_says(says, lambda: one.wait(1, 0.05))
        says = "1 of 2 subscribers of 'w' have version 0"
        waiting.until_timeout_says(says, lambda: publisher.wait_acknowledged(0, 2, 0.05))


def test_closing_ends_those_who_wait(net: Net) -> None:
    one = net.subscribe("actor")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            one.wait(0)
        except moolink.Closed as closed:
            raised.append(closed)

    thread = threading.Thread(target=wait)
    thread.start()
    one.close()
    thread.join(waiting.TIMEOUT)
    assert len(raised) == 1
    publisher = Publisher(net.learner, "w")
    publisher.close()
    with pytest.raises(moolink.Closed):
        publisher.publish(tree_of(1))


def test_a_closed_peer_ends_its_subscriber(net: Net) -> None:
    one = net.subscribe("actor")
    net.peers[-1].close()
    with pytest.raises(moolink.Closed):
        one.wait(0, 20)


def test_the_cause_of_a_wait_is_named(net: Net) -> None:
    with Publisher(net.learner, "w"):
        one = net.subscribe("one")
        with pytest.raises(moolink.TimeoutError, match="nothing is published yet"):
            one.wait(timeout=0.1)
        with pytest.raises(ValueError, match="this peer has a subscriber of 'w' already"):
            Subscriber(net.peers[-1], "w", "learner")
        with Subscriber(net.peers[-1], "other", "learner") as other:
            cause = "peer 'learner' has no publisher of 'other'"
            waiting.until(lambda: other.stats()["waiting_for"] == cause, cause)


class Module:
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_bad_arguments_are_refused(net: Net) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Publisher(net.learner, "w", keep=0)
    with pytest.raises(ValueError, match="dtype must be"):
        Subscriber(net.learner, "w", "x", dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'keep'"):
        Publisher(net.learner, "w", kep=1)  # type: ignore[call-arg]
    with Publisher(net.learner, "w") as publisher:
        with pytest.raises(
            ValueError, match="this peer has a publisher or parameter server of 'w' already"
        ):
            Publisher(net.learner, "w")
        with pytest.raises(TypeError, match=r"layers\[1\].name: a str cannot be published"):
            publisher.publish({"layers": [np.zeros(1), {"name": "text"}]})
        with pytest.raises(
            TypeError, match=r"weights: a Module cannot be published.* its state_dict\(\)"
        ):
            publisher.publish(Module())
        with pytest.raises(moolink.TimeoutError, match="no subscriber has any version"):
            publisher.wait_acknowledged(0, 1, timeout=0.01)
        with pytest.raises(TypeError, match="x: an array of object cannot be published"):
            publisher.publish({"x": np.array([None])})
        with pytest.raises(ValueError, match="arrays must be one of"):
            Subscriber(net.learner, "w", "learner", arrays="tf")  # type: ignore[arg-type]


def test_a_message_that_no_subscriber_sends_harms_nobody(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        publisher.publish(tree_of(0))
        one = net.subscribe("actor")
        one.wait(0, 20)
        other = net.peer("other")
        other.connect(net.address)
        calls: list[tuple[Any, ...]] = [
            ("other", "h", None, "int8"),
            ("other", "h", None, ["float32"]),
            ("other", "h", ("i", "1", ""), ""),
            ("other", "h", ("i", 2**63 - 1, ""), ""),
            ("other", "h", ("i", -1, ""), ""),
            ("other", "h", 7, ""),
            (["other"], "h", None, ""),
        ]
        for arguments in calls:
            with pytest.raises(moolink.RemoteError):
                other.async_("learner", "moolink.weights/w/next", *arguments).result(20)
        keys: list[Any] = [("i", "5", ""), 7, None, ("i", 5), ("i", 2**62 + 1, "")]
        for key in keys:
            for to, function in (("learner", "chunk"), ("actor", "copy/chunk")):
                with pytest.raises(moolink.RemoteError):
                    other.async_(to, f"moolink.weights/w/{function}", key, 0).result(20)
        publisher.publish(tree_of(1))
        assert value_of(one.wait(1, 20).tree) == 1
        assert publisher.wait_acknowledged(1, 1, 20) == {"actor": 1}


def test_a_source_that_gives_wrong_bytes_is_replaced(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        evil = net.peer("evil")
        evil.define("moolink.weights/w/copy/chunk", lambda key, index: np.zeros(1, np.uint8))
        evil.connect(net.address)
        offered = evil.async_("learner", "moolink.weights/w/next", "evil", "p", None, "")
        publisher.publish(tree_of(3))
        offered.result(20)
        one = net.subscribe("actor", "q")
        assert value_of(one.wait(0, 20).tree) == 3
        publisher.publish(tree_of(4))
        assert value_of(one.wait(1, 20).tree) == 4


def test_a_version_that_is_fetched_is_kept(net: Net) -> None:
    with Publisher(net.learner, "w", keep=1) as publisher:
        publisher.publish(tree_of(0))
        slow = net.peer("slow")
        slow.connect(net.address)
        call = slow.async_("learner", "moolink.weights/w/next", "slow", "p", None, "")
        key = call.result(20)["key"]
        for value in range(1, 4):
            publisher.publish(tree_of(value))
        assert publisher.stats()["kept"] == [0, 3]
        assert slow.sync("learner", "moolink.weights/w/chunk", key, 0) is not None
        later = slow.async_("learner", "moolink.weights/w/next", "slow", "p", key, "").result(20)
        assert later["key"][1] == 3
        publisher.publish(tree_of(4))
        assert publisher.stats()["kept"] == [3, 4]


def test_subscribers_that_are_gone_do_not_count(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        publisher.publish(tree_of(0))
        for name in ("gone", "there"):
            net.subscribe(name)
        publisher.wait_acknowledged(0, 2, 20)
        net.subscribers[0].close()
        net.peers[1].close()
        waiting.until(lambda: "gone" not in publisher.acknowledged(), "the end of a peer")
        with pytest.raises(moolink.TimeoutError, match="1 of 2 subscribers"):
            publisher.wait_acknowledged(0, 2, 0.05)
        assert list(publisher.stats()["subscribers"]) == ["there"]


def test_a_subscriber_at_the_publisher_s_own_peer(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher, Subscriber(net.learner, "w", "learner") as one:
        publisher.publish(tree_of(2))
        assert value_of(one.wait(0, 20).tree) == 2
        assert publisher.wait_acknowledged(0, 1, 20) == {"learner": 0}


def test_versions_are_numbers(net: Net) -> None:
    with Publisher(net.learner, "w") as publisher:
        with pytest.raises(TypeError, match="version must be an integer, got '3'"):
            publisher.publish(tree_of(0), version="3")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="version must be at least 0, got -1"):
            publisher.publish(tree_of(0), version=-1)
        assert publisher.publish(tree_of(0), version=np.int64(4)) == 4  # type: ignore[arg-type]


def test_long_waits_are_logged(
    net: Net, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "_LINES", (0.01,))
    with Publisher(net.learner, "w") as publisher, pytest.raises(moolink.TimeoutError):
        publisher.wait_acknowledged(0, 2, 0.1)
    assert "the publisher of 'w' waits for 2 subscribers that have version 0" in caplog.text
    with pytest.raises(moolink.TimeoutError):
        net.subscribe("actor").wait(3, 0.5)
    # The first line may come before the learner's answer, so its reason is either of two.
    assert "the subscriber of 'w' waits for version 3 from 'learner': " in caplog.text
