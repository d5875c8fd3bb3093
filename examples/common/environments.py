"""Environments in vectors: Atari through ALE's own C++ vector environment, and Catch.

A vector of environments is stepped by `send(actions)` and `recv()`, so that its owner can do other
work in between; one that ends is reset in the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from examples.common.config import FRAME_SIZE, Config, ConfigError

STACK = 4  # frames in an observation
FRAMES_PER_STEP = 4  # frames for which an Atari action is repeated


@dataclass(frozen=True)
class Step:
    """What the environments answered to one action each; E is their number."""

    observation: NDArray[np.uint8]
    """[E, channels, height, width]. After the end of a game it is the first of the next one."""
    reward: NDArray[np.float32]
    """[E], as the game gives it, not clipped."""
    done: NDArray[np.bool_]
    """[E]: the return ends here. In Atari also when a life is lost, though the game goes on."""
    game_over: NDArray[np.bool_]
    """[E]: the game ended, by its rules or by the limit of frames."""


class VectorEnv(Protocol):
    """E environments of one kind."""

    num_envs: int
    num_actions: int
    observation_shape: tuple[int, int, int]  # (channels, height, width)

    def reset(self, seed: int | None) -> NDArray[np.uint8]:
        """Starts all, environment i from seed + i, or from chance if `seed` is None.

        Returns observations [E, C, H, W].
        """

    def send(self, actions: NDArray[np.int64]) -> None:
        """Starts a step with actions [E]."""

    def recv(self) -> Step:
        """Waits, without the GIL, for the step that `send` started."""

    def close(self) -> None:
        """Ends the environments."""


def make_ale_env(
    game: str, num_envs: int, frame_size: int, max_frames: int, num_threads: int
) -> Any:
    """ALE's C++ vector environment: grey frames, 4 stacked, each action for 4 frames.

    A lost life is told as the end of an episode, but the game goes on: `life_loss_info` does that.
    (`episodic_life` would restart the whole game.) Raises ConfigError for an unknown game.
    """
    # Imported here because Catch and --help need no emulator.
    from ale_py import roms
    from ale_py.vector_env import AtariVectorEnv

    if game not in roms.get_all_rom_ids():
        raise ConfigError(
            f"no environment {game!r}: `catch`, or an Atari game in snake case, one of "
            + ", ".join(sorted(roms.get_all_rom_ids()))
        )
    return AtariVectorEnv(
        game,
        num_envs,
        num_threads=num_threads,
        img_height=frame_size,
        img_width=frame_size,
        stack_num=STACK,
        frameskip=FRAMES_PER_STEP,
        max_num_frames_per_episode=max_frames,
        autoreset_mode="SameStep",
        life_loss_info=True,
        reward_clipping=False,
    )


class Atari:
    """ALE's vector environment, whose threads step the games."""

    def __init__(
        self, game: str, num_envs: int, frame_size: int, *, max_frames: int, num_threads: int
    ) -> None:
        self._env = make_ale_env(game, num_envs, frame_size, max_frames, num_threads)
        self.num_envs = num_envs
        self.num_actions = int(self._env.single_action_space.n)
        self.observation_shape = (STACK, frame_size, frame_size)
        self._game_frames = np.zeros(num_envs, np.int32)

    def reset(self, seed: int | None) -> NDArray[np.uint8]:
        observation, info = self._env.reset(seed=seed)
        self._game_frames = info["episode_frame_number"]
        return observation

    def send(self, actions: NDArray[np.int64]) -> None:
        self._env.send(actions)

    def recv(self) -> Step:
        observation, reward, terminated, truncated, info = self._env.recv()
        # A game's frames are counted from its start: a smaller number is another game.
        game_over = info["episode_frame_number"] < self._game_frames
        self._game_frames = info["episode_frame_number"]
        return Step(observation, reward.astype(np.float32), terminated | truncated, game_over)

    def close(self) -> None:
        self._env.close()


class Catch:
    """A ball falls through a grid of 10 x 5; a paddle in the last row must be under it.

    Actions: left, stay, right. The reward, +1 or -1, comes with the ball's last move.
    """

    ROWS, COLUMNS = 10, 5

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.num_actions = 3
        self.observation_shape = (1, self.ROWS, self.COLUMNS)
        self._index = np.arange(num_envs)
        self._row = np.zeros(num_envs, np.int64)
        self._ball = np.zeros(num_envs, np.int64)
        self._paddle = np.zeros(num_envs, np.int64)
        self._random = np.random.default_rng()
        self._actions = np.ones(num_envs, np.int64)

    def reset(self, seed: int | None) -> NDArray[np.uint8]:
        self._random = np.random.default_rng(seed)
        self._restart(np.ones(self.num_envs, np.bool_))
        return self._render()

    def send(self, actions: NDArray[np.int64]) -> None:
        self._actions = actions

    def recv(self) -> Step:
        self._row += 1
        self._paddle = np.clip(self._paddle + self._actions - 1, 0, self.COLUMNS - 1)
        done = self._row == self.ROWS - 1
        reward = np.where(done, np.where(self._paddle == self._ball, 1.0, -1.0), 0.0)
        self._restart(done)
        return Step(self._render(), reward.astype(np.float32), done, done)

    def close(self) -> None:
        """Nothing to end: the grids are arrays of this process."""

    def _restart(self, which: NDArray[np.bool_]) -> None:
        count = int(which.sum())
        self._row[which] = 0
        self._ball[which] = self._random.integers(self.COLUMNS, size=count)
        self._paddle[which] = self.COLUMNS // 2

    def _render(self) -> NDArray[np.uint8]:
        grid = np.zeros((self.num_envs, *self.observation_shape), np.uint8)
        grid[self._index, 0, self._row, self._ball] = 255
        grid[self._index, 0, self.ROWS - 1, self._paddle] = 255
        return grid


def make_env(config: Config, num_envs: int, num_threads: int | None = None) -> VectorEnv:
    """`num_envs` environments of the configured kind.

    Raises ConfigError, naming the environments there are, for an unknown one.
    """
    if config.job.env == "catch":
        return Catch(num_envs)
    if config.actor.env_pool:
        from examples.common.pooled import PooledAtari

        return PooledAtari(config, num_envs, num_processes=num_threads or config.env_threads)
    return Atari(
        config.job.env,
        num_envs,
        FRAME_SIZE[config.learner.net],
        max_frames=config.actor.max_frames_per_episode,
        num_threads=num_threads or config.env_threads,
    )


def estimate_pixel_mean(env: VectorEnv, seed: int, steps: int = 100) -> NDArray[np.float32]:
    """Mean [height, width] of the frames seen in random play, with which inputs are standardised.

    Without it the ball of a game in small frames is one pixel that differs little from its ground,
    and nothing is learned. All peers use the leader's: it is part of the state it hands over.
    """
    random = np.random.default_rng(seed)
    total = env.reset(None)[:, -1].sum(0, dtype=np.float64)
    for _ in range(steps):
        env.send(random.integers(env.num_actions, size=env.num_envs))
        total += env.recv().observation[:, -1].sum(0, dtype=np.float64)
    return (total / (env.num_envs * (steps + 1))).astype(np.float32)
