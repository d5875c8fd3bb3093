"""Playing whole episodes from a checkpoint, to say how good it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from examples.common import checkpoint
from examples.common.environments import agents_of, make_envs
from examples.common.normalizer import Normalizer
from examples.common.observations import Observation
from examples.common.options import GroupOptions, OptionError, Options

MAX_ENVS = 32


class Evaluation:
    """Environments that play their share of the episodes to their ends. (The first episodes to end
    would be a sample of the short ones.)

    Attributes:
        saved: the checkpoint.
        observation: of all environments, normalised as in training.
        first: [E], whether it is the first of an episode.
        returns: of the episodes that are over.
    """

    def __init__(self, options: Options) -> None:
        saved = checkpoint.load(options.run_dir)
        if saved is None:
            raise OptionError(f"no checkpoint in {options.run_dir}: give the --save-dir of a job")
        checkpoint.check_can_go_on(options, saved)
        self.saved, self.options = saved, options
        agents = agents_of(options.env_id)  # of each environment, whose rows come together
        rows = math.ceil(min(MAX_ENVS, options.episodes) / agents) * agents
        self.envs = make_envs(options, rows)
        self._normalizer: Callable[[Observation], Observation] = dict
        if isinstance(options, GroupOptions):
            self._normalizer = normalizer = Normalizer(options, self.envs)
            normalizer.load(saved["state"]["normalizer"])
        self._left = np.full(rows, options.episodes // rows)
        self._left[: options.episodes % rows] += 1
        self._running = np.zeros(rows)
        self.returns: list[float] = []
        self.observation = self._normalizer(self.envs.reset(options.seed))
        self.first = np.ones(rows, np.bool_)

    def is_over(self) -> bool:
        return not self._left.any()

    def step(self, action: NDArray[np.generic]) -> None:
        """Takes a policy's actions [E, N]."""
        self.envs.send(action)
        step = self.envs.recv()
        self.observation, self.first = self._normalizer(step.observation), step.episode_over
        self._running += step.reward
        for row in np.flatnonzero(step.episode_over):
            if self._left[row]:
                self.returns.append(float(self._running[row]))
                self._left[row] -= 1
            self._running[row] = 0.0


@contextlib.contextmanager
def evaluated(options: Options) -> Iterator[Evaluation]:
    """An evaluation that prints its result at the end. Raises OptionError without a checkpoint."""
    evaluation = Evaluation(options)
    try:
        yield evaluation
    finally:
        evaluation.envs.close()
    returns = np.array(evaluation.returns)
    print(
        f"{options.env_id} after {evaluation.saved['totals']['steps']:,} steps: mean return "
        f"{returns.mean():.2f} of {len(returns)} episodes (deviation {returns.std():.2f}, least "
        f"{returns.min():g}, greatest {returns.max():g})"
    )
