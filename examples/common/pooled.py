"""Atari games one by one in the worker processes of a `moolink.EnvPool`.

ALE's own vector environment is faster for Atari. This is how environments are stepped that exist
in Python only, one game an object.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import moolink
from examples.common.config import FRAME_SIZE, Config
from examples.common.environments import STACK, Step, make_ale_env


class AtariGame(gymnasium.Env[dict[str, Any], int]):
    """One game with Gymnasium's API. Its observation also says whether a life was just lost."""

    def __init__(self, game: str, frame_size: int, max_frames: int) -> None:
        self._env = make_ale_env(game, 1, frame_size, max_frames, num_threads=1)
        self.action_space = spaces.Discrete(int(self._env.single_action_space.n))
        self.observation_space = spaces.Dict(
            frames=spaces.Box(0, 255, (STACK, frame_size, frame_size), np.uint8),
            life_lost=spaces.Discrete(2),
        )
        self._next_game: dict[str, Any] | None = None
        self._game_frames = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, self._next_game = self._next_game, None
        if observation is None or seed is not None:
            # ALE takes 31 bits; a pool derives longer seeds.
            frames, info = self._env.reset(seed=None if seed is None else seed % 2**31)
            self._game_frames = int(info["episode_frame_number"][0])
            observation = {"frames": frames[0], "life_lost": 0}
        return observation, {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        frames, reward, terminated, truncated, info = self._env.step(np.array([action]))
        game_over = int(info["episode_frame_number"][0]) < self._game_frames
        self._game_frames = int(info["episode_frame_number"][0])
        if game_over:  # ALE shows the next game already: `reset` will hand it out
            self._next_game = {"frames": frames[0], "life_lost": 0}
        observation = {"frames": frames[0], "life_lost": int(terminated[0] and not game_over)}
        cut_off = bool(truncated[0])
        return observation, float(reward[0]), game_over and not cut_off, cut_off, {}

    def close(self) -> None:
        self._env.close()


class PooledAtari:
    """A vector of games with the interface of `examples.common.environments.VectorEnv`."""

    def __init__(self, config: Config, num_envs: int, num_processes: int) -> None:
        size = FRAME_SIZE[config.learner.net]
        self._make_game = partial(
            AtariGame, config.job.env, size, config.actor.max_frames_per_episode
        )
        self._num_processes = num_processes
        self._pool: moolink.EnvPool | None = None
        self._pending: moolink.EnvStepperFuture | None = None
        game = self._make_game()
        self.num_actions = int(game.action_space.n)
        game.close()
        self.num_envs = num_envs
        self.observation_shape = (STACK, size, size)

    def reset(self, seed: int | None) -> NDArray[np.uint8]:
        """Starts new worker processes."""
        self.close()
        self._pool = moolink.EnvPool(
            self._make_game, self._num_processes, self.num_envs, seed=seed, arrays="numpy"
        )
        self.send(np.zeros(self.num_envs, np.int64))  # a pool's first step is the reset
        return self.recv().observation

    def send(self, actions: NDArray[np.int64]) -> None:
        assert self._pool is not None, "reset comes first"
        self._pending = self._pool.step(0, actions)

    def recv(self) -> Step:
        assert self._pending is not None, "send comes first"
        outputs, self._pending = self._pending.result(), None
        done = outputs["done"].astype(np.bool_)
        life_lost = outputs["life_lost"].astype(np.bool_)
        return Step(outputs["frames"], outputs["reward"], done | life_lost, done)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
