"""Statistics of a job's environments: finished episodes, and the moments by which observations and
rewards are normalized, which all peers share."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import moolink
from examples.common.environments import Environments, Step, on_host
from examples.common.observations import MASK, Observation
from examples.common.options import GroupOptions

INTERVAL = 8  # turns between two sums over the group
THOUSANDTHS = 1000  # a round's counters are integers, so returns travel in thousandths


class Normalizer:
    """Mean and deviation of float observations, and the deviation of discounted returns.

    Each peer counts its own environments' data. Every few turns the group sums the new data of its
    peers. A peer whose exchange failed sends the same data again with the next one; until then
    statistics differ, which does no harm: all peers still apply the same gradients.
    """

    def __init__(self, options: GroupOptions, envs: Any) -> None:
        self._lock = threading.Lock()
        spaces = envs.observation_spaces.items() if options.normalize else ()
        kept = (MASK,)  # which is no input of the network
        self._names = [n for n, space in spaces if space.dtype != np.uint8 and n not in kept]
        self._rewards, self._discount = options.normalize_reward, options.discount
        shapes = {name: envs.observation_spaces[name].shape for name in self._names}
        shapes |= {"return": ()} if self._rewards else {}
        # count, sum, sum of squares: of the whole job, and of this peer since the last exchange
        self._total = {name: _moments(shape) for name, shape in shapes.items()}
        self._new = {name: _moments(shape) for name, shape in shapes.items()}
        self.scale: dict[str, tuple[Any, Any]] = dict.fromkeys(shapes, (0.0, 1.0))
        """The (mean, 1 / deviation) of each name, with which values are normalised."""
        self._rows: dict[str, NDArray[np.float64]] = {}  # new moments of each unit
        self._turns = 0
        self._pending: tuple[Any, dict[str, NDArray[np.float64]]] | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything is normalised."""
        return bool(self._total)

    def column(self) -> _Returns:
        """The returns under way of one vector of environments."""
        return _Returns(self, self._discount)

    def observe(self, observation: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Counts the observations [E, ...] of a step and returns them normalised."""
        with self._lock:
            for name in self._names:
                _add(self._new[name], observation[name])
        return self(observation)

    def __call__(self, observation: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The observations normalised, within -10 ... 10."""
        result = dict(observation)
        for name in self._names:
            mean, scale = self.scale[name]
            result[name] = np.clip((observation[name] - mean) * scale, -10, 10).astype(np.float32)
        return result

    def exchange(self, group: moolink.Group) -> None:
        """Shares what is new with the group, now and then; never waits. One turn of the learner."""
        if not self._total:
            return
        self._turns += 1
        if self._pending is not None:
            future, mine = self._pending
            if not future.done():
                return
            self._pending = None
            try:
                into, values = self._total, future.result()
            except moolink.Error:  # the membership has changed
                into, values = self._new, mine
            with self._lock:
                for name, moments in values.items():
                    into[name] += moments
            self._refresh()
        elif self._turns % INTERVAL == 1 and group.members():
            with self._lock:
                mine = self._new
                self._new = {name: np.zeros_like(x) for name, x in mine.items()}
            self._pending = group.all_reduce("normalizer", mine), mine

    # For repeatable runs: each unit of data has a normalizer of its own.

    def take(self) -> dict[str, NDArray[np.float64]]:
        """The moments that this normalizer has counted since the last call."""
        with self._lock:
            mine, self._new = self._new, {name: np.zeros_like(x) for name, x in self._new.items()}
        return mine

    def add(self, unit: int, units: int, moments: Mapping[str, NDArray[np.float64]]) -> None:
        """Adds the moments of a unit, one of `units`, to the next `exchange_in_order`."""
        for name, x in moments.items():
            rows = self._rows.setdefault(name, np.zeros((units, *x.shape)))
            rows[unit] += x

    def exchange_in_order(self, group: moolink.Group, name: str) -> None:
        """Adds the new moments of all members' units, in the units' order, and waits for them. If
        the exchange fails, as when the membership changes, the next one has these moments, too."""
        try:
            sums = group.all_reduce(name, self._rows).result()
        except moolink.Error:
            return
        for each, rows in sums.items():
            self._total[each] += moolink.accumulate.ordered_sum(rows)
            self._rows[each][:] = 0
        self._refresh()

    def state(self) -> dict[str, NDArray[np.float64]]:
        """For checkpoints and newcomers."""
        with self._lock:
            return {name: x.copy() for name, x in self._total.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            for name in self._total.keys() & state.keys():  # a job may begin to use one
                self._total[name] = np.array(state[name], np.float64)
        self._refresh()

    def _refresh(self) -> None:
        """Scales of what the group has summed; before that there are none."""
        scale = dict(self.scale)
        for name, (count, sums, squares) in self._total.items():
            if count.max() > 0:
                mean = sums / count
                variance = np.maximum(squares / count - mean**2, 1e-8)
                scale[name] = mean, 1 / np.sqrt(variance)
        self.scale = scale


class _Returns:
    """Discounted returns under way, whose deviation is the scale of the rewards."""

    def __init__(self, normalizer: Normalizer, discount: float) -> None:
        self._normalizer, self._discount = normalizer, discount
        self._running: Any = 0.0

    def scaled(self, reward: NDArray[np.float32], over: NDArray[np.bool_]) -> NDArray[np.float32]:
        """The rewards of a step, divided by the deviation, within -10 ... 10."""
        normalizer = self._normalizer
        if not normalizer._rewards:
            return reward
        self._running = self._running * self._discount + reward
        with normalizer._lock:
            _add(normalizer._new["return"], self._running)
        self._running = np.where(over, 0.0, self._running)
        scaled = np.clip(reward * normalizer.scale["return"][1], -10, 10)
        return scaled.astype(np.float32)


class Episodes:
    """Episodes that this peer's environments finished and that are not yet reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._return = 0

    def column(self, num_envs: int) -> _Column:
        """A part that follows `num_envs` environments."""
        return _Column(self, num_envs)

    def add(self, returns: NDArray[np.float64]) -> None:
        with self._lock:
            self._count += len(returns)
            self._return += int(np.rint(returns * THOUSANDTHS).sum())

    def give(self, counters: Mapping[str, int]) -> None:
        """Adds the counters that `take` of another has returned."""
        with self._lock:
            self._count += counters["episodes"]
            self._return += counters["return_thousandths"]

    def take(self) -> dict[str, int]:
        """The episodes finished since the last call, as counters of a contribution."""
        with self._lock:
            counters = {"episodes": self._count, "return_thousandths": self._return}
            self._count = self._return = 0
            return counters


class _Column:
    """Returns under way of one vector of environments."""

    def __init__(self, episodes: Episodes, num_envs: int) -> None:
        self._episodes = episodes
        self._running = np.zeros(num_envs)

    def add(self, reward: NDArray[np.float32], over: NDArray[np.bool_]) -> None:
        self._running += reward
        if over.any():
            self._episodes.add(self._running[over])
            self._running[over] = 0.0


class NormalizedEnvs:
    """Environments whose episodes are counted, and whose observations and rewards are normalized.

    Attributes:
        envs: the environments without normalization.
        num_envs: E.
    """

    def __init__(self, envs: Environments, normalizer: Normalizer, episodes: Episodes) -> None:
        self.envs, self.num_envs = envs, envs.num_envs
        self.normalizer, self.episodes = normalizer, episodes
        self._returns, self._rewards = episodes.column(envs.num_envs), normalizer.column()

    def reset(self, seed: int | None) -> Observation:
        """As `Environments.reset`."""
        return self.normalizer.observe(self.envs.reset(seed))

    def send(self, action: Any) -> None:
        """Starts a step with a policy's actions [E, N], in an array of any framework."""
        self.envs.send(on_host(action).astype(self.envs.actions.dtype, copy=False))

    def recv(self) -> Step:
        """Waits for the step that `send` started."""
        step = self.envs.recv()
        self._returns.add(step.reward, step.episode_over)
        last = step.last_observation
        return step._replace(
            observation=self.normalizer.observe(step.observation),
            reward=self._rewards.scaled(step.reward, step.episode_over),
            last_observation=None if last is None else self.normalizer(last),
        )


def _moments(shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.zeros((3, *shape))


def _add(moments: NDArray[np.float64], values: NDArray[Any]) -> None:
    wide = values.astype(np.float64)
    moments[0] += len(wide)
    moments[1] += wide.sum(0)
    moments[2] += np.square(wide).sum(0)
