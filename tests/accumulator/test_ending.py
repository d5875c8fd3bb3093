"""The end of a job: all members leave with the same bits, or say that they do not."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import moolink
import moolink.accumulate.parting
from tests.accumulator.loops import Make, connect
from tests.accumulator.test_mixed import Member, equal_parameters, jax_model, torch_model
from tests.waiting import TIMEOUT, until


def ended(totals: dict[str, int]) -> bool:
    return totals["turns"] >= 2


class Learner:
    """A member whose loop a thread of its own goes through, as a process does."""

    def __init__(
        self, member: Member, timeout: float = TIMEOUT, totals: dict[str, int] | None = None
    ) -> None:
        self.member = member
        self.totals = totals
        self.error: Exception | None = None
        self.timeout = timeout
        self.thread = threading.Thread(target=self.run, daemon=True)

    def turns(self) -> Any:
        accumulator = self.member.accumulator
        return accumulator.training_steps(self.member.apply, until=ended, totals=self.totals)

    def contribute(self, step: Any) -> None:
        if self.member.is_torch:
            for p in self.member.accumulator._parameters:
                p.grad = p.detach().clone().fill_(1.5)
            step.reduce(1, {"turns": 1})
        else:
            step.reduce(jax_model(1.5), 1, {"turns": 1})

    def run(self) -> None:
        try:
            for step in self.turns():
                self.contribute(step)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            self.member.accumulator.close()
            self.member.accumulator._group.close()

    def join(self) -> None:
        self.thread.join(self.timeout)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def learners(make: Make, *models: Any, **options: Any) -> list[Learner]:
    made = []
    for number, model in enumerate(models):
        peer = make(f"peer-{number}", model, **options)
        peer.set_virtual_batch_size(2)
        made.append(Learner(Member(peer)))
        connect([learner.member.accumulator for learner in made])
    until(lambda: all_want_gradients(made), "equal parameters")
    return made


def all_want_gradients(made: list[Learner]) -> bool:
    """Has all look for news: a follower's first turn may need what the leader's look sends."""
    for learner in made:
        learner.member.accumulator.update()
    return all(learner.member.accumulator.wants_gradients() for learner in made)


def contribute_once(learner: Learner) -> Any:
    """The loop of this one, which stands still after its first turn."""
    turns = learner.turns()
    learner.contribute(next(turns))
    return turns


@pytest.mark.parametrize("leader", ["torch", "jax"])
def test_a_leader_stays_until_the_others_have_its_last_parameters(make: Make, leader: str) -> None:
    pytest.importorskip("jax")
    models = [torch_model(), jax_model()] if leader == "torch" else [jax_model(), torch_model()]
    first, second = learners(make, *models)
    turns = contribute_once(second)
    first.thread.start()
    # The follower has not come for the round yet; the leader is at its end.
    until(
        lambda: not first.thread.is_alive() or bool(second.member.accumulator._parting._waiting),
        "the leader's end",
    )
    assert list(turns) == []
    first.join()
    assert second.member.accumulator.model_version() == 1
    assert equal_parameters([first.member, second.member])


def test_a_follower_whose_leader_is_gone_with_the_last_parameters_says_so(make: Make) -> None:
    pytest.importorskip("jax")
    first, second = learners(make, torch_model(), jax_model())
    loop = contribute_once(first)
    second.thread.start()
    accumulator = first.member.accumulator
    until(lambda: accumulator.update() or accumulator.has_gradients(), "the round")
    until(second.member.accumulator.awaits_parameters, "the other's question")
    loop.close()
    accumulator.close()  # as if it were killed
    accumulator._group.close()
    with pytest.raises(moolink.Error, match=r"'peer-0' is gone.* version 1"):
        second.join()


def test_a_job_that_is_over_at_its_start_ends_before_a_leader_was_seen(
    make: Make, broker_address: str
) -> None:
    model = torch_model()
    first = make("peer-0", model, version=1)
    until(lambda: first._group.update() or first._group.members() == ["peer-0"], "the group")
    with moolink.Rpc("peer-1") as rpc, moolink.Group(rpc, "group") as group:
        rpc.connect(broker_address)
        # This membership change lasts until the second member has an accumulator.
        until(lambda: "of peer 'peer-0' waits for: 'peer-1'" in moolink.dump(), "the change")
        learner = Learner(Member(first), totals={"turns": 2})
        learner.thread.start()
        until(lambda: not learner.thread.is_alive() or bool(first._awaited), "the loop's end")
        accumulator = moolink.Accumulator("model", torch_model(7.0), group=group)
        late = Learner(Member(accumulator))
        late.thread.start()
        learner.join()
        late.join()
    assert equal_parameters([learner.member, late.member])


def test_a_leader_that_waits_no_longer_tells_whom_it_leaves(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("jax")
    monkeypatch.setattr(moolink.accumulate.parting, "LONGEST", 0.0)
    first, second, third = learners(make, torch_model(), jax_model(), torch_model())
    turns = contribute_once(second)
    others = third.turns()
    next(others)
    first.thread.start()
    first.join()
    assert "peer-1, peer-2 did not end at version 1" in caplog.text
    assert list(others) == []  # its framework is the leader's
    # If it leads now, its loop, which would answer questions, has ended.
    core = second.member.accumulator._core
    until(lambda: not core.update("raise") and core.leader() not in ("", "peer-0"), "the next one")
    with pytest.raises(moolink.Error, match=r"'peer-[02]' is gone.* version 1"):
        list(turns)


def test_every_few_rounds_ends_with_the_leaders_parameters_too(make: Make) -> None:
    pytest.importorskip("jax")
    first, second = learners(make, torch_model(), jax_model(), sync_every=5)
    first.thread.start()
    second.thread.start()
    first.join()
    second.join()
    assert equal_parameters([first.member, second.member])


def test_who_wants_no_parameters_is_not_kept(make: Make) -> None:
    pytest.importorskip("jax")
    first, second = learners(make, torch_model(), jax_model(), sync_every=0)
    first.thread.start()
    second.thread.start()
    first.join()
    second.join()
    a, b = first.member.parameters(), second.member.parameters()
    assert not all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_newcomer_at_the_end_gets_the_final_state(make: Make) -> None:
    first, second = learners(make, torch_model(), torch_model())
    turns = contribute_once(second)
    first.thread.start()
    until(lambda: bool(second.member.accumulator._parting._waiting), "the leader's end")
    late = Learner(Member(make("late", torch_model(7.0))))
    assert list(late.turns()) == []
    assert list(turns) == []
    first.join()
    assert late.member.accumulator.model_version() == 1
    assert equal_parameters([first.member, second.member, late.member])
