"""Pickled objects: in moolib's programs as they are, in moolink's where they ask for it."""

from __future__ import annotations

import logging

import moolib
import pytest
import torch

import moolink
from moolink import tokens
from moolink.internal import pickles
from tests.compat.conftest import Peers
from tests.waiting import until


class Value:
    """A class that nobody registers."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_objects_travel_both_ways(peers: Peers) -> None:
    host, client = peers
    host.define("next", lambda value: Value(value.number + 1))
    result = client.sync("host", "next", Value(1))
    assert type(result) is Value
    assert result.number == 2


class Counted:
    """It counts how often it is unpickled."""

    times = 0

    def __init__(self) -> None:
        self.number = 1

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__ |= state
        Counted.times += 1


def test_a_first_call_unpickles_nothing_at_its_caller(peers: Peers) -> None:
    host, client = peers
    host.define("take", lambda value: None)
    client.sync("host", "take", Counted())
    assert Counted.times == 1  # at the host, which is in this process, too


def test_the_state_of_an_accumulator_with_its_own_rpc_is_pickled() -> None:
    def accumulator() -> moolib.Accumulator:
        made = moolib.Accumulator("model", [torch.nn.Parameter(torch.zeros(3))], [])
        made.connect(address)
        return made

    with moolib.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        with accumulator() as first:

            def leads() -> bool:
                first.update()
                return first.connected()

            until(leads, "the leader")
            with accumulator() as second:

                def has_state() -> bool:
                    for member in (first, second):
                        member.update()
                        if member.wants_state():
                            member.set_state({"value": Value(7)})
                    return second.has_new_state()

                until(has_state, "the state")
                assert second.state()["value"].number == 7


def test_it_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_told", set())
    with caplog.at_level(logging.WARNING, "moolink"), moolib.Rpc(), moolib.Rpc():
        (said,) = [r.getMessage() for r in caplog.records if "pickles" in r.getMessage()]
    assert "any holder of the token can run code here" in said


def test_strangers_are_spoken_of_after_holders_of_the_token(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_told", set())
    with (
        caplog.at_level(logging.WARNING, "moolink"),
        moolib.Rpc(),
        moolink.Rpc(insecure=True, allow_pickle="insecure"),
    ):
        said = [r.getMessage() for r in caplog.records if "pickles" in r.getMessage()]
    assert len(said) == 2
    assert "any process that reaches its port can run code here" in said[1]


def test_a_peer_of_moolink_refuses_them(peers: Peers) -> None:
    host, _ = peers
    with moolink.Rpc("strict", timeout=20) as strict:
        strict.connect(host.addresses()[-1])
        strict.define("f", lambda value: None)
        with pytest.raises(moolink.WireError, match="allow_pickle"):
            host.sync("strict", "f", Value(1))
        host.define("make", lambda: Value(1))
        with pytest.raises(moolink.Error, match="allow_pickle"):
            strict.sync("host", "make")


def test_insecure_peers_refuse_them_unless_told_plainly() -> None:
    with pytest.raises(ValueError, match=r'needs a token.*allow_pickle="insecure"'):
        moolink.Rpc(insecure=True, allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle is True"):
        moolink.Rpc(allow_pickle="yes")  # type: ignore[arg-type]
    with moolib.Rpc("host", insecure=True) as host:
        host.define("f", lambda value: None)
        with pytest.raises(RuntimeError, match="allow_pickle"):
            host.sync("host", "f", Value(1))
    with moolink.Rpc("host", insecure=True, allow_pickle="insecure") as told:
        told.define("f", lambda value: value.number)
        assert told.sync("host", "f", Value(3)) == 3


def test_a_program_without_a_token_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tokens.INSECURE_VARIABLE, "1")
    with moolib.Rpc("host") as host:
        host.define("f", lambda value: None)
        with pytest.raises(RuntimeError, match="allow_pickle"):
            host.sync("host", "f", Value(1))
