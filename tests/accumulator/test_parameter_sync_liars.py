"""Questions for parameters, and answers, that have not the form they should have."""

from __future__ import annotations

from typing import Any

import pytest

import moolink
from tests.accumulator.loops import Make, connect, parameters, pump
from tests.waiting import until


@pytest.mark.parametrize(
    "question", [("liar", "x"), (7, 1), (["liar"], 1), ("x" * 10_000, 1), ("liar", 1.5)], ids=repr
)
def test_a_question_of_another_form_is_refused(
    make: Make, broker_address: str, question: tuple[Any, Any]
) -> None:
    leader = make("leader", parameters())
    connect([leader])
    with moolink.Rpc("liar", timeout=10) as liar:
        liar.connect(broker_address)
        with pytest.raises(moolink.RemoteError, match="name and a version"):
            liar.sync("leader", "moolink.parameters:'group':'model'", *question)
    version = leader.model_version()

    def trains() -> bool:
        pump([leader])
        if leader.has_gradients():
            leader.zero_gradients()
        elif leader.wants_gradients():
            leader.skip_gradients()
        return leader.model_version() > version or leader.wants_gradients()

    until(trains, "the leader's next update")


def test_names_of_followers_without_end_leave_nothing_behind(
    make: Make, broker_address: str
) -> None:
    leader = make("leader", parameters())
    connect([leader])
    with moolink.Rpc("liar", timeout=20) as liar:
        liar.connect(broker_address)
        asked = [
            liar.async_("leader", "moolink.parameters:'group':'model'", f"name {i}", 0)
            for i in range(5000)
        ]

        def answered() -> bool:
            pump([leader])
            return all(future.done() for future in asked)

        until(answered, "the answers")
        assert all(future.exception() is None for future in asked)
    assert leader._sync._waiting == {}


@pytest.mark.parametrize("question", [(7, 1), ("x" * 10_000, 1), ("liar", "x"), ("liar", True)])
def test_a_question_for_the_end_of_another_form_is_refused(
    make: Make, broker_address: str, question: tuple[Any, Any]
) -> None:
    member = make("member", parameters())
    with moolink.Rpc("liar", timeout=10) as liar:
        liar.connect(broker_address)
        with pytest.raises(moolink.RemoteError, match="name and a version"):
            liar.sync("member", "moolink.parting:'group':'model'", *question)
    assert not member._parting._waiting
