"""Peers of one name in two groups: a holder of the token never takes one for the other."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import in_group, tokens
from moolink.replay import Table
from moolink.rpc import naming, peer_wait
from moolink.weights import names
from tests.processes import killed_at_the_end, start_python
from tests.waiting import TIMEOUT, until

WITNESS = """
import sys, time
import moolink
from moolink import tokens

with moolink.Rpc("witness", token=sys.argv[1]) as rpc:
    print(rpc.listen("127.0.0.1:0")[0], flush=True)
    rpc.connect(sys.argv[2])
    while not any(peer["name"] == "server" for peer in rpc.peers()):
        time.sleep(0.01)
    print("sees server", flush=True)
    sys.stdin.read()
"""


class Job:
    """A broker, and peers that say whose they are."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.token = tokens.new()
        self.broker = stack.enter_context(moolink.Broker(first=True, token=self.token))
        self.address = self.broker.listen("127.0.0.1:0")[0]

    def peer(self, name: str, group: str = "", *, at: str = "") -> moolink.Rpc:
        """Connects to the broker, or to `at`; holds the token, or the group's key."""
        key = self.token.of_group(group) if group else self.token
        peer = self._stack.enter_context(moolink.Rpc(name, token=key))
        peer.define("whose", lambda: f"{name} of {group or 'the job'}")
        peer.listen("127.0.0.1:0")
        peer.connect(at or self.address)
        return peer

    def knows(self, *peers: moolink.Rpc) -> None:
        """Waits until the broker is connected to them."""
        wanted = {(peer.get_name(), peer.key_group) for peer in peers}
        until(
            lambda: {(p["name"], p["group"]) for p in self.broker.rpc.peers()} >= wanted,
            f"the broker's connections to {wanted}",
        )


@pytest.fixture
def job() -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(stack)


def refusal(caller: moolink.Rpc, name: str) -> str:
    """What a call by that name alone fails with, long before its time is up."""
    with pytest.raises(moolink.Error) as caught:
        caller.sync(name, "whose")
    assert not isinstance(caught.value, moolink.TimeoutError)
    return str(caught.value)


def until_refused(caller: moolink.Rpc, name: str, before: str, *texts: str) -> None:
    """Waits until calls by a name, which one peer has answered, fail with one of the texts."""

    def refused() -> bool:
        try:
            return bool(caller.sync(name, "whose") != before)
        except moolink.Error as error:
            return any(text in str(error) for text in texts)

    until(refused, f"the refusal of {name!r}")


def until_one_is_left(rpc: moolink.Rpc, name: str) -> None:
    until(lambda: [p["name"] for p in rpc.peers()].count(name) == 1, f"the end of one {name!r}")


def test_a_name_that_two_groups_have_is_that_of_neither(job: Job) -> None:
    peers = [job.peer("server", "a"), job.peer("server", "b")]
    job.knows(*peers)
    learner = job.peer("learner")
    text = refusal(learner, "server")
    for part in ("'server'", "'a'", "'b'", "moolink.in_group('a', 'server')"):
        assert part in text
    assert learner.sync(in_group("a", "server"), "whose") == "server of a"
    assert learner.sync(in_group("b", "server"), "whose") == "server of b"
    (many,) = learner.async_many([in_group("a", "server")], "whose").values()
    assert many.result() == "server of a"
    assert "moolink.in_group('a', 'server')" in learner.explain("server")["reason"]
    assert learner.explain(in_group("b", "server"))["connected"]
    # A guest has no choice: other groups do not exist for it.
    guest = job.peer("guest", "b")
    assert guest.sync("server", "whose") == "server of b"
    # And once one of them has gone, the name is certain.
    peers[0].close()
    until_one_is_left(learner, "server")
    until_one_is_left(job.broker.rpc, "server")
    assert learner.sync("server", "whose") == "server of b"


def test_a_guest_that_comes_first_does_not_answer_for_another_group(job: Job) -> None:
    """The true peer is known to the broker alone."""
    learner = job.peer("learner")
    job.knows(job.peer("victim", "b"), learner)
    job.peer("victim", "a", at=learner.addresses()[0])
    until(lambda: any(p["name"] == "victim" for p in learner.peers()), "the guest")
    assert "'a' and 'b'" in refusal(learner, "victim")
    assert learner.sync(in_group("b", "victim"), "whose") == "victim of b"


def test_a_namesake_that_comes_later_is_noticed(job: Job) -> None:
    learner = job.peer("learner")
    job.knows(learner)
    job.peer("victim", "a", at=learner.addresses()[0])
    assert learner.sync("victim", "whose") == "victim of a"
    assert learner.sync("victim", "whose") == "victim of a"
    job.knows(job.peer("victim", "b"))

    until_refused(learner, "victim", "victim of a", "'a' and 'b'")  # by the broker's word
    assert learner.sync(in_group("a", "victim"), "whose") == "victim of a"


def test_a_peer_of_the_whole_job_has_its_name_before_every_group(job: Job) -> None:
    server = job.peer("server")
    learner = job.peer("learner")
    job.knows(server, learner)
    job.peer("server", "a", at=learner.addresses()[0])
    until(lambda: any(p["name"] == "server" for p in learner.peers()), "the guest")
    for _ in range(3):
        assert learner.sync("server", "whose") == "server of the job"
    assert learner.sync(in_group("a", "server"), "whose") == "server of a"
    # A group without a peer of the name has that of the whole job.
    assert learner.sync(in_group("b", "server"), "whose") == "server of the job"


def test_a_group_with_a_peer_of_the_name_is_asked_first(job: Job) -> None:
    """The group's peer is known to the broker alone, the holder of the token to both."""
    learner = job.peer("learner")
    server = job.peer("server")
    server.connect(learner.addresses()[0])
    guest = job.peer("server", "a")
    job.knows(learner, server, guest)
    until(lambda: any(p["name"] == "server" for p in learner.peers()), "the holder of the token")
    assert learner.sync(in_group("a", "server"), "whose") == "server of a"
    guest.close()
    until_one_is_left(learner, "server")
    until_one_is_left(job.broker.rpc, "server")
    assert learner.sync(in_group("a", "server"), "whose") == "server of the job"
    assert learner.explain(in_group("a", "server"))["connected"]


def test_the_callers_name_with_a_group_means_the_caller_unless_the_group_has_it(job: Job) -> None:
    learner = job.peer("learner")
    job.knows(learner)
    assert learner.sync(in_group("a", "learner"), "whose") == "learner of the job"
    job.knows(job.peer("learner", "a"))

    own = in_group("a", "learner")
    until_refused(learner, own, "learner of the job", "as this peer is", "is taken")
    assert learner.sync("learner", "whose") == "learner of the job"


def test_a_holder_of_the_token_that_was_silent_is_heard_later(job: Job) -> None:
    """It alone knows the second peer of the name, and is stopped while it is asked."""
    learner = job.peer("learner")
    with killed_at_the_end() as processes:
        process = start_python("-c", WITNESS, job.token.text(), learner.addresses()[0])
        processes.append(process)
        assert process.stdout is not None
        witness = process.stdout.readline().strip()
        job.peer("server", "b", at=witness)
        assert process.stdout.readline().strip() == "sees server"
        job.peer("server", "a", at=learner.addresses()[0])
        until(lambda: len(learner.peers()) == 3, "the peers")
        process.send_signal(signal.SIGSTOP)
        until(lambda: learner.explain("witness")["suspected"], "the suspicion")
        assert learner.sync("server", "whose") == "server of a"
        process.send_signal(signal.SIGCONT)

        until_refused(learner, "server", "server of a", "'a' and 'b'")  # by the witness's word


def test_arguments_of_a_call_that_fails_reach_nobody(job: Job) -> None:
    """Large arrays are captured straight into the receiver's memory."""
    got: list[int] = []
    learner = job.peer("learner")
    for group in ("a", "b"):
        job.peer("server", group, at=learner.addresses()[0]).define(
            "take", lambda data: got.append(len(data))
        )
    until(lambda: len(learner.peers()) == 3, "both")
    with pytest.raises(moolink.Error, match="in_group"):
        learner.sync("server", "take", np.zeros(1 << 20))
    learner.sync(in_group("a", "server"), "take", np.zeros(1 << 20))
    assert got == [1 << 20]


@pytest.mark.parametrize(("group", "name"), [("", "x"), ("a", ""), ("a\n", "x"), ("a", "x\x1f")])
def test_what_is_no_name_is_refused(group: str, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        in_group(group, name)


def test_names_with_slashes_are_not_mistaken_for_groups(job: Job) -> None:
    peers = [job.peer("b/c", "a"), job.peer("c", "a/b")]
    learner = job.peer("learner")
    job.knows(*peers, learner)
    assert learner.sync(in_group("a", "b/c"), "whose") == "b/c of a"
    assert learner.sync(in_group("a/b", "c"), "whose") == "c of a/b"
    assert learner.sync("b/c", "whose") == "b/c of a"
    learner.set_timeout(0.5)
    with pytest.raises(moolink.TimeoutError, match="'a/c'"):
        learner.sync(in_group("a", "c"), "whose")


def test_the_library_calls_a_member_and_not_its_namesake(job: Job) -> None:
    learner, friend = job.peer("learner"), job.peer("friend")
    groups = [moolink.Group(peer, "a") for peer in (learner, friend)]
    job.peer("friend", "a", at=learner.addresses()[0])
    until(lambda: any(p["group"] == "a" for p in learner.peers()), "the guest")
    for group in groups:
        group.wait_for_members(2)
    assert groups[0].members() == groups[1].members()
    assert learner.sync(in_group("a", "friend"), "whose") == "friend of a"
    receiver = groups[0]._core.name_for_calls("friend")
    assert learner.sync(receiver, "whose") == "friend of the job"
    member = moolink.Group(job.peer("third", "a"), "a")
    for group in (*groups, member):
        group.wait_for_members(3)
    assert learner.sync(groups[0]._core.name_for_calls("third"), "whose") == "third of a"
    assert groups[0]._core.name_for_calls("third") == in_group("a", "third")  # it is connected


def test_the_library_calls_no_namesake_of_a_member_that_is_gone(job: Job) -> None:
    """It holds the key of another group."""
    learner = job.peer("learner")
    group, member = moolink.Group(learner, "a"), job.peer("friend", "a")
    with moolink.Group(member, "a") as of_member:
        for each in (group, of_member):
            each.wait_for_members(2, TIMEOUT)
        member.close()
    job.peer("friend", "b", at=learner.addresses()[0])
    until(
        lambda: [p["group"] for p in learner.peers() if p["name"] == "friend"] == ["b"], "the guest"
    )
    assert "friend" in group.members()  # as of the last update()
    assert learner.sync("friend", "whose") == "friend of b"
    assert group._core.name_for_calls("friend") == in_group("a", "friend")


def test_a_publisher_names_no_subscriber_of_another_group(job: Job) -> None:
    publisher = job.peer("publisher")
    with moolink.Publisher(publisher, "weights") as weights:
        weights.publish({"w": [1.0]})

        def source(of: moolink.Rpc, host: str) -> object:
            """Where a subscriber on that host is told to fetch the version."""
            offer = of.sync(
                "publisher", names.NEXT.format("weights"), of.get_name(), host, None, ""
            )
            return tuple(offer["source"])

        first, second = job.peer("actor", "a"), job.peer("actor", "b")
        assert source(first, "host 1") == (None, False)
        # Nor its own name, which a peer of the other group has.
        assert source(second, "host 2") == (None, False)
        assert source(job.peer("friend", "a"), "host 3") == ("actor", False)
        subscribers = weights.stats()["subscribers"]
        assert set(subscribers) == {"a/actor", "b/actor", "a/friend"}
        # A peer of the whole job can call all of them, by a name that is certain.
        eval_ = job.peer("evaluation")
        told = source(eval_, "host 4")
        assert told in [
            (in_group(group, name), False)
            for group, name in (("a", "actor"), ("b", "actor"), ("a", "friend"))
        ]
        again = eval_.sync("publisher", names.SOURCE.format("weights"), "evaluation", told[0])
        assert tuple(again) != told
        again = job.peer("last", "b")
        assert source(again, "host 5") in [("actor", False), ("evaluation", False)]
        assert tuple(again.sync("publisher", names.SOURCE.format("weights"), "last", "actor")) != (
            "actor",
            False,
        )


def test_names_with_a_connected_peer(job: Job) -> None:
    learner = job.peer("learner")
    a, b = job.peer("server", "a"), job.peer("server", "b")
    job.peer("helper").connect(learner.addresses()[0])
    for peer in (a, b):
        peer.connect(learner.addresses()[0])
    until(lambda: len(learner.peers()) == 4, "all")
    there = {
        "server",
        "helper",
        "learner",
        in_group("a", "server"),
        in_group("b", "server"),
        # The peer of the whole job, as no group has one of the name.
        in_group("a", "helper"),
        in_group("a", "learner"),
        in_group("c", "broker"),
    }
    away = {"nobody", in_group("c", "server"), in_group("a", "nobody")}
    assert naming.connected(learner, there | away) == there
    assert in_group("a", "server") in naming.connected(a, [in_group("a", "server")])
    others = [in_group("b", "server"), in_group("b", "learner")]
    assert naming.connected(a, others) == set()
    # For a holder of a group's key, all its peers are of its group.
    assert naming.connected(a, ["learner", in_group("a", "learner")]) == {
        "learner",
        in_group("a", "learner"),
    }
    a.close()
    until(lambda: not naming.connected(learner, [in_group("a", "server")]), "the end of one")
    assert naming.connected(learner, ["server", in_group("b", "server")]) == {
        "server",
        in_group("b", "server"),
    }


class Serving:
    """A server of each kind at one peer. Every client waits until `release`."""

    def __init__(self, rpc: moolink.Rpc, stack: contextlib.ExitStack) -> None:
        enter = stack.enter_context
        self._go = threading.Event()
        self._publisher = enter(moolink.Publisher(rpc, "weights"))
        self._queue = enter(moolink.TrajectoryQueue(rpc, "unrolls", max_size=1))
        enter(moolink.InferenceServer(rpc, "policy", self._model))
        # One has no items, and the other no room: an item stays until it was sampled.
        self._replay = enter(moolink.Replay([Table("empty", 1), _full()]))
        enter(moolink.ReplayServer(rpc, self._replay))

    def _model(self, batch: moolink.inference.InferenceBatch) -> Any:
        self._go.wait(TIMEOUT)
        return batch.inputs

    def release(self) -> None:
        self._go.set()
        self._publisher.publish({"w": np.ones(1)})
        self._replay.insert({"x": np.ones(1)}, table="empty")
        if self._replay.stats()["tables"]["full"]["size"]:
            self._replay.sample(1, table="full", timeout=TIMEOUT)
        if len(self._queue._backlog):
            self._queue.get(1, timeout=TIMEOUT)


def _full() -> Table:
    return Table("full", 1, remover=None, max_times_sampled=1)


def _put(rpc: moolink.Rpc, server: str) -> None:
    writer = moolink.TrajectoryWriter(rpc, "unrolls", server, ahead=1)
    for _ in range(2):
        writer.put({"x": np.ones(1)}, 0)
    writer.flush()


def _write(rpc: moolink.Rpc, server: str) -> None:
    writer = moolink.ReplayClient(rpc, server=server).writer(keep=1, chunk=1)
    for _ in range(2):
        writer.append({"x": np.ones(1)})
        writer.create_item({"x": writer.history["x"][-1]}, table="full")
    writer.flush()


def _subscribe(rpc: moolink.Rpc, server: str) -> None:
    with moolink.Subscriber(rpc, "weights", server) as weights:
        weights.wait()


def _subscribe_to_parts(rpc: moolink.Rpc, server: str) -> None:
    with moolink.weights.ShardedSubscriber(rpc, "weights", [server]) as weights:
        weights.wait()


CLIENTS: dict[str, Callable[[moolink.Rpc, str], object]] = {
    "Subscriber.wait": _subscribe,
    "ShardedSubscriber.wait": _subscribe_to_parts,
    "ReplayClient.sample": lambda rpc, server: moolink.ReplayClient(rpc, server=server).sample(
        1, table="empty"
    ),
    "Writer.flush": _write,
    "TrajectoryWriter.flush": _put,
    "InferenceClient.infer": lambda rpc, server: moolink.InferenceClient(
        rpc, "policy", server
    ).infer({"x": np.ones((1, 1))}),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_peer_of_a_group_is_waited_for_as_long_as_it_is_connected(
    job: Job, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a plain name: beyond the limit of the Rpc, which each sign of the peer renews."""
    seen = threading.Semaphore(0)
    renew = peer_wait.PeerWait._is_there

    def count(self: peer_wait.PeerWait) -> None:
        renew(self)
        seen.release()

    monkeypatch.setattr(peer_wait.PeerWait, "_is_there", count)
    monkeypatch.setattr(peer_wait, "_LOOK", 0.05)
    learner = job.peer("learner")
    server = job.peer("server", "a")
    job.knows(server, job.peer("server", "b"), learner)
    name = in_group("a", "server")
    assert learner.sync(name, "whose") == "server of a"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        served = Serving(server, stack)
        stack.callback(served.release)
        learner.set_timeout(0.2)
        waiting = threads.submit(CLIENTS[client], learner, name)
        for _ in range(20):  # a second: five times the limit
            until(lambda: seen.acquire(timeout=0.1) or waiting.done(), "a sign of the server")
        assert not waiting.done(), waiting
        learner.set_timeout(TIMEOUT)
        served.release()
        waiting.result(TIMEOUT)


def test_errors_of_waits_name_the_peer_as_a_user_does(job: Job) -> None:
    learner = job.peer("learner")
    job.knows(learner)
    name = in_group("a", "server")
    client = moolink.ReplayClient(learner, server=name)
    with pytest.raises(moolink.TimeoutError, match="at 'a/server' did not answer") as caught:
        client.sample(1, timeout=0.01)
    assert caught.value.peer == "a/server"
    assert repr(client) == "<moolink.ReplayClient of 'replay' at 'a/server'>"


def test_a_servers_data_for_a_peer_of_a_group_ends_with_the_peer(job: Job) -> None:
    """Though a peer of the same name in another group goes on."""
    server = job.peer("server")
    with (
        moolink.Replay(Table("t", 10)) as replay,
        moolink.ReplayServer(server, replay) as replays,
        moolink.InferenceServer(server, "policy", lambda batch: batch.inputs) as policies,
    ):
        actors = [job.peer("actor", "a"), job.peer("actor", "b"), job.peer("actor")]

        def use(actor: moolink.Rpc) -> object:
            """Returns the objects, which are kept: their end would tell the server."""
            writer = moolink.ReplayClient(actor, server="server").writer(keep=1, chunk=1)
            writer.append({"x": np.ones(1)})
            writer.create_item({"x": writer.history["x"][-1]})
            writer.flush(TIMEOUT)
            client = moolink.InferenceClient(actor, "policy", "server")
            client.infer({"x": np.ones((1, 1))}, timeout=TIMEOUT)
            return writer, client

        kept = [use(actor) for actor in actors]
        assert replays.stats()["writers"] == policies.stats()["clients"] == 3
        for left, actor in ((2, actors[0]), (1, actors[2])):
            actor.close()
            until(lambda: policies.stats()["clients"] == left, "the end of a client")  # noqa: B023
        kept.append(use(job.peer("last")))
        assert replays.stats()["writers"] == 2, "the server drops dead writers when one begins"


def test_a_broker_has_no_group(job: Job) -> None:
    with moolink.Group(job.peer("member"), "g") as group:
        with pytest.raises(ValueError, match="must be a name alone, got 'g/broker', which names"):
            group.set_broker_name(in_group("g", "broker"))
        with pytest.raises(TypeError, match="name must be a str"):
            group.set_broker_name(None)  # type: ignore[arg-type]
        group.set_broker_name("broker")
        group.wait_for_members(1, TIMEOUT)
