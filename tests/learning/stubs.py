"""Spaces, environments and batches that the learners' tests share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from examples.common.acting import Unroll
from examples.common.environments import Actions, Step
from examples.common.normalizer import Episodes, Normalizer
from examples.common.observations import as_box, parts_of
from examples.common.options import ImpalaOptions, defaults


class Spaces:
    """What networks and unrolls ask of environments."""

    def __init__(self, observation: Any, action: Any, num_envs: int = 8) -> None:
        self.num_envs = num_envs
        self.observation_spaces = {name: as_box(part) for name, part in parts_of(observation)}
        self.actions = Actions(action)


def images(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def options(**given: Any) -> ImpalaOptions:
    """Those of IMPALA without a preset, for one peer; `given` wins."""
    made = defaults(ImpalaOptions, {}, env_id="moolink/Recall-v0", num_peers=1)
    for name, value in given.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    return made


def arrays(envs: Spaces, o: ImpalaOptions, seed: int = 1) -> dict[str, Any]:
    """Contents of an unroll of `envs`, by the names of its arrays; `done` is where it ended."""
    random, (T, E) = np.random.default_rng(seed), (o.unroll_length, envs.num_envs)
    observation = {
        name: (
            random.integers(0, 256, (T + 1, E, *space.shape)).astype(np.uint8)
            if space.dtype == np.uint8
            else random.normal(size=(T + 1, E, *space.shape)).astype(np.float32)
        )
        for name, space in envs.observation_spaces.items()
    }
    sizes, size = envs.actions.choices, envs.actions.size
    chosen = [random.integers(n, size=(T, E)) for n in sizes]
    action = np.stack(chosen, -1) if sizes else random.normal(size=(T, E, size))
    done = random.random((T, E)) < 0.2
    return {
        "observation": observation,
        "first": np.concatenate([np.zeros((1, E), bool), done]),
        "action": action.astype(envs.actions.dtype),
        "log_prob": np.log(random.uniform(0.1, 0.5, (T, E))).astype(np.float32),
        "reward": random.integers(-3, 4, (T, E)).astype(np.float32),
        "discount": np.where(done, 0.0, o.discount).astype(np.float32),
        "bootstrap": np.where(done, random.normal(size=(T, E)), 0.0).astype(np.float32),
        "state": random.normal(size=(2, E, o.hidden_size if o.lstm else 0)).astype(np.float32),
    }


def filled(contents: dict[str, Any]) -> Unroll:
    """An unroll with contents that `arrays` has made."""
    unroll = Unroll(*contents["reward"].shape)
    recorded = {name: x for name, x in contents.items() if name != "state"}
    for t in range(unroll.length):
        unroll.record(t, **at(recorded, t))
    unroll.record(unroll.length, **at({k: recorded[k] for k in ("observation", "first")}, -1))
    unroll.state = tuple(contents["state"])
    return unroll


def at(contents: dict[str, Any], t: int) -> dict[str, Any]:
    return {name: at(x, t) if isinstance(x, dict) else x[t] for name, x in contents.items()}


class Counting(Spaces):
    """Environment e shows its own number and how often it was stepped. Its return ends with every
    seventh step, and every fifth step is the last before a limit."""

    def __init__(self, num_envs: int, fail_at: int | None = None) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3), num_envs)
        self.count = 0
        self.fail_at = fail_at
        self.closed = self.steps = False

    def observe(self) -> dict[str, Any]:
        count = np.full(self.num_envs, self.count)
        return {"obs": np.stack([np.arange(self.num_envs), count], -1).astype(np.float32)}

    def reset(self, seed: int | None) -> dict[str, Any]:
        assert not self.steps, "ALE crashes if a step is under way"
        self.count = 0
        return self.observe()

    def send(self, actions: Any) -> None:
        self.actions_sent, self.steps = actions[:, 0], True

    def recv(self) -> Step:
        self.count, self.steps = self.count + 1, False
        if self.count == self.fail_at:
            raise OSError("the emulator is gone")
        over = np.full(self.num_envs, self.count % 7 == 0)
        cut_off = np.full(self.num_envs, self.count % 5 == 0) & ~over
        reward = np.float32(self.actions_sent * 10.0 + self.count)
        last = self.observe() if cut_off.any() else None
        return Step(self.observe(), reward, over, cut_off, over | cut_off, last)

    def close(self) -> None:
        self.closed = True


def run_of(o: ImpalaOptions, envs: Any) -> Any:
    """What an actor asks of a run."""
    return SimpleNamespace(episodes=Episodes(), normalizer=Normalizer(o, envs))


class Countdown(gymnasium.Env[dict[str, Any], Any]):
    """Observations of several kinds; an action that begins with 1 ends the episode, and the fifth
    step cuts it off."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": images(36, 40, 3),
                "body": spaces.Dict({"left": spaces.Discrete(5), "right": spaces.Box(-1, 1, (2,))}),
            }
        )
        self.action_space = spaces.MultiDiscrete([2, 3])

    def observe(self) -> dict[str, Any]:
        left = max(0, 4 - self.steps)
        image = np.full((36, 40, 3), self.steps, np.uint8)
        right = np.full(2, self.steps / 10)
        return {"image": image, "body": {"left": left, "right": right}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        ended = bool(action[0] == 1)
        return self.observe(), float(action[1]), ended, not ended and self.steps == 5, {}


class Steps(gymnasium.Env[Any, Any]):
    """The observation is the number of steps in the episode so far. Action 1 ends the episode, and
    the fifth step truncates it. The reward is 1 + action."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 5, (1,), np.float64)
        self.action_space = spaces.Discrete(2)

    def observe(self) -> Any:
        return np.array([self.steps], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        ended = action == 1
        return self.observe(), 1.0 + action, ended, not ended and self.steps == 5, {}
