"""Playing whole games with a fixed policy, to say how good it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from examples.common.config import Config
from examples.common.environments import make_env

MAX_ENVS = 32


def play(
    config: Config, policy: Callable[[NDArray[np.uint8]], NDArray[np.int64]]
) -> NDArray[np.float64]:
    """Returns of `config.job.episodes` games played with `policy` (observations -> actions).

    Each environment plays its share of the games to their ends. (The first games to end would be
    a sample of the short ones.)
    """
    num_envs = min(MAX_ENVS, config.job.episodes)
    games_left = np.full(num_envs, config.job.episodes // num_envs)
    games_left[: config.job.episodes % num_envs] += 1
    running, finished = np.zeros(num_envs), []
    env = make_env(config, num_envs)
    observation = env.reset(config.job.seed)
    while games_left.any():
        env.send(policy(observation))
        step = env.recv()
        observation = step.observation
        running += step.reward
        for index in np.flatnonzero(step.game_over):
            if games_left[index]:
                finished.append(running[index])
                games_left[index] -= 1
            running[index] = 0.0
    env.close()
    return np.array(finished)
