"""The training loop as an iterator."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import moolink
import moolink.torch
from tests.accumulator.loops import Make, connect
from tests.waiting import TIMEOUT, until

BATCH = 4


class Peer:
    """A learner in a thread of its own, as in a process of its own."""

    def __init__(self, make: Make, name: str, until: int, **options: Any) -> None:
        torch.manual_seed(len(name))  # models differ before they meet
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.5)
        self.accumulator = make(name, list(self.model.parameters()), **options)
        self.accumulator.set_virtual_batch_size(2 * BATCH)
        self.loaded: list[Any] = []
        self.until = until
        self.steps: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            self.train()
        except Exception as error:  # noqa: BLE001 - told by join()
            self.error = error

    def train(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for step in self.accumulator.steps(
            self.optimizer,
            scheduler=self.scheduler,
            state=lambda: "extra",
            load_state=self.loaded.append,
            until=lambda totals: totals["samples"] >= self.until,
        ):
            self.steps.append((step.version, step.totals.get("samples", 0)))
            if self.accumulator.is_observer():
                continue
            x = torch.randn(BATCH, 3, generator=generator)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            step.reduce(BATCH, {"samples": BATCH})

    def join(self) -> None:
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive(), self.accumulator.get_gradient_stats()
        if self.error is not None:
            raise self.error


def test_peers_end_at_one_round_with_one_model(make: Make) -> None:
    first = Peer(make, "first", until=400)
    first.accumulator.set_virtual_batch_size(BATCH)  # alone at the beginning
    second = Peer(make, "second one", until=400)
    second.accumulator.set_virtual_batch_size(BATCH)
    for peer in (first, second):
        peer.thread.start()
    for peer in (first, second):
        peer.join()
    assert first.accumulator.model_version() == second.accumulator.model_version()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.scheduler.state_dict() == second.scheduler.state_dict()
    moments = [p.optimizer.state_dict()["state"][0]["exp_avg"] for p in (first, second)]
    assert torch.equal(*moments)
    assert ["extra"] in (first.loaded, second.loaded)  # whoever was not the leader
    versions = [version for version, _ in first.steps]
    assert versions == sorted(versions)


def test_a_total_ends_the_loop_and_is_reported_as_its_target(make: Make) -> None:
    model = torch.nn.Linear(3, 1)
    accumulator = make("one", list(model.parameters()))
    accumulator.set_virtual_batch_size(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in accumulator.steps(optimizer, until={"samples": 3 * BATCH, "time_is_up": 1}):
        model(torch.ones(BATCH, 3)).sum().backward()
        step.reduce(BATCH, {"samples": BATCH})
    assert accumulator.model_version() == 3
    told = accumulator._rounds.report()
    assert told is not None
    assert told["totals"] == {"samples": 3 * BATCH}
    assert told["target"] == {"samples": 3 * BATCH, "time_is_up": 1}
    own = [value for name, _, value in accumulator._rounds._metrics() if "own_counter" in name]
    assert own == [3 * BATCH]


@pytest.mark.parametrize(
    ("until", "error"),
    [
        ({}, ValueError),
        ({"samples": 1.5}, TypeError),
        ({"samples": ""}, TypeError),
        (400, TypeError),
        ("samples", TypeError),
    ],
)
def test_a_target_is_checked(make: Make, until: Any, error: type[Exception]) -> None:
    model = torch.nn.Linear(3, 1)
    accumulator = make("one", list(model.parameters()))
    with pytest.raises(error, match=r"until.*must|until has no"):
        next(accumulator.steps(torch.optim.SGD(model.parameters(), 0.01), until=until))


def test_a_round_after_the_end_is_not_begun(make: Make) -> None:
    first = Peer(make, "first", until=BATCH)
    second = Peer(make, "second one", until=BATCH)
    steps = {}
    for peer in (first, second):
        peer.accumulator.set_virtual_batch_size(BATCH)
        peer.accumulator.set_parallel_gradients(2)

    def begin(peer: Peer) -> None:
        turns = peer.accumulator.steps(peer.optimizer, until=lambda totals: totals["samples"] > 0)
        for step in turns:
            steps[peer] = step, turns
            if len(steps) == 2:
                return

    threads = [threading.Thread(target=begin, args=[peer], daemon=True) for peer in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    for peer in (first, second):  # a round each, of which the first is the last one wanted
        peer.optimizer.zero_grad()
        peer.model(torch.ones(BATCH, 3)).sum().backward()
        steps[peer][0].reduce(BATCH, {"samples": BATCH})

    def both_rounds_came() -> bool:
        second.accumulator.update()
        if second.accumulator.has_gradients() and second.accumulator.model_version() == 1:
            second.accumulator.zero_gradients()
        return second.accumulator.model_version() == 2

    until(both_rounds_came, "two rounds at the second peer, and therefore at the first")
    second.accumulator.close()  # the end of its loop is waited for
    second.accumulator._group.close()
    assert list(steps[first][1]) == []
    assert first.accumulator.model_version() == 1
    assert first.accumulator.get_gradient_stats()["counters"] == {"samples": BATCH}
    assert not first.accumulator.has_gradients()


def test_an_observer_is_given_every_round(make: Make) -> None:
    observer = Peer(make, "observer", until=200, role="observer")
    first = Peer(make, "first", until=200)
    for peer in (first, observer):
        peer.accumulator.set_virtual_batch_size(BATCH)
    observer.thread.start()
    first.thread.start()
    first.join()
    observer.join()
    versions = [version for version, _ in observer.steps]
    assert versions == list(range(versions[0], versions[0] + len(versions)))
    for a, b in zip(first.model.parameters(), observer.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loops_of_another_kind_are_told_apart(make: Make) -> None:
    leader = make("leader", [torch.zeros(2, requires_grad=True)])
    stop = threading.Event()

    def serve() -> None:  # a leader that polls
        while not stop.is_set():
            leader.update()
            if leader.wants_state():
                leader.set_state("mine")
            leader.wait(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        while not leader.connected():
            stop.wait(0.01)
        newcomer = make("newcomer", [torch.zeros(2, requires_grad=True)])
        with pytest.raises(RuntimeError, match="same loop at every peer"):
            next(newcomer.training_steps(lambda: None))
    finally:
        stop.set()
        thread.join()


def test_a_step_that_is_left_alone_is_offered_again(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    applied = []
    peer = make("alone", [weight])
    steps = peer.training_steps(lambda: applied.append(weight.grad.clone()))
    assert next(steps).version == 0
    step = next(steps)
    assert step.version == 0
    weight.grad = torch.ones(2)
    step.reduce(1, {"n": 1})
    step = next(steps)
    assert (step.version, step.totals, len(applied)) == (1, {"n": 1}, 1)
    assert torch.equal(applied[0], torch.ones(2))
    assert step.stats is not None
    assert step.stats["contributors"] == ["alone"]
    with pytest.raises(ValueError, match="at least 1"):
        step.reduce(0)


def test_totals_of_a_checkpoint_go_on(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    peer = make("alone", [weight], version=7)
    asked = []

    def until(totals: dict[str, int]) -> bool:
        asked.append(dict(totals))
        return totals["n"] >= 12

    versions = []
    for step in peer.training_steps(lambda: None, until=until, totals={"n": 10}):
        versions.append(step.version)
        step.reduce(1, {"n": 1})
    assert versions == [7, 8]
    assert asked == [{"n": 10}, {"n": 11}, {"n": 12}]


def test_a_second_loop_continues_the_totals(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    peer = make("alone", [weight])

    def train(until: int) -> list[tuple[int, int]]:
        turns = []
        for step in peer.steps(optimizer, until=lambda totals: totals["n"] >= until):
            turns.append((step.version, step.totals["n"]))
            weight.sum().backward()
            step.reduce(1, {"n": 1})
        return turns

    assert train(2) == [(0, 0), (1, 1)]
    assert train(4) == [(2, 2), (3, 3)]
    assert train(4) == [], "it is over already"
    steps = peer.steps(optimizer, totals={"n": 10})
    assert next(steps).totals == {"n": 10}


def test_a_log_needs_a_place_and_is_the_leaders(make: Make, tmp_path: Path) -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    peers = [make(f"peer-{i}", [weight]) for i, weight in enumerate(weights)]
    connect(peers)
    with pytest.raises(RuntimeError, match=r'step.log\(\) needs a place: steps\(..., log="runs'):
        next(peers[0].training_steps(lambda: None)).log({"x": 1.0})
    for number, peer in enumerate(peers):
        folder = tmp_path / str(number)
        next(peer.training_steps(lambda: None, log=folder)).log({"x": 1.0})
        assert (folder / "log.csv").exists() is peer.is_leader()


def test_two_members_begin_a_second_loop(make: Make) -> None:
    peers = [Peer(make, name, until=4 * BATCH) for name in ("first", "second one")]
    for peer in peers:
        peer.thread.start()
    for peer in peers:
        peer.join()
        peer.until = 8 * BATCH
        peer.thread = threading.Thread(target=peer.run, daemon=True)
    for peer in peers:
        peer.thread.start()
    for peer in peers:
        peer.join()
        assert peer.accumulator.model_version() == 4
    for a, b in zip(*(peer.model.parameters() for peer in peers), strict=True):
        assert torch.equal(a, b)


def test_ctrl_c_ends_the_wait_for_others() -> None:
    with (
        moolink.Rpc("alone") as rpc,  # without a broker: there is nothing to do but to wait
        moolink.Group(rpc, "group") as group,
        moolink.Accumulator("model", [torch.zeros(2, requires_grad=True)], group=group) as peer,
    ):

        def interrupt(_: int, __: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                next(peer.training_steps(lambda: None))
        finally:
            signal.signal(signal.SIGALRM, before)
        peer.update()  # it can be gone on with
        assert not peer.connected()


def test_a_schedule_with_milestones_travels(make: Make) -> None:
    peers = [Peer(make, name, until=400) for name in ("first", "second one")]
    for peer in peers:
        peer.accumulator.set_virtual_batch_size(BATCH)
        peer.scheduler = torch.optim.lr_scheduler.MultiStepLR(peer.optimizer, [10, 20])
    for peer in peers:
        peer.thread.start()
    for peer in peers:
        peer.join()
    first, second = (peer.scheduler for peer in peers)
    assert first.state_dict() == second.state_dict()
    assert type(first.milestones) is type(second.milestones) is Counter


def test_a_schedule_that_needs_arguments_is_refused(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    peer = make("alone", [weight])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau\.step needs 'metrics'"):
        peer.steps(optimizer, scheduler=plateau)


def test_a_counter_that_no_round_had_is_0(make: Make) -> None:
    peer = make("alone", [torch.zeros(2, requires_grad=True)])
    turns = 0
    for step in peer.training_steps(lambda: None, until=lambda totals: totals["samples"] > 0):
        step.reduce(1, {"samples": 1} if turns == 1 else None)
        turns += 1
    assert turns == 2


def test_a_turn_that_is_over_is_refused(make: Make) -> None:
    peer = make("alone", [torch.zeros(2, requires_grad=True)])
    steps = peer.training_steps(lambda: None)
    old = next(steps)
    old.reduce(1)
    new = next(steps)
    with pytest.raises(RuntimeError, match="version 0 that is over"):
        old.reduce(1)
    new.reduce(1)


def contributing(peer: Peer, **options: Any) -> Any:
    """The peer's turns, each with a contribution already made."""
    for step in peer.accumulator.steps(peer.optimizer, **options):
        peer.model(torch.ones(BATCH, 3)).sum().backward()
        step.reduce(BATCH, {"samples": BATCH})
        yield step


def test_the_learning_rate_is_that_of_the_totals_before_the_round(make: Make) -> None:
    peer = Peer(make, "first", until=0)
    peer.accumulator.set_virtual_batch_size(BATCH)
    seen, rates = [], []

    def rate(totals: dict[str, int]) -> float:
        seen.append(totals["samples"])
        return 1.0 / (1 + totals["samples"])

    def over(totals: dict[str, int]) -> bool:
        rates.append(peer.optimizer.param_groups[0]["lr"])
        return totals["samples"] >= 3 * BATCH

    for _ in contributing(peer, learning_rate=rate, until=over):
        pass
    assert seen == [0, BATCH, 2 * BATCH]
    assert rates == [1.0, 1 / (1 + BATCH), 1 / (1 + 2 * BATCH)]


class Stopped(Exception):
    pass


def test_what_idle_raises_ends_a_loop_that_waits() -> None:
    model = torch.nn.Linear(3, 1)
    called = 0

    def idle() -> None:
        nonlocal called
        called += 1
        if called == 3:
            raise Stopped

    with moolink.Accumulator("g", list(model.parameters())) as accumulator:  # is connected nowhere
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(Stopped):
            next(iter(accumulator.steps(optimizer, idle=idle)))
    assert called == 3


def test_what_idle_raises_ends_the_wait_for_others_to_end(make: Make) -> None:
    peers = [Peer(make, name, until=0) for name in ("first", "second one")]
    for peer in peers:
        peer.accumulator.set_virtual_batch_size(BATCH)
    connect([peer.accumulator for peer in peers])  # the other one does not end, however
    (leader,) = (peer for peer in peers if peer.accumulator.is_leader())
    ended = False

    def over(totals: dict[str, int]) -> bool:
        nonlocal ended
        ended = totals["samples"] > 0
        return ended

    def stop_at_the_end() -> None:
        if ended:
            raise Stopped

    with pytest.raises(Stopped):
        for _ in contributing(leader, until=over, idle=stop_at_the_end):
            assert not ended


def test_a_second_reduce_of_a_turn_is_refused(make: Make) -> None:
    model = torch.nn.Linear(2, 1)
    accumulator = make("alone", list(model.parameters()))
    connect([accumulator])
    step = next(iter(accumulator.steps(torch.optim.SGD(model.parameters(), 0.1))))
    model(torch.ones(1, 2)).sum().backward()
    step.reduce(1)
    with pytest.raises(RuntimeError, match="has contributed before"):
        step.reduce(1)


def test_an_optimizer_of_another_model_is_told(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    accumulator = make("alone", list(model.parameters()))
    frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    accumulator.steps(torch.optim.SGD([*model.parameters(), frozen], 0.1))
    assert caplog.text == ""
    with pytest.raises(ValueError, match="the optimizer has none of the accumulator's parameters"):
        accumulator.steps(torch.optim.SGD(other.parameters(), 0.1))
    for parameters, words in (
        ([model.weight], "does not change 1 of the accumulator's 2 parameters"),
        ([*model.parameters(), other.bias], "has 1 parameters that the accumulator does not"),
    ):
        caplog.clear()
        accumulator.steps(torch.optim.SGD(parameters, 0.1))
        assert words in caplog.text


def test_a_counter_that_no_round_has_is_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    accumulator = make("alone", list(model.parameters()))
    connect([accumulator])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ends = lambda totals: totals["step"] >= 12 or totals["steps"] >= 30  # noqa: E731
    for step in accumulator.steps(optimizer, until=ends):
        model(torch.ones(1, 2)).sum().backward()
        step.reduce(1, {"steps": 1} | ({"episodes": 1} if step.version > 20 else {}))
    (told,) = [record for record in caplog.records if "until()" in record.message]
    assert told.message == (
        "until() asks for the counter 'step', which none of 10 rounds had; they had 'steps'"
    )


def test_a_loop_in_inference_mode(make: Make) -> None:
    """As of an observer, which computes no gradients; those that are shown have no versions."""
    observer = Peer(make, "observer", until=BATCH, role="observer")
    first = Peer(make, "first", until=BATCH)
    first.accumulator.set_virtual_batch_size(BATCH)
    first.thread.start()
    with torch.inference_mode():
        observer.train()
    first.join()
    assert observer.accumulator.model_version() == 1
    assert observer.accumulator._rounds.report()["idle"] == 0.0, "its loop has ended"  # type: ignore[index]


def test_a_loop_that_steps_its_optimizer_itself_is_told(make: Make) -> None:
    def train(accumulator: Any, model: torch.nn.Module, own_step: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in accumulator.steps(optimizer, until=lambda totals: totals["n"] >= 400):
            model(torch.ones(1, 2)).sum().backward()
            if own_step:
                optimizer.step()
            step.reduce(1, {"n": 1})

    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    peers = [
        make(f"peer-{i}", list(m.parameters()), checksum_every=1) for i, m in enumerate(models)
    ]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            train(peers[index], models[index], own_step=index == 1)
        except moolink.Error as error:
            errors.append(error)
            for peer in peers:
                peer.close()

    threads = [threading.Thread(target=run, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert re.search(r"after round \d+: do all peers", str(errors[0])) is not None
    assert "optimizer.step() in the body of steps()" in str(errors[0])


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 1), torch.nn.ModuleDict()])
def test_a_model_in_place_of_its_parameters(model: torch.nn.Module) -> None:
    for kind in (moolink.Accumulator, moolink.torch.Accumulator):
        with pytest.raises(TypeError, match=r"model\.parameters\(\), not the model"):
            kind("m", model)  # type: ignore[operator]
