"""Peers of one name in two groups: a holder of the token never takes one for the other."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

import moolink
from moolink import in_group, tokens
from moolink.weights import names
from tests.processes import killed_at_the_end, start_python
from tests.waiting import until

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
    until(lambda: len([p for p in learner.peers() if p["name"] == "server"]) == 1, "the end of one")
    until(lambda: len([p for p in job.broker.rpc.peers() if p["name"] == "server"]) == 1, "its end")
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

    def noticed() -> bool:
        try:
            return learner.sync("victim", "whose") != "victim of a"
        except moolink.Error as error:
            return "'a' and 'b'" in str(error)

    until(noticed, "the broker's word of the second one")
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
    until(lambda: len([p for p in learner.peers() if p["name"] == "server"]) == 1, "the end of one")
    until(lambda: len([p for p in job.broker.rpc.peers() if p["name"] == "server"]) == 1, "its end")
    assert learner.sync(in_group("a", "server"), "whose") == "server of the job"
    assert learner.explain(in_group("a", "server"))["connected"]


def test_ones_own_name_with_a_group_means_oneself_unless_the_group_has_it(job: Job) -> None:
    learner = job.peer("learner")
    job.knows(learner)
    assert learner.sync(in_group("a", "learner"), "whose") == "learner of the job"
    job.knows(job.peer("learner", "a"))

    def refused() -> bool:
        try:
            return learner.sync(in_group("a", "learner"), "whose") != "learner of the job"
        except moolink.Error as error:
            return "as this peer is" in str(error) or "is taken" in str(error)

    until(refused, "the broker's word of the other one")
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

        def noticed() -> bool:
            try:
                return learner.sync("server", "whose") != "server of a"
            except moolink.Error as error:
                return "'a' and 'b'" in str(error)

        until(noticed, "the witness's answer")


def test_arguments_of_a_call_that_fails_reach_nobody(job: Job) -> None:
    """Large arrays are captured straight into the receiver's memory."""
    np = pytest.importorskip("numpy")
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
    assert groups[0]._core.name_for_calls("third") == in_group("a", "third")


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
