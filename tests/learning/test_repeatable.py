"""`--deterministic`: every run has the same bits, whatever the number of its peers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import moolink
from examples.common import acting
from examples.common.checksums import NAME, Checksums
from examples.common.normalizer import Normalizer
from examples.common.options import GroupOptions, ImpalaOptions, parse
from examples.torch import impala
from tests.learning.processes import broker, read_until, run, start
from tests.learning.stubs import Counting, options, run_of
from tests.learning.test_acting import TorchNet
from tests.processes import killed_at_the_end
from tests.waiting import until

ROUNDS = 8


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_one_and_two_peers_have_the_same_rounds(framework: str, tmp_path: Any) -> None:
    """A short version of `tests/nightly/test_repeatable.py`."""
    pytest.importorskip(framework)
    lists = []
    for peers in (1, 2):
        folder = tmp_path / str(peers)
        command = ["-m", "moolink", "run", "-n", str(peers), "-m", f"examples.{framework}.impala"]
        given = ["--env-id", "CartPole-v1", "--deterministic", "--total-steps", str(160 * ROUNDS)]
        code, output = run(*command, *given, "--save-dir", str(folder))
        assert code == 0, output
        assert "cannot be repeated" not in output
        lists.append((folder / NAME).read_text().splitlines())
    assert lists[0] == lists[1]
    assert [line.partition(",")[0] for line in lists[0]] == [str(v) for v in range(ROUNDS + 1)]
    assert len({line.partition(",")[2] for line in lists[0]}) == ROUNDS + 1


def test_a_job_names_the_round_from_which_it_is_not_repeatable() -> None:
    """When a peer dies, its units move to the other, which plays them from their beginning."""
    given = ["--env-id", "CartPole-v1", "--deterministic", "--total-steps", "100000000"]
    given += ["--num-peers", "2", "--log-interval", "0.5"]
    with broker() as address, killed_at_the_end() as peers, TemporaryDirectory() as folder:
        given += ["--connect", address, "--group", "job", "--save-dir", folder]
        command = ["-m", "examples.torch.impala", *given, "--name"]
        peers.append(first := start(*command, "first"))
        read_until(first, "new run")  # it leads, and says how the job goes
        peers.append(second := start(*command, "second"))
        read_until(first, "of 2 peers |")
        second.kill()
        said = read_until(first, "cannot be repeated from round")
        round_ = int(re.findall(r"from round (\d+) on", said[-1])[0])
        read_until(first, "of 1 peer |")
        assert any(f"repeatable up to round {round_ - 1}" in line for line in said)


class Versioned(TorchNet):
    """A network whose logarithm of an action's probability is -version."""

    def __init__(self) -> None:
        super().__init__()
        self.version: torch.Tensor
        self.register_buffer("version", torch.zeros(()))

    def forward(self, observation: Any, first: Any, state: Any) -> Any:
        count = observation["obs"][..., 1]
        return torch.full_like(count, int(self.version)).long(), count, state


@pytest.mark.parametrize("own_units", [(0,), (1, 2)])
def test_steps_act_with_parameters_of_a_fixed_lag(monkeypatch: Any, own_units: Any) -> None:
    """Unrolls of 4 steps are cut into 2 parts, each for one round."""
    monkeypatch.setattr("examples.common.acting.make_envs", lambda o, num_envs: Counting(2))
    o = options(deterministic=True, num_groups=1, unroll_length=4, batch_size=1, num_envs=2)
    net, envs = Versioned(), Counting(2)
    acted: dict[int, list[list[float]]] = {unit: [] for unit in own_units}
    actor: Any = impala.Actor(o, envs, net, run_of(o, envs))  # type: ignore[arg-type]
    with actor:
        actor.start()
        for version in range(8):
            net.version.fill_(version)
            actor.take_parameters(net.state_dict().values(), version, own_units)
            for unit in own_units:
                batch = actor.next_batch(10, unit)
                acted[unit].append((-batch.data["log_prob"][:, 0]).tolist())
                actor.release(batch)
    for lags in acted.values():
        assert lags[0] == lags[1] == [0, 0, 0, 0]
        assert lags[2] == lags[3] == [0, 0, 1, 1]
        assert lags[4] == lags[5] == [2, 2, 3, 3]
        assert lags[6] == lags[7] == [4, 4, 5, 5]


class Playing(acting.ActingThread):
    """Records the version that it acts with, and gives each unroll `times` times."""

    times = 1

    def use(self, parameters: int) -> None:
        self.acts_with = parameters

    def play(self, group: acting.Group) -> Iterator[acting.Unroll | None]:
        group.reset(0)
        for unroll in itertools.cycle(group.unrolls):
            for t in range(self.o.unroll_length):
                unroll.record(t, version=self.acts_with)
                group.send(np.zeros((group.num_envs, 1), np.int64))
                yield None
                group.recv()
            for _ in range(self.times):
                yield unroll


def playing(times: int = 1) -> Playing:
    o = options(deterministic=True, num_groups=1, unroll_length=4, batch_size=1, num_envs=2)
    thread = Playing(o, envs := Counting(2), run_of(o, envs))
    thread.times = times
    return thread


def test_an_unroll_that_is_given_again_does_not_let_the_lag_grow() -> None:
    with playing(times=3) as actor:
        actor.start()
        for version in range(60):
            actor.take_parameters(version, version, [0])
            batch: Any = actor.next_batch(10, 0)
            assert version - batch.data["version"].min() <= 12  # two unrolls: 2 parts, 3 times
            actor.release(batch)
        assert len(actor._published) <= 12


def test_a_unit_that_leaves_and_comes_back_at_one_version_is_played() -> None:
    with playing() as actor:
        actor.take_parameters(0, 0, [0])
        actor.start()
        until(lambda: actor.full[0].qsize() > 0, "the first batches")
        actor.take_parameters(0, 0, [])
        actor.take_parameters(0, 0, [0])
        assert actor.next_batch(10, 0) is not None


def test_units_that_move_here_are_played_from_their_beginning(monkeypatch: Any) -> None:
    made = []

    def make(o: Any, num_envs: int) -> Any:
        made.append(Counting(2))
        return made[-1]

    monkeypatch.setattr("examples.common.acting.make_envs", make)
    o = options(deterministic=True, num_groups=1, unroll_length=4, batch_size=2, num_envs=2)
    net, envs = Versioned(), Counting(2)
    actor: Any = impala.Actor(o, envs, net, run_of(o, envs))  # type: ignore[arg-type]
    with actor:
        actor.start()
        for version in range(8):
            own_units = (0,) if version in (0, 1, 5) else (0, 1)
            net.version.fill_(version)
            actor.take_parameters(net.state_dict().values(), version, own_units)
            for unit in own_units:
                batch = actor.next_batch(10, unit)
                # Unit 1 comes with version 2, and again with version 6.
                since = version - (6 if version > 5 else 2) * unit
                lag = 0 if since == 0 else 1
                assert (-batch.data["log_prob"][:, 0]).tolist() == [version - lag] * 4
                assert batch.data["observation"]["obs"][0, 0, 1] == 4 * since
                actor.release(batch)
    assert envs.closed
    assert all(each.closed for each in made)


def test_an_error_of_a_units_environment_reaches_the_learner() -> None:
    o = options(deterministic=True, num_groups=1, unroll_length=4, batch_size=2, num_envs=2)
    envs = Counting(2, fail_at=3)
    actor: Any = impala.Actor(o, envs, Versioned(), run_of(o, envs))  # type: ignore[arg-type]
    with actor:
        actor.start()
        actor.take_parameters([torch.zeros(())], 0, (3,))
        with pytest.raises(OSError, match="the emulator is gone"):
            actor.next_batch(10, 3)


class Ended:
    def __init__(self, result: Any) -> None:
        self._result = result

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def test_statistics_of_units_are_summed_in_their_order() -> None:
    envs = SimpleNamespace(observation_spaces={"x": spaces.Box(-1, 1, (2,), np.float32)})
    normalizer = Normalizer(GroupOptions(normalize=True), envs)
    counted = []
    for unit in range(3):
        of_unit = Normalizer(GroupOptions(normalize=True), envs)
        of_unit.observe({"x": np.full((3, 2), 10.0**unit)})
        counted.append(of_unit.take())
        assert not of_unit.take()["x"].any()
        normalizer.add(unit, 3, counted[-1])
    group: Any = SimpleNamespace(
        all_reduce=lambda name, rows: Ended(moolink.GroupChanged("a member has joined"))
    )
    normalizer.exchange_in_order(group, "first")
    assert not normalizer.state()["x"].any()
    group.all_reduce = lambda name, rows: Ended(rows)
    normalizer.exchange_in_order(group, "second")
    rows = [each["x"] for each in counted]
    np.testing.assert_array_equal(normalizer.state()["x"], (rows[0] + rows[1]) + rows[2])
    assert normalizer.scale["x"][0] == pytest.approx([37.0, 37.0])
    normalizer.exchange_in_order(group, "third")  # nothing twice
    np.testing.assert_array_equal(normalizer.state()["x"], (rows[0] + rows[1]) + rows[2])


def test_checksums_go_on_from_the_checkpoint(tmp_path: Any) -> None:
    def note(checksums: Checksums, *versions: int) -> None:
        for version in versions:
            checksums.note(version, {"x": np.full(3, version)})

    def versions() -> list[int]:
        return [int(line.split(",")[0]) for line in (tmp_path / NAME).read_text().splitlines()]

    note(Checksums(tmp_path, 0), 0, 1, 1, 2, 3)
    assert versions() == [0, 1, 2, 3]
    note(Checksums(tmp_path, 2), 2, 3)  # after a checkpoint of version 2
    assert versions() == [0, 1, 2, 3]
    with (tmp_path / NAME).open("a") as file:
        file.write("4,12ab")  # all that a killed process has written of a line
    note(Checksums(tmp_path, 4), 4)
    assert versions() == [0, 1, 2, 3, 4]
    Checksums(tmp_path, 0)  # a new run
    assert versions() == []


def test_options_of_units_do_not_depend_on_the_number_of_peers() -> None:
    cartpole = ["--env-id", "CartPole-v1", "--deterministic"]
    for peers in ("1", "2", "4"):
        o = parse(ImpalaOptions, [*cartpole, "--num-peers", peers], {})
        assert (o.num_groups, o.num_envs, o.batch_size, o.parts) == (1, 4, 2, 2)
        assert (o.round_size, o.job_units) == (8, 4)
        assert [o.group_seed(unit) for unit in range(2)] == [0, 10_007]
    o = parse(ImpalaOptions, ["--deterministic", "--units", "2"], {})
    assert (o.num_envs, o.batch_size, o.round_size) == (16, 2, 4)
    for given, message in (
        (["--num-peers", "5"], "at least the number of peers, 5"),
        (["--num-groups", "2"], "leave out --num-groups"),
        (["--virtual-batch-size", "8"], "leave out --num-groups, --virtual-batch-size"),
    ):
        with pytest.raises(SystemExit, match=message):
            parse(ImpalaOptions, [*cartpole, *given], {})
