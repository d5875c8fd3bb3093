"""Two groups on one broker with different keys: nothing of one can be reached from the other."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moolink
from moolink import tokens
from tests.waiting import formed, until

Start = Callable[..., Any]
Broker = tuple[str, "subprocess.Popen[str]"]


def test_groups_of_one_broker_see_and_reach_nothing_of_each_other(
    job: dict[str, Path], broker: Broker, member: Start
) -> None:
    address, _ = broker
    a = [member(name, "a", address, job["a"]) for name in ("anna", "alan")]
    b = [member(name, "b", address, job["b"]) for name in ("berta", "bert")]
    assert sorted(a[0].members(2)) == sorted(a[1].members(2)) == ["alan", "anna"]
    assert sorted(b[0].members(2)) == ["bert", "berta"]

    # Friends call one another.
    assert a[0].call("alan", "whose", 20.0) == "alan of a"
    # No call: the broker does not tell where the other one is,
    error, text = a[0].call("berta", "whose", 1.5)
    assert (error, "berta" in text) == ("TimeoutError", True)
    # and who knows it is not let in, and hears so at once, by every address.
    for at in b[0].addresses():
        a[1].connect(at)
        error, text = a[1].call("berta", "whose", 20.0)
        assert error == "AuthError"
        assert "group 'a'" in text
        assert "group 'b'" in text
    # No join, and no view.
    error, text = a[0].join("b", 1.5)
    assert (error, "key of group 'a'" in text) == ("AuthError", True)
    assert sorted(b[0].members(2)) == ["bert", "berta"]
    # No name: alan has told berta its own, and nobody else has heard of anybody.
    knows = b[1].knows()
    assert "anna" not in knows
    assert "alan" not in knows


class Runs:
    """A pickle of it runs code where it is read."""

    times = 0

    def __reduce__(self) -> Any:
        return Runs._run, ()

    @staticmethod
    def _run() -> None:
        Runs.times += 1


def test_no_pickle_of_a_guest_is_read() -> None:
    token = tokens.new()
    key = token.of_group("pong")
    with (
        moolink.Rpc("host", token=token, allow_pickle=True) as host,
        moolink.Rpc("guest", token=key, allow_pickle=True) as guest,
        moolink.Rpc("friend", token=key, allow_pickle=True) as friend,
    ):
        for peer in (host, friend):
            peer.define("f", lambda value: value)
        host.define("evil", Runs)
        guest.define("evil", Runs)
        for peer in (host, friend):
            guest.connect(peer.listen("127.0.0.1:0")[0])
        with pytest.raises(moolink.Error, match="group's key only"):
            guest.sync("host", "f", Runs())
        with pytest.raises(moolink.Error, match="group's key only"):
            host.sync("guest", "evil")
        assert Runs.times == 0
        # Holders of one key take them from one another, and from the job's.
        guest.sync("friend", "f", Runs())
        guest.sync("host", "evil")
        assert Runs.times > 0


def test_the_same_names_in_two_groups_do_not_get_in_each_others_way(
    job: dict[str, Path], broker: Broker, member: Start
) -> None:
    address, _ = broker
    a = [member(f"peer-{i}", "a", address, job["a"]) for i in range(2)]
    b = [member(f"peer-{i}", "b", address, job["b"]) for i in range(2)]
    for group in (a, b):
        assert sorted(group[0].members(2)) == ["peer-0", "peer-1"]
    assert a[0].call("peer-1", "whose", 20.0) == "peer-1 of a"
    assert b[0].call("peer-1", "whose", 20.0) == "peer-1 of b"


def test_holders_of_the_token_take_part_in_every_group(
    job: dict[str, Path], broker: Broker, member: Start
) -> None:
    address, _ = broker
    learner = member("learner", "a", address, job["job"])
    actor = member("actor", "a", address, job["a"])
    other = member("other", "b", address, job["b"])
    assert sorted(learner.members(2)) == sorted(actor.members(2)) == ["actor", "learner"]
    assert other.members(1) == ["other"]
    assert learner.call("actor", "whose", 20.0) == "actor of a"
    assert actor.call("learner", "whose", 20.0) == "learner of a"
    # The learner is a peer of the whole job; what it has of group "a" is not for group "b".
    assert other.call("learner", "whose", 20.0) == "learner of a"
    assert other.join("a", 1.5)[0] == "AuthError"


def test_functions_of_a_group_on_a_peer_of_the_whole_job(job: dict[str, Path]) -> None:
    with (
        moolink.Rpc("learner", token_file=job["job"]) as learner,
        moolink.Rpc("a", token_file=job["a"]) as a,
        moolink.Rpc("b", token_file=job["b"]) as b,
    ):
        learner._define_confined("parameters", lambda reply: reply([1.0]), "a")
        address = learner.listen("127.0.0.1:0")[0]
        a.connect(address)
        b.connect(address)
        assert a.sync("learner", "parameters") == [1.0]
        with pytest.raises(moolink.NoSuchFunction):
            b.sync("learner", "parameters")
        assert {peer["name"] for peer in learner.peers()} == {"a", "b"}
        with pytest.raises(moolink.TimeoutError):
            a.set_timeout(1.0)
            a.sync("b", "parameters")


def test_a_stranger_cannot_make_itself_the_broker_of_a_group(job: dict[str, Path]) -> None:
    with (
        moolink.Rpc("learner", token_file=job["job"]) as learner,
        moolink.Broker(first=True, token_file=job["b"]) as stranger,
        moolink.Broker(first=True, token_file=job["job"]) as broker,
    ):
        group = moolink.Group(learner, "a")
        learner.connect(stranger.listen("127.0.0.1:0")[0])
        until(lambda: len(learner.peers()) == 1, "the stranger")
        learner.connect(broker.listen("127.0.0.1:0")[0])
        formed([group])
        assert broker.members("a") == ["learner"]
        assert stranger.groups() == []


def refusal(update: Callable[[], object]) -> str:
    """What a member that waits for its broker is told."""
    with pytest.raises(moolink.AuthError) as caught:
        until(lambda: bool(update()), "the broker's refusal")
    return str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "shm://"])
def test_who_waits_for_a_broker_of_another_job_hears_so(job: dict[str, Path], address: str) -> None:
    with (
        moolink.Broker(first=True, token_file=job["another"]) as stranger,
        moolink.Broker(first=True, token_file=job["job"]) as broker,
        moolink.Rpc("learner", token_file=job["job"]) as learner,
    ):
        learner.connect(stranger.listen(address)[0])
        with moolink.Group(learner, "a") as group:
            text = refusal(group.update)
            for said in ("group 'a'", "no broker", "token", str(job["job"])):
                assert said in text
            # Another address may lead to the broker all the same, and does.
            learner.connect(broker.listen(address)[0])
            while not group.members():
                with contextlib.suppress(moolink.AuthError):
                    until(group.update, "the broker")
            assert group.members() == ["learner"]
            group.update()


def test_an_accumulator_that_waits_for_a_broker_of_another_job_hears_so(
    job: dict[str, Path],
) -> None:
    with (
        moolink.Broker(first=True, token_file=job["another"]) as stranger,
        moolink.Rpc("learner", token_file=job["a"]) as learner,
        moolink.Group(learner, "a") as group,
        moolink.Accumulator(
            "model", [torch.zeros(1, requires_grad=True)], group=group
        ) as accumulator,
    ):
        learner.connect(stranger.listen("127.0.0.1:0")[0])
        assert "no broker" in refusal(accumulator.update)
        assert "no broker" in refusal(lambda: next(accumulator.training_steps(lambda: None)))


def test_a_member_without_its_broker_goes_on(job: dict[str, Path]) -> None:
    """Another token at the broker's place is no reason to stop those that are in a group."""
    with (
        moolink.Rpc("a", token_file=job["job"]) as a,
        moolink.Rpc("b", token_file=job["job"]) as b,
        moolink.Group(a, "a") as group,
        moolink.Group(b, "a") as other,
    ):
        with moolink.Broker(first=True, token_file=job["job"]) as broker:
            address = broker.listen("127.0.0.1:0")[0]
            a.connect(address)
            b.connect(address)
            formed([group, other])
        dialled = a.stats()["dials_failed"]
        with moolink.Broker(first=True, token_file=job["another"]) as stranger:
            stranger.listen(address)
            until(
                lambda: group.update() or a.stats()["dials_failed"] > dialled + 3,
                "refusals by the stranger",
            )
            assert sorted(group.members()) == ["a", "b"]


def test_a_guest_reads_no_report_of_a_peer_of_the_whole_job(job: dict[str, Path]) -> None:
    with (
        moolink.Broker(first=True, token_file=job["job"]) as broker,
        moolink.Rpc("learner", token_file=job["job"]) as learner,
        moolink.Rpc("guest", token_file=job["a"]) as guest,
        moolink.Rpc("friend", token_file=job["a"]) as friend,
    ):
        for peer in (learner, friend):
            peer.connect(broker.listen("127.0.0.1:0")[0])
            guest.connect(peer.listen("127.0.0.1:0")[0])
        for function, arguments in (("report", ()), ("explain", ("x",))):
            name = f"moolink.metrics/{function}"
            with pytest.raises(moolink.NoSuchFunction):
                guest.sync("learner", name, *arguments)
            assert guest.sync("friend", name, *arguments)
            for peer in ("learner", "friend"):
                assert broker.rpc.sync(peer, name, *arguments)
