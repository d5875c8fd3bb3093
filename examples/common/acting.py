"""Acting of the IMPALA learners of both frameworks: unrolls, and the thread that fills them."""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from examples.common.environments import Environments, make_envs
from examples.common.normalizer import Normalizer
from examples.common.options import ImpalaOptions
from examples.common.run import Episodes, Run

B = TypeVar("B")
U = TypeVar("U", bound="Unroll")


class Unroll(abc.ABC):
    """T steps of E environments, in arrays that are filled again and again.

    Attributes:
        state: the memory of the policy before the first observation, as the framework has it.
        unread: batches that the learner has not released.
    """

    def __init__(self, envs: Environments, o: ImpalaOptions, action_dtype: npt.DTypeLike) -> None:
        T, E = o.unroll_length, envs.num_envs
        self.observation = {
            key: np.empty((T + 1, E, *space.shape), space.dtype)
            for key, space in envs.observation_spaces.items()
        }
        self.first = np.empty((T + 1, E), np.bool_)
        self.action = np.empty((T, E, envs.actions.size), action_dtype)
        self.log_prob, self.reward, self.discount, self.bootstrap = (
            np.empty((T, E), np.float32) for _ in range(4)
        )
        self.state: Any
        self.unread = 0

    @abc.abstractmethod
    def batches(self, size: int) -> list[Any]:
        """The unroll in batches of some of its environments, as the learner takes them."""

    def parts(self, size: int) -> list[slice]:
        """The environments of each batch; the learner has to release as many batches."""
        starts = range(0, self.first.shape[1], size)
        self.unread = len(starts)
        return [slice(start, start + size) for start in starts]


class Unit:
    """A unit of data of a repeatable run: a group of environments.

    The lag of its parameters is fixed. While the learner learns from an unroll, the unit plays the
    next one: the steps of its n-th part act with the parameters from which the learner computes the
    n-th contribution of the other.
    """

    def __init__(
        self, o: ImpalaOptions, base: int, envs: Environments, normalizer: Normalizer
    ) -> None:
        """`base`: the version of the parameters when this peer began to play."""
        self.base, self.envs, self.normalizer = base, envs, normalizer
        self.episodes = Episodes()
        self._o, self.steps = o, 0
        self.play: Iterator[bool]

    def wants(self) -> int:
        """The version of the parameters with which the next step acts."""
        unroll, t = divmod(self.steps, self._o.unroll_length)
        behind = (unroll - 1) * self._o.parts + t * self._o.parts // self._o.unroll_length
        return self.base + max(0, behind)


class ActingThread(threading.Thread, abc.ABC, Generic[B]):
    """Acts in groups of environments in turn: while those of one group step, the network infers for
    another. With `--deterministic` the groups are this peer's units."""

    def __init__(self, o: ImpalaOptions, envs: Environments, run: Run) -> None:
        """`envs` is the first group of environments; the thread makes the others."""
        super().__init__(name="actor", daemon=True)
        self.o, self.envs, self.run_ = o, [envs], run
        self.full: dict[int | None, queue.SimpleQueue[Any]] = {None: queue.SimpleQueue()}
        self.released, self.stopped = threading.Event(), False
        self.error: BaseException | None = None
        self.version = -1  # of the newest parameters
        self._owned: dict[int, int] = {}  # this peer's units: their bases
        self._units: dict[int, Unit] = {}  # those that the thread plays
        self._published: dict[int, Any] = {}  # arguments of `use`, and scales, by version
        self._used = -1

    @abc.abstractmethod
    def play(self, envs: Environments, group: int) -> Iterator[bool]:
        """Plays for ever, and calls `finish` with each unroll. Yields True while the environments
        step, and False while the learner still reads the group's unroll: so memory and the lag of
        the policy are bounded."""

    @abc.abstractmethod
    def use(self, parameters: Any) -> None:
        """Acts with these parameters, in a form of the framework's, from the next step on."""

    def copied(self, parameters: Any) -> Any:
        """The parameters in memory that the learner does not write."""
        return parameters

    def take_parameters(self, parameters: Any, version: int, own_units: Sequence[int] = ()) -> None:
        """Acts with the learner's parameters of a version from the next step on; with
        `--deterministic` at fixed steps, in this peer's units."""
        is_new, self.version = version != self.version, version
        if not self.o.deterministic:
            if is_new:
                self.use(parameters)
            return
        if is_new:
            self._published[version] = self.copied(parameters), self.run_.normalizer.scale
        if self._owned.keys() != set(own_units):  # also between two versions: a peer has died
            for unit in set(own_units) - self._owned.keys():
                self.full[unit] = queue.SimpleQueue()
            self._owned = {unit: self._owned.get(unit, version) for unit in own_units}
        self.released.set()

    def statistics(self, group: int) -> tuple[Normalizer, Episodes]:
        """The normalizer and the episodes of a group of environments."""
        of = self._units[group] if self.o.deterministic else self.run_
        return of.normalizer, of.episodes

    def unrolls(self, kind: type[U], envs: Environments) -> list[U]:
        """The unrolls that a group fills in turn. With `--deterministic` there are two: one is
        played while the learner reads the other."""
        return [kind(envs, self.o) for _ in range(2 if self.o.deterministic else 1)]

    def finish(self, group: int, unroll: Unroll) -> None:
        """Gives the learner the batches of an unroll."""
        unit = group if self.o.deterministic else None
        counted = None
        if unit is not None:  # statistics go with their data, not by time
            normalizer, episodes = self.statistics(unit)
            counted = normalizer.take(), episodes.take()
        for batch in unroll.batches(self.o.batch_size):
            self.full[unit].put((batch, counted))
            counted = None

    def run(self) -> None:
        try:
            if self.o.deterministic:
                self._play_units()
            else:
                self._play_groups()
        except BaseException as error:  # noqa: BLE001 - raised again by next_batch
            self.error = error
            for batches in self.full.values():
                batches.put((None, None))

    def _play_groups(self) -> None:
        groups = [self.play(self.envs[0], 0)]
        while not self.stopped:
            self.released.clear()
            stepping = [next(group) for group in groups]
            if len(groups) < self.o.num_groups and self.full[None].qsize():
                # Making environments takes a moment, in which there is something to learn.
                self.envs.append(make_envs(self.o, self.o.envs_per_group))
                groups.append(self.play(self.envs[-1], len(groups)))
            elif not any(stepping):
                self.released.wait(0.1)

    def _play_units(self) -> None:
        while not self.stopped:
            self.released.clear()
            self._follow(dict(self._owned))
            stepping = [self._step(unit) for unit in self._units.values()]
            if not any(stepping):
                self.released.wait(0.1)
            # The newest stays, and those with which units that have moved here will begin.
            wanted = [unit.wants() for unit in self._units.values()]
            least = min([self.version, *wanted, *self._begins()])
            for version in [v for v in self._published.copy() if v < least]:
                del self._published[version]

    def _begins(self) -> list[int]:
        """The bases of units that are this peer's by now and are not played yet."""
        playing = {(number, unit.base) for number, unit in self._units.items()}
        return [base for number, base in self._owned.items() if (number, base) not in playing]

    def _follow(self, owned: dict[int, int]) -> None:
        """Begins to play the units that are new here, and ends those that have moved away."""
        for number, unit in list(self._units.items()):
            if owned.get(number) != unit.base:
                self._units.pop(number).envs.close()  # a step is under way: no reset is possible
        for number in owned.keys() - self._units.keys():
            envs = self.envs.pop() if self.envs else make_envs(self.o, self.o.envs_per_group)
            unit = Unit(self.o, owned[number], envs, Normalizer(self.o, envs))
            self._units[number] = unit
            unit.play = self.play(envs, number)

    def _step(self, unit: Unit) -> bool:
        """Plays one step, if the parameters for it are there."""
        version = unit.wants()
        if version not in self._published:
            return False
        parameters, unit.normalizer.scale = self._published[version]
        if version != self._used:
            self.use(parameters)
            self._used = version
        plays = next(unit.play)
        unit.steps += plays
        return plays

    def next_batch(self, timeout: float, unit: int | None = None) -> B | None:
        """The oldest one, of a unit with `--deterministic`; None if there is none in time. Raises
        the thread's exception."""
        try:
            batch, counted = self.full[unit].get(timeout=timeout)
        except queue.Empty:
            batch = counted = None
        if batch is None and self.error is not None:
            raise self.error
        if counted is not None and unit is not None:
            self.run_.normalizer.add(unit, self.o.units, counted[0])
            self.run_.episodes.give(counted[1])
        return batch

    def release(self, unroll: Unroll) -> None:
        """Says that a batch of it is read."""
        unroll.unread -= 1
        self.released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        if self.is_alive():
            self.join()
        for envs in [*self.envs, *(unit.envs for unit in self._units.values())]:
            envs.close()
