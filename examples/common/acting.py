"""Acting of the IMPALA learners of both frameworks: unrolls, and the thread that fills them."""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from examples.common.environments import Environments, make_envs, on_host
from examples.common.normalizer import Episodes, NormalizedEnvs, Normalizer
from examples.common.options import ImpalaOptions
from examples.common.run import Run


class Batch(NamedTuple):
    """B environments of an unroll: the data of one contribution."""

    data: dict[str, Any]
    """The recorded quantities, by name, as views of the unroll's arrays: [T, B, ...], or
    [T + 1, B, ...] if also recorded at T. And `state`, the memory before entry 0: a tuple of
    [B, ...]."""
    new_steps: int
    """Steps of environments that no batch had before: T * B, or 0 if the unroll is given again."""
    unroll: Unroll


class Unroll:
    """T steps of E environments, in arrays that are filled again and again.

    Attributes:
        state: the memory of the policy before entry 0, a tuple of [E, ...] as the framework has it.
    """

    def __init__(self, length: int, num_envs: int) -> None:
        self.length, self.num_envs = length, num_envs
        self.state: tuple[Any, ...] = ()
        self._arrays: dict[str, Any] = {}
        self._ends: set[str] = set()  # names of quantities recorded at T
        self._is_new = False
        # Batches. The acting thread counts those given, the learner those released.
        self._given = self._released = 0

    def record(self, t: int, **values: Any) -> None:
        """Records entry t, 0 <= t <= T, of each quantity: an array [E, ...] of any framework, a
        dict of such arrays, or a number for all environments.

        The first value makes the quantity's array, with the value's shape and dtype; floats become
        float32. Record a quantity at each t: an entry left out keeps an earlier unroll's value.

        Raises:
            ValueError: the first axis is not E.
            TypeError: the first value was of a dtype that cannot hold this one.
        """
        self._is_new = True
        if t == self.length:
            self._ends.update(values)
        for name, value in values.items():
            self._write(self._arrays, name, t, value)

    def _write(self, arrays: dict[str, Any], name: str, t: int, value: Any) -> None:
        if isinstance(value, dict):
            for part, x in value.items():
                self._write(arrays.setdefault(name, {}), part, t, x)
            return
        array = on_host(value)
        if array.ndim and len(array) != self.num_envs:
            raise ValueError(f"{name}: [{self.num_envs}, ...] is recorded, not {[*array.shape]}")
        if name not in arrays:
            dtype = np.float32 if array.dtype.kind == "f" else array.dtype
            arrays[name] = np.empty((self.length + 1, self.num_envs, *array.shape[1:]), dtype)
        np.copyto(arrays[name][t], array, casting="same_kind")  # no fractions into integers

    def data(self, envs: slice) -> dict[str, Any]:
        """`data` of a batch of these environments."""

        def part(x: Any, length: int) -> Any:
            if isinstance(x, dict):
                return {name: part(each, length) for name, each in x.items()}
            return x[:length, envs]

        arrays = self._arrays.items()
        data = {name: part(x, self.length + (name in self._ends)) for name, x in arrays}
        return {**data, "state": tuple(x[envs] for x in self.state)}

    def batches(self, size: int) -> list[Batch]:
        """The unroll in batches of `size` environments. It is unread until all are released."""
        starts = range(0, self.num_envs, size)
        new_steps, self._is_new = self.length * size * self._is_new, False
        self._given += len(starts)
        return [Batch(self.data(slice(i, i + size)), new_steps, self) for i in starts]

    def release(self) -> None:
        """Marks a batch as read."""
        self._released += 1

    @property
    def is_unread(self) -> bool:
        return self._given > self._released


class Group(NormalizedEnvs):
    """Environments that step together, and the unrolls that they fill in turn.

    With `--deterministic` it is a unit of data, and the lag of its parameters is fixed. While the
    learner learns from an unroll, the unit plays the next one: the steps of its n-th part act with
    the parameters from which the learner computes the n-th contribution of the other.
    """

    def __init__(
        self,
        o: ImpalaOptions,
        number: int,
        envs: Environments,
        normalizer: Normalizer,
        episodes: Episodes,
        base: int,
    ) -> None:
        """`base`: the version of the parameters when this peer began to play the unit."""
        super().__init__(envs, normalizer, episodes)
        self.number, self.base, self.steps = number, base, 0
        self.given = self.learned = 0  # contributions; the latter when the unroll began
        self._o = o
        # A unit has two: one is played while the learner reads the other.
        count = 2 if o.deterministic else 1
        self.unrolls = [Unroll(o.unroll_length, envs.num_envs) for _ in range(count)]
        self.next_unroll = self.unrolls[0]
        self.play: Iterator[Unroll | None]
        self.full: queue.SimpleQueue[Any]  # of its batches

    def wants(self) -> int:
        """The version of the parameters with which the unit's next step acts."""
        if self.steps < self._o.unroll_length:
            return self.base
        t = self.steps % self._o.unroll_length
        return self.base + self.learned + t * self._o.parts // self._o.unroll_length


class ActingThread(threading.Thread, abc.ABC):
    """Acts in groups of environments in turn: while those of one group step, the network infers for
    another. With `--deterministic` the groups are this peer's units."""

    def __init__(self, o: ImpalaOptions, envs: Environments, run: Run) -> None:
        """`envs` is the first group's; the thread makes the others."""
        super().__init__(name="actor", daemon=True)
        self.o, self.run_ = o, run
        self.full: dict[int | None, queue.SimpleQueue[Any]] = {None: queue.SimpleQueue()}
        self.released, self.stopped = threading.Event(), False
        self.error: BaseException | None = None
        self.version = -1  # of the newest parameters
        self._spare = [envs]  # that no group has yet
        self._groups: dict[int, Group] = {}  # that the thread plays, by number
        self._owned: dict[int, int] = {}  # this peer's units: their bases
        self._published: dict[int, Any] = {}  # arguments of `use`, and scales, by version
        self._used = -1

    # Defined by each framework's actor.

    @abc.abstractmethod
    def play(self, group: Group) -> Iterator[Unroll | None]:
        """Plays forever. Yields None while the environments step, when it is another group's turn,
        and each unroll that is full. It is resumed once the learner has read the unroll that it
        fills next: so memory and the lag of the policy are bounded."""

    @abc.abstractmethod
    def use(self, parameters: Any) -> None:
        """Acts with these parameters, in a form of the framework's, from the next step on."""

    def copied(self, parameters: Any) -> Any:
        """The parameters in memory that the learner does not write."""
        return parameters

    # Called by the learner.

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

    def next_batch(self, timeout: float, unit: int | None = None) -> Batch | None:
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

    def release(self, batch: Batch) -> None:
        """Marks it as read: its arrays may be filled again."""
        batch.unroll.release()
        self.released.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True
        if self.is_alive():
            self.join()
        for envs in [*self._spare, *(group.envs for group in self._groups.values())]:
            envs.close()

    # The thread.

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

    def begin(self, number: int, base: int = 0) -> Group:
        """Begins to play a group."""
        envs = self._spare.pop() if self._spare else make_envs(self.o, self.o.envs_per_group)
        normalizer, episodes = self.run_.normalizer, self.run_.episodes
        if self.o.deterministic:  # statistics go with their data, not by time
            normalizer, episodes = Normalizer(self.o, envs), Episodes()
        group = Group(self.o, number, envs, normalizer, episodes, base)
        group.full = self.full[number if self.o.deterministic else None]
        self._groups[number], group.play = group, self.play(group)
        return group

    def go_on(self, group: Group) -> bool:
        """Plays a group until its environments step. Returns False if they do not, because the
        learner still reads the unroll that the group fills next."""
        while not group.next_unroll.is_unread:
            unroll = next(group.play)
            if unroll is None:
                return True
            self._give(group, unroll)
        return False

    def _give(self, group: Group, unroll: Unroll) -> None:
        """Gives the learner the batches of an unroll."""
        unit = group.number if self.o.deterministic else None
        counted = None if unit is None else (group.normalizer.take(), group.episodes.take())
        batches = unroll.batches(self.o.batch_size)
        group.given += len(batches)
        for batch in batches:
            group.full.put((batch, counted))
            counted = None
        following = group.unrolls.index(unroll) + 1
        group.next_unroll = group.unrolls[following % len(group.unrolls)]

    def _play_groups(self) -> None:
        """Plays the groups in turn: while the environments of one step in threads of their own, the
        network infers for another, so that neither waits for the other."""
        self.begin(0)
        while not self.stopped:
            self.released.clear()
            stepping = [self.go_on(group) for group in self._groups.values()]
            if len(self._groups) < self.o.num_groups and self.full[None].qsize():
                # Making environments takes a moment, in which there is something to learn.
                self.begin(len(self._groups))
            elif not any(stepping):
                self.released.wait(0.1)

    def _play_units(self) -> None:
        """Plays this peer's units in turn, each step with the parameters that the unit wants."""
        while not self.stopped:
            self.released.clear()
            self._follow(dict(self._owned))
            stepping = [self._step(unit) for unit in self._groups.values()]
            if not any(stepping):
                self.released.wait(0.1)
            # The newest stays, and those with which units that have moved here will begin.
            wanted = [unit.wants() for unit in self._groups.values()]
            least = min([self.version, *wanted, *self._begins()])
            for version in [v for v in self._published.copy() if v < least]:
                del self._published[version]

    def _begins(self) -> list[int]:
        """The bases of units that are this peer's by now and are not played yet."""
        playing = {(number, unit.base) for number, unit in self._groups.items()}
        return [base for number, base in self._owned.items() if (number, base) not in playing]

    def _follow(self, owned: dict[int, int]) -> None:
        """Begins to play the units that are new here, and ends those that have moved away."""
        for number, unit in list(self._groups.items()):
            # One that has come back has another queue, perhaps at the same version.
            if owned.get(number) != unit.base or unit.full is not self.full[number]:
                self._groups.pop(number).envs.close()  # a step is under way: no reset is possible
        for number in owned.keys() - self._groups.keys():
            self.begin(number, owned[number])

    def _step(self, unit: Group) -> bool:
        """Plays one step, if the parameters for it are there."""
        version = unit.wants()
        if version not in self._published:
            return False
        parameters, unit.normalizer.scale = self._published[version]
        if version != self._used:
            self.use(parameters)
            self._used = version
        plays = self.go_on(unit)
        unit.steps += plays
        if plays and unit.steps % self.o.unroll_length == 0:  # an unroll may be given again
            unit.learned = unit.given
        return plays
