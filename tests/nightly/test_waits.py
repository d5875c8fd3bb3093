"""What the log says of waits that come to nothing, once they have taken 3 s."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import moolink
from tests.accumulator.conftest import make  # noqa: F401 - a fixture
from tests.accumulator.loops import Make, connect, parameters, pump
from tests.waiting import until


def says(caplog: pytest.LogCaptureFixture, poll: Callable[[], object], *parts: str) -> None:
    """Polls until one line of the log has all the parts."""

    def said() -> bool:
        poll()
        return any(all(part in line for part in parts) for line in caplog.messages)

    until(said, f"{parts} in the log; there is {caplog.messages}")


def test_a_group_that_was_never_connected(caplog: pytest.LogCaptureFixture) -> None:
    with moolink.Rpc("alone") as rpc, moolink.Group(rpc, "g") as group:
        says(caplog, group.update, "group 'g' waits for its broker", "call connect()")


def test_an_accumulator_that_was_never_connected(caplog: pytest.LogCaptureFixture) -> None:
    with moolink.Accumulator("g", parameters()) as accumulator:
        says(caplog, accumulator.update, "group 'g' waits for its broker", "call connect()")


def test_a_broker_that_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
    with moolink.Rpc("alone") as rpc, moolink.Group(rpc, "g") as group:
        rpc.connect(address)
        says(caplog, group.update, "waits for its broker", address, "does broker 'broker' run")


def test_a_wait_for_members_without_a_broker_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        moolink.Rpc("alone") as rpc,
        moolink.Group(rpc, "g") as group,
        pytest.raises(moolink.TimeoutError, match="waits for its broker"),
    ):
        group.wait_for_members(1, timeout=5)
    (line,) = [line for line in caplog.messages if "waits for its broker" in line]
    assert line.startswith("group 'g'")


def test_a_broker_that_goes(caplog: pytest.LogCaptureFixture) -> None:
    with moolink.Broker(first=True) as broker, moolink.Rpc("alone") as rpc:
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        with moolink.Group(rpc, "g") as group:
            until(lambda: group.update() or group.active(), "a view")
            broker.close()
            says(caplog, group.update, "without its broker", "no peer can join")


def test_accumulators_of_different_names(
    caplog: pytest.LogCaptureFixture, broker_address: str
) -> None:
    with moolink.Rpc("a") as a, moolink.Rpc("b") as b:
        first = moolink.Accumulator("model", parameters(), group=moolink.Group(a, "g"))
        second = moolink.Accumulator("modle", parameters(), group=moolink.Group(b, "g"))
        for rpc in (a, b):
            rpc.connect(broker_address)
        both = [first, second]
        says(caplog, lambda: pump(both), "'g/model' of peer 'a'", "'b'", "make one of this name")
        says(caplog, lambda: pump(both), "'g/modle' of peer 'b'", "'a'", "make one of this name")


def test_a_typo_in_a_peers_name(caplog: pytest.LogCaptureFixture) -> None:
    with moolink.Rpc("client") as client:
        future = client.async_("lerner", "f")
        with pytest.raises(moolink.TimeoutError):
            future.result(timeout=4.0)
    (line,) = [line for line in caplog.messages if "lerner" in line]
    assert "'f' at 'lerner'" in line
    assert "is its name right?" in line


def test_a_member_that_contributes_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    peers = [make("leader", parameters(), version=1), make("idle", parameters())]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    for p in peers[0]._parameters:
        p.grad = torch.ones_like(p)
    peers[0].reduce_gradients(1)
    says(
        caplog,
        lambda: pump(peers),
        "peer 'idle' waits for",
        "gradients of this peer",
        "step.reduce()",
    )
