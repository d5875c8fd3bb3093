"""Checkpoints that training loops write and go on from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moolink
from moolink.accumulate.checkpoints import Checkpoint


class Learner:
    """A job of one member, as a process after another runs it."""

    def __init__(self, address: str, stack: contextlib.ExitStack, hidden: int = 1) -> None:
        self.model = torch.nn.Linear(3, hidden)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.address = address
        self.rpc = stack.enter_context(moolink.Rpc())
        self.group = stack.enter_context(moolink.Group(self.rpc, "group"))
        self.accumulator = stack.enter_context(
            moolink.Accumulator("model", self.model.parameters(), group=self.group)
        )

    def train(self, until: int, **options: Any) -> list[Any]:
        """Its turns, each of which has contributed."""
        steps = self.accumulator.steps(
            self.optimizer, until=lambda totals: totals["n"] >= until, **options
        )
        if not self.rpc.was_connected:
            self.rpc.connect(self.address)
        turns = []
        for step in steps:
            turns.append(step)
            self.model(torch.ones(2, 3)).square().mean().backward()
            step.reduce(2, {"n": 1}, means={"x": float(step.version)})
        return turns


@pytest.fixture
def learner(broker_address: str) -> Iterator[Any]:
    """Returns a function that makes a learner; the one before has ended."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Learner:
            stack.close()
            return Learner(broker_address, stack, **options)

        yield make


def test_a_loop_goes_on_where_the_file_was_written(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.ckpt"
    first = learner()
    turns = first.train(3, checkpoint=path)
    assert [step.version for step in turns] == [0, 1, 2]
    model = [p.detach().clone() for p in first.model.parameters()]
    moments = first.optimizer.state_dict()["state"][0]
    second = learner()
    steps = second.accumulator.steps(second.optimizer, checkpoint=path)
    assert all(torch.equal(a, b) for a, b in zip(model, second.model.parameters(), strict=True))
    assert torch.equal(second.optimizer.state_dict()["state"][0]["exp_avg"], moments["exp_avg"])
    second.rpc.connect(second.address)
    step = next(steps)
    assert (step.version, step.totals["n"], step.totals.mean("x")) == (3, 3, 1.0)
    assert step.stats["contributors"] == [first.rpc.get_name()]
    assert step.stats["counters"]["n"] == 1


def test_a_run_in_two_parts_has_the_bits_of_one_run(learner: Any, tmp_path: Path) -> None:
    def ended(*parts: int) -> list[torch.Tensor]:
        path = tmp_path / f"{len(parts)}.ckpt"
        for until in parts:
            torch.manual_seed(0)
            one = learner()
            one.train(until, checkpoint=path)
        assert one.accumulator.model_version() == parts[-1]
        return [p.detach() for p in one.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(ended(6), ended(2, 6), strict=True))


def test_a_job_that_has_ended_trains_no_more(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    assert len(learner().train(3, checkpoint=path)) == 3
    again = learner()
    assert again.train(3, checkpoint=path) == []
    assert again.accumulator.model_version() == 3


def test_it_is_written_when_it_is_due(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    one = learner()
    steps = one.accumulator.steps(one.optimizer, checkpoint=path, every=0)
    one.rpc.connect(one.address)
    step = next(steps)
    one.model(torch.ones(2, 3)).sum().backward()
    step.reduce(2, {"n": 1})
    next(steps)  # the loop is left here, as by Ctrl-C
    second = learner()
    steps = second.accumulator.steps(second.optimizer, checkpoint=path)
    second.rpc.connect(second.address)
    assert (next(steps).version, next(steps).totals["n"]) == (1, 1)
    three = learner()
    with pytest.raises(ValueError, match="every must be a number of seconds"):
        three.accumulator.steps(three.optimizer, checkpoint=path, every=-1)


def test_connect_comes_after_it(learner: Any, tmp_path: Path) -> None:
    one = learner()
    one.rpc.connect(one.address)
    with pytest.raises(RuntimeError, match=r"Call steps\(\) first, then connect\(\)"):
        one.accumulator.steps(one.optimizer, checkpoint=tmp_path / "run.ckpt")


def test_a_second_loop_of_one_accumulator_reads_nothing(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    one = learner()
    assert len(one.train(2, checkpoint=path)) == 2
    assert len(one.train(4, checkpoint=path)) == 2


def test_a_checkpoint_of_another_model_is_refused(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    learner().train(1, checkpoint=path)
    with pytest.raises(moolink.FileError, match=r"run.ckpt is not a checkpoint of this model"):
        learner(hidden=2).train(1, checkpoint=path)


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_damaged_checkpoint_is_refused(learner: Any, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.ckpt"
    learner().train(1, checkpoint=path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:-40],
            "changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "foreign": b"no checkpoint",
        }[damage]
    )
    with pytest.raises(moolink.FileError, match=r"run\.ckpt"):
        learner().train(2, checkpoint=path)


def test_jax_and_torch_read_each_others(learner: Any, tmp_path: Path, broker_address: str) -> None:
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    path = tmp_path / "run.ckpt"
    one = learner()
    one.train(2, checkpoint=path)
    weights = [p.detach().numpy().copy() for p in one.model.parameters()]
    zeros = [jax.numpy.zeros(w.shape, w.dtype) for w in weights]
    learner()  # the first one has ended
    with (
        moolink.Rpc() as rpc,
        moolink.Group(rpc, "in jax") as group,
        moolink.Accumulator("model", zeros, group=group) as accumulator,
    ):
        steps = accumulator.steps(optax.adam(0.05), checkpoint=path)
        rpc.connect(broker_address)
        step = next(steps)
        assert step.version == 2
        assert all((a == b).all() for a, b in zip(step.parameters, weights, strict=True))
        assert int(step.optimizer_state[0].count) == 2


def kept(one: Learner) -> list[Any]:
    parameters = [p.detach().clone() for p in one.model.parameters()]
    return [parameters, one.accumulator.model_version(), one.optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, "shape", "scheduler"])
def test_what_is_refused_changes_nothing_and_another_file_loads(
    learner: Any, tmp_path: Path, kind: Any
) -> None:
    bad, good, options = tmp_path / "bad.ckpt", tmp_path / "good.ckpt", {}
    if isinstance(kind, str):
        learner(hidden=2 if kind == "shape" else 1).train(2, checkpoint=bad)
        if kind == "scheduler":
            raising = learner()
            options = {"scheduler": Refusing(raising.optimizer)}
            raising.train(2, checkpoint=bad.with_name("with.ckpt"), **options)
            bad = bad.with_name("with.ckpt")
    else:
        other = learner()
        other.optimizer = kind(other.model.parameters(), lr=0.5, momentum=0)
        other.train(2, checkpoint=bad)
        if kind is torch.optim.SGD:  # which without momentum has no state: Adam's does not fit it
            one = learner()
            one.train(2, checkpoint=bad.with_name("adam.ckpt"))
            bad = bad.with_name("adam.ckpt")
    trained = learner()
    trained.train(3, checkpoint=good)
    weights = [p.detach().clone() for p in trained.model.parameters()]
    one = learner()
    if kind is torch.optim.SGD:
        one.optimizer = torch.optim.SGD(one.model.parameters(), lr=0.05)
    if kind == "scheduler":
        options = {"scheduler": Refusing(one.optimizer)}
        options["scheduler"].refuses = True
    before = kept(one)
    with pytest.raises(moolink.FileError, match="is not a checkpoint of this model"):
        one.accumulator.steps(one.optimizer, checkpoint=bad, **options)
    after = kept(one)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert after[1:] == before[1:]
    assert not one.optimizer.state_dict()["state"]
    if kind is torch.optim.SGD:
        one.optimizer = torch.optim.Adam(one.model.parameters())
    one.accumulator.steps(one.optimizer, checkpoint=good)
    assert one.accumulator.model_version() == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, one.model.parameters(), strict=True))


class Refusing(torch.optim.lr_scheduler.StepLR):
    """A scheduler that refuses one state."""

    refuses = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 100)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            raise ValueError("another schedule")
        super().load_state_dict(state_dict)


def test_an_error_of_load_state_comes_as_it_is(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    learner().train(2, checkpoint=path)

    def load(state: Any) -> None:
        raise KeyError("the user's own")

    one = learner()
    with pytest.raises(KeyError, match="the user's own"):
        one.accumulator.steps(one.optimizer, checkpoint=path, load_state=load)
    one.accumulator.steps(one.optimizer, checkpoint=path)
    assert one.accumulator.model_version() == 2


def test_totals_beside_a_checkpoint_are_refused(learner: Any, tmp_path: Path) -> None:
    one = learner()
    with pytest.raises(ValueError, match="checkpoint= and totals= contradict each other"):
        one.accumulator.steps(one.optimizer, checkpoint=tmp_path / "run.ckpt", totals={"n": 1})


def test_a_loop_outlives_a_folder_that_cannot_be_written(
    learner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning comes at once, though the first time is due after a minute. Only the last time
    raises."""
    path = Path("/proc/nowhere/run.ckpt")
    for count, every in enumerate((60.0, 0.0), start=1):
        one = learner()
        with pytest.raises(FileNotFoundError, match="/proc/nowhere"):
            one.train(3, checkpoint=path, every=every)
        assert one.accumulator.model_version() == 3
        assert caplog.text.count("the checkpoint cannot be written") == count


def test_a_newer_checkpoint_of_the_run_stays(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    one = learner()
    one.train(2, checkpoint=path)
    run, newer = one.accumulator._progress.run, path.read_bytes()
    stale = learner()
    stale.accumulator.set_model_version(1)
    checkpoint = Checkpoint(stale.accumulator, path, 60.0)
    checkpoint.save(run, dict)
    assert path.read_bytes() == newer
    checkpoint.save("another run", dict)
    assert path.read_bytes() != newer


def test_it_is_written_again_only_after_a_round(learner: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    learner().train(2, checkpoint=path)
    before = path.stat()
    learner().train(2, checkpoint=path, every=0)
    after = path.stat()  # with another time of access, for it was read
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_members_and_resumed_jobs_are_of_one_run(
    learner: Any, tmp_path: Path, broker_address: str
) -> None:
    path = tmp_path / "run.ckpt"
    with contextlib.ExitStack() as stack:
        members = [Learner(broker_address, stack) for _ in range(2)]
        for member in members:
            member.accumulator.set_virtual_batch_size(4)
        threads = [
            threading.Thread(target=member.train, args=(4,), kwargs={"checkpoint": path})
            for member in members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        runs = {member.accumulator._progress.run for member in members}
    one = learner()
    one.accumulator.steps(one.optimizer, checkpoint=path)
    assert {*runs, one.accumulator._progress.run} == runs
    assert len(runs) == 1
