"""Returns of whole games, counted by each peer and summed exactly over the group with its rounds.

A round's counters are integers, so returns travel in thousandths.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

THOUSANDTHS = 1000


class EpisodeReturns:
    """Games finished by this peer's actor and not yet reported to the group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._episodes = 0
        self._total = 0

    def column(self, num_envs: int) -> _Column:
        """A part that follows `num_envs` environments."""
        return _Column(self, num_envs)

    def finish(self, returns: NDArray[np.float64]) -> None:
        with self._lock:
            self._episodes += len(returns)
            self._total += int(np.rint(returns * THOUSANDTHS).sum())

    def take(self) -> dict[str, int]:
        """What was finished since the last call, as counters for `reduce_gradients`."""
        with self._lock:
            counters = {"episodes": self._episodes, "return_thousandths": self._total}
            self._episodes = self._total = 0
            return counters


class _Column:
    """Running returns of one vector of environments."""

    def __init__(self, returns: EpisodeReturns, num_envs: int) -> None:
        self._finished = returns
        self._running = np.zeros(num_envs)

    def add(self, reward: NDArray[np.float32], game_over: NDArray[np.bool_]) -> None:
        self._running += reward
        if game_over.any():
            self._finished.finish(self._running[game_over])
            self._running[game_over] = 0.0


class ReturnWindow:
    """Mean return of the group's last games: of the fewest rounds that hold `size` of them.

    Fed from the rounds' counters, it is the same on every peer.
    """

    def __init__(self, size: int = 100) -> None:
        self._size = size
        self._rounds: deque[tuple[int, int]] = deque()
        self.episodes = 0
        self._total = 0

    def add(self, counters: Mapping[str, int]) -> None:
        """Takes the games of one delivered round."""
        if counters.get("episodes", 0) == 0:
            return
        self._rounds.append((counters["episodes"], counters["return_thousandths"]))
        self.episodes += self._rounds[-1][0]
        self._total += self._rounds[-1][1]
        while self.episodes - self._rounds[0][0] >= self._size:
            episodes, total = self._rounds.popleft()
            self.episodes -= episodes
            self._total -= total

    @property
    def mean(self) -> float | None:
        """None before the first game has ended."""
        return self._total / THOUSANDTHS / self.episodes if self.episodes else None

    def state(self) -> list[list[int]]:
        """For checkpoints and newcomers."""
        return [list(entry) for entry in self._rounds]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        self._rounds.clear()
        self.episodes = self._total = 0
        for episodes, total in state:
            self.add({"episodes": int(episodes), "return_thousandths": int(total)})
