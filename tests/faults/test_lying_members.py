"""Members and brokers of groups that keep to the protocol but for one number (MOOLINK_LIE)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moolink
from moolink.errors import StateError
from tests.faults.liar import Liar, lying, program
from tests.waiting import formed, until

HUGE = 2**64 - 64
MOST = 2**64 - 1

# A learner that takes part until it is killed, and says that it follows, or when it leads.
MEMBER = """
    import sys, torch, moolink
    rpc = moolink.Rpc("liar", timeout=5)
    rpc.connect(sys.argv[1])
    group = moolink.Group(rpc, "learners")
    model = torch.zeros(1000, requires_grad=True)
    learner = moolink.Accumulator("model", [model], group=group)
    learner.set_virtual_batch_size(2)
    told = False
    while True:
        learner.update()
        if not told and (learner.is_leader() or sys.argv[2] == "follows"):
            told = True
            print(sys.argv[2], flush=True)
        if learner.wants_state():
            learner.set_state({})
        elif learner.has_new_state():
            learner.state()
        elif learner.has_gradients():
            learner.zero_gradients()
        elif learner.wants_gradients():
            model.grad = torch.ones(1000)
            learner.reduce_gradients(1)
        else:  # a wait after a round would last until the next one, and it would never offer
            learner.wait(0.02)
    """


class Learner:
    """An honest one, which applies rounds as they come."""

    def __init__(self, name: str, broker: str) -> None:
        self.rpc = moolink.Rpc(name, timeout=5)
        self.rpc.connect(broker)
        self.group = moolink.Group(self.rpc, "learners")
        self.model = torch.zeros(1000, requires_grad=True)
        self.accumulator = moolink.Accumulator("model", [self.model], group=self.group)
        self.accumulator.set_virtual_batch_size(2)
        self.rounds = 0
        self.offers = 0
        self.refused_states = 0

    def step(self) -> None:
        accumulator = self.accumulator
        try:
            accumulator.update()
        except ValueError as e:
            if "no reason" not in str(e):
                raise
            return  # a liar's refusal, until it is gone
        except StateError:
            self.refused_states += 1
            return
        if accumulator.wants_state():
            accumulator.set_state({})
        elif accumulator.has_new_state():
            accumulator.state()
        elif accumulator.has_gradients():
            accumulator.zero_gradients()
            self.rounds += 1
        elif accumulator.wants_gradients():
            self.offers += 1
            if self.offers % 3 == 0:
                return accumulator.skip_gradients()
            self.model.grad = torch.ones(1000)
            accumulator.reduce_gradients(1)

    def close(self) -> None:
        self.accumulator.close()
        self.group.close()
        self.rpc.close()


@contextlib.contextmanager
def learners_at(broker: str) -> Iterator[list[Learner]]:
    honest = [Learner(f"honest {i}", broker) for i in range(2)]
    try:
        yield honest
    finally:
        for learner in honest:
            learner.close()


def steps(learners: list[Learner]) -> bool:
    for learner in learners:
        learner.step()
    learners[0].accumulator.wait(0.005)
    return True


def step_for_a_while(learners: list[Learner]) -> None:
    for _ in range(100):
        steps(learners)


def train_on(learners: list[Learner], rounds: int) -> None:
    """Until every one of them has applied so many more."""
    wanted = [learner.rounds + rounds for learner in learners]

    def trained() -> bool:
        for learner in learners:
            learner.step()
        return all(learner.rounds >= n for learner, n in zip(learners, wanted, strict=True))

    until(trained, f"{rounds} rounds")


def the_first_of_each_message(lies: list[str]) -> list[Any]:
    """The others are for nights."""
    messages = [lie.partition(".")[0] for lie in lies]
    return [
        pytest.param(lie, marks=pytest.mark.nightly) if message in messages[:number] else lie
        for number, (lie, message) in enumerate(zip(lies, messages, strict=True))
    ]


LIES = the_first_of_each_message(
    [
        f"announce.epoch={HUGE}",
        f"announce.floor={HUGE}",
        f"announce.view={HUGE}",
        f"offer.k={HUGE}",
        f"offer.batch={HUGE}",
        f"offer.batch={2**62}",
        f"offer.version={HUGE}",
        f"cut.round={HUGE}",
        "cut.total=0",
        f"cut.shared={HUGE}",
        f"cut.k={HUGE}",
        "cut.k=1",  # again and again
        "cut.batch=1",  # of what may be a skip
        f"flush.active={HUGE}",
        f"flush.version={HUGE}",
        f"flush.version={MOST}",
        f"flush.have={HUGE}",
        f"flush.have={MOST}",
        f"resume.round={HUGE}",
        f"resume.round={MOST}",
        "resume.refused=1",
        f"settings.virtual_batch_size={HUGE}",
        "settings.virtual_batch_size=0",
        f"settings.parallel_gradients={2**32 - 1}",
        "settings.parallel_gradients=0",
        f"have.have={HUGE}",
        f"have.delivered={HUGE}",
        f"stable.round={HUGE}",
        "snapshot.chunk_bytes=0",
        "snapshot.chunk_bytes=1",
        f"snapshot.bytes={HUGE}",
        f"snapshot.version={HUGE}",
        f"snapshot.chunk={2**32 - 1}",
    ]
)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_member_leaves_the_others_able_to_go_on(lie: str) -> None:
    """While it lies it may hold them up; when it is gone they train on."""
    leads = lie.startswith(
        ("cut.", "stable.", "snapshot.", "resume.", "settings.")
    )  # what leaders say
    joins = not lie.startswith("announce.")  # a view with it may never come
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(moolink.Broker(first=True))
        address = broker.listen("127.0.0.1:0")[0]
        part = "leads" if leads else "follows"
        member = lying(lie, program(MEMBER, address, part))
        if leads:
            liar = stack.enter_context(member)
            assert liar.next_line() == part
        learners = stack.enter_context(learners_at(address))
        if not leads:
            liar = stack.enter_context(member)
            assert liar.next_line() == part
        if joins or lie.startswith("announce.view"):
            formed([learner.group for learner in learners], size=3)
        if lie.startswith("announce.view"):  # a new broker asks for it
            broker.close()
            broker = stack.enter_context(moolink.Broker())
            broker.listen(address)
        until(lambda: steps(learners) and liar.has_lied(), "the lie", poll=0)
        step_for_a_while(learners)
        liar.kill()
        train_on(learners, 5)
        models = [learner.accumulator.model_version() for learner in learners]
        assert max(models) - min(models) <= 1


@contextlib.contextmanager
def leader_with(state: str) -> Iterator[tuple[str, Liar]]:
    """A group's address, and who leads it and gives that for its state."""
    leader = MEMBER.replace("learner.set_state({})", f"learner._core.set_state({state})")
    assert leader != MEMBER
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        liar = Liar("none=0", program(leader, address, "leads"))
        try:
            assert liar.next_line() == "leads"
            yield address, liar
        finally:
            liar.kill()


MODEL = "([torch.full((1000,), 7.0)], [])"
STATES = [  # the model, the rest
    "7, 7",
    f"{MODEL}, (None, {{}}, [7], 0)",
    "([torch.zeros(999)], []), (None, {}, [], 0)",
    *(
        pytest.param(state, marks=pytest.mark.nightly)
        for state in (
            f"{MODEL}, (1, 2)",
            f"{MODEL}, (None, {{}}, [])",
            f"{MODEL}, (None, {{}}, [], '8')",
            f"{MODEL}, (None, {{'steps': 'many'}}, [], 0)",
            f"{MODEL}, (None, 3, [], 0)",
            f"{MODEL}, (None, {{}}, [['liar', 'x']], 0)",
            "(['parameters'], []), (None, {}, [], 0)",
            "([torch.full((1000,), 7.0)] * 2, []), (None, {}, [], 0)",
            "(), (None, {}, [], 0)",
        )
    ),
]


@pytest.mark.parametrize("state", STATES)
def test_a_leaders_state_of_another_form_is_refused_and_outlived(state: str) -> None:
    with contextlib.ExitStack() as stack:
        address, liar = stack.enter_context(leader_with(state))
        learners = stack.enter_context(learners_at(address))
        until(
            lambda: steps(learners) and all(learner.refused_states > 1 for learner in learners),
            "its state is refused, and asked for again",
            poll=0,
        )
        liar.kill()
        train_on(learners, 5)
        assert all(learner.accumulator.connected() for learner in learners)
        assert not any(learner.model.any() for learner in learners)  # nothing of it was installed


def test_a_training_loop_outlives_a_leader_whose_state_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as stack:
        address, liar = stack.enter_context(leader_with("7, 7"))
        learner = Learner("honest", address)
        stack.callback(learner.close)
        learner.accumulator.set_virtual_batch_size(1)
        turns = learner.accumulator.training_steps(
            lambda: None, until=lambda totals: totals["turns"] >= 5
        )

        def train() -> None:
            for step in turns:
                learner.model.grad = torch.ones(1000)
                step.reduce(1, {"turns": 1})

        training = threading.Thread(target=train)
        training.start()
        until(lambda: caplog.text.count("cannot be taken over") > 1, "its state is refused")
        liar.kill()
        training.join(60)
        assert not training.is_alive()
        assert learner.accumulator.model_version() >= 5


@pytest.mark.parametrize("lie", [f"view.epoch={HUGE}", "view.epoch=0", "view.twins=3"])
def test_a_lying_broker_harms_no_process(lie: str) -> None:
    with lying(lie, ["-m", "moolink.broker", "127.0.0.1:0", "--first"]) as broker:
        address = broker.next_line().split()[-1]  # "... listens on tcp://..."
        with learners_at(address) as learners:
            until(lambda: steps(learners) and broker.has_lied(), "the lie", poll=0)
            step_for_a_while(learners)
            learners[0].rpc.define("echo", lambda value: value)
            assert learners[1].rpc.sync("honest 0", "echo", 7) == 7  # calls need no broker
