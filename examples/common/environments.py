"""Environments of Gymnasium as the learners see them.

A vector of environments is stepped by `send(actions)` and `recv()`, so that its owner can do other
work in between. One that ends is reset in the same step.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeGuard

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

import moolink
from examples.common import tasks
from examples.common.agents import ParallelEnvs, as_parallel
from examples.common.observations import (
    MASK,
    DictOfBoxes,
    Observation,
    as_box,
    parts_of,
    say_left_out,
    values_of,
)
from examples.common.options import ATARI, ATARI_OPTIONS, OptionError, Options


class Step(NamedTuple):
    """The environments' results of one action each; E is their number."""

    observation: Observation
    """[E, ...]. After the end of an episode it is the first of the next one."""
    reward: NDArray[np.float32]
    """[E], as the environment gives it."""
    terminated: NDArray[np.bool_]
    """[E]: nothing follows. With `--episodic-life` also when a life is lost in Atari, though the
    game goes on."""
    truncated: NDArray[np.bool_]
    """[E]: cut off by a limit; what would have followed counts. False where `terminated`."""
    episode_over: NDArray[np.bool_]
    """[E]: the observation is the first of an episode."""
    last_observation: Observation | None
    """[E, ...]: the last of each episode that was cut off; other rows are undefined. None: none."""


class Actions:
    """A policy's outputs for an action space, and the environments' inputs.

    Attributes:
        choices: the size of each choice; empty for Box.
        size: actions are arrays [E, size].
        dtype: int64 for choices, else float32, where -1 ... 1 are the bounds of the space.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        self.choices: tuple[int, ...] = ()
        self.dtype: type[np.generic] = np.int64
        if isinstance(space, spaces.Discrete):
            self.choices = (int(space.n),)
        elif isinstance(space, spaces.MultiDiscrete):
            self.choices = tuple(int(n) for n in space.nvec.reshape(-1))
        elif isinstance(space, spaces.MultiBinary):
            self.choices = (2,) * math.prod(space.shape)
        elif isinstance(space, spaces.Box):
            self.dtype = np.float32
        else:
            raise OptionError(
                f"actions are {space}: Discrete, MultiDiscrete, MultiBinary and Box are known"
            )
        self.size = len(self.choices) or math.prod(space.shape)

    def of(self, action: NDArray[Any]) -> NDArray[Any]:
        """The environments' actions, from the policy's [E, size]."""
        space = self._space
        if isinstance(space, spaces.Discrete):
            return action[:, 0] + space.start
        if not isinstance(space, spaces.Box):
            start = getattr(space, "start", 0)
            return (action.reshape(-1, *space.shape) + start).astype(space.dtype)
        action = action.reshape(-1, *space.shape)
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        middle = np.where(bounded, (space.low + space.high) / 2, 0.0)
        half = np.where(bounded, (space.high - space.low) / 2, 1.0)
        return np.clip(action * half + middle, space.low, space.high).astype(space.dtype)


class Environments:
    """E environments: any `gymnasium.vector.VectorEnv` that resets in the same step.

    Attributes:
        num_envs: E.
        observation_spaces: the Box of each part of an observation.
        actions: a policy's outputs.
    """

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._sent: Any = None
        self.num_envs: int = envs.num_envs
        space = envs.single_observation_space
        self.observation_spaces: dict[str, spaces.Box] = dict(parts_of(space))  # type: ignore[arg-type]
        self.actions = Actions(envs.single_action_space)
        mask = self.observation_spaces.get(MASK)
        if mask is not None and mask.shape != (sum(self.actions.choices),):
            raise OptionError(
                f"observation part {MASK!r} has the shape {mask.shape}, but the actions are "
                f"{envs.single_action_space}: a mask has a number for each choice; rename the part "
                "with a wrapper if it is none"
            )

    def reset(self, seed: int | None) -> Observation:
        """Starts all, environment i from seed + i, or from chance if `seed` is None."""
        observation, infos = self._envs.reset(seed=seed)
        self._began(infos)
        return self._parts(observation)

    def send(self, action: NDArray[Any]) -> None:
        """Starts a step with a policy's actions [E, size]."""
        self._sent = self.actions.of(action)
        if hasattr(self._envs, "send"):
            self._envs.send(self._sent)

    def recv(self) -> Step:
        """Waits for the step that `send` started."""
        if hasattr(self._envs, "recv"):
            observation, reward, terminated, truncated, infos = self._envs.recv()
        else:
            observation, reward, terminated, truncated, infos = self._envs.step(self._sent)
        truncated = truncated & ~terminated
        last = None
        if truncated.any():
            last = self._last(infos["final_obs"], np.flatnonzero(truncated), observation)
        over = self._over(terminated, truncated, infos)
        rewards = np.asarray(reward, np.float32)
        return Step(self._parts(observation), rewards, terminated, truncated, over, last)

    def close(self) -> None:
        """Ends the environments."""
        self._envs.close()

    def _began(self, infos: dict[str, Any]) -> None:
        """Takes note of new episodes."""

    def _over(self, terminated: Any, truncated: Any, infos: dict[str, Any]) -> NDArray[np.bool_]:
        over: NDArray[np.bool_] = terminated | truncated
        return over

    def _parts(self, observation: Any) -> Observation:
        return observation if isinstance(observation, dict) else {"obs": observation}

    def _last(self, final: Any, rows: NDArray[np.int64], like: Any) -> Observation:
        """The last observations, in arrays of all environments."""
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return self._parts(final)
        arrays = {name: x.copy() for name, x in self._parts(like).items()}
        for row in rows:
            for name, value in self._parts(final[row]).items():
                arrays[name][row] = value
        return arrays


class Atari(Environments):
    """ALE's vector environment, whose threads step the games: grey frames, 4 stacked. With
    `--episodic-life` a lost life ends the return, but not the game."""

    def _began(self, infos: dict[str, Any]) -> None:
        self._frames = infos["episode_frame_number"]

    def _over(self, terminated: Any, truncated: Any, infos: dict[str, Any]) -> NDArray[np.bool_]:
        # A game's frames are counted from its start: a smaller number is another game.
        over: NDArray[np.bool_] = infos["episode_frame_number"] < self._frames
        self._frames = infos["episode_frame_number"]
        return over


class Pooled:
    """Environments in the workers of a `moolink.env_pool.EnvPool`, with Gymnasium's interface."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int, workers: int):
        env = make()
        self.single_observation_space, self.single_action_space = (
            env.observation_space,
            env.action_space,
        )
        env.close()
        self.num_envs = num_envs
        self._make, self._workers = make, workers
        self._pool: moolink.env_pool.EnvPool | None = None

    def reset(self, *, seed: int | None) -> tuple[Observation, dict[str, Any]]:
        """Starts new worker processes."""
        self.close()
        self._pool = moolink.env_pool.EnvPool(
            self._make,
            self._workers,
            self.num_envs,
            seed=seed,
            arrays="numpy",
            copy=True,
            final_obs=True,
        )
        actions = [self.single_action_space.sample() for _ in range(self.num_envs)]
        self.send(np.array(actions))  # a pool's first step is the reset
        return self.recv()[0], {}

    def send(self, actions: NDArray[Any]) -> None:
        assert self._pool is not None, "reset comes first"
        self._pending = self._pool.step(0, actions)

    def recv(self) -> tuple[Observation, Any, Any, Any, dict[str, Any]]:
        outputs = self._pending.result()
        names = self.single_observation_space.spaces  # type: ignore[attr-defined]
        observation = {name: outputs[name] for name in names}
        final = outputs["final_obs"]
        flags = (outputs[name].astype(np.bool_) for name in ("terminated", "truncated"))
        return observation, outputs["reward"], *flags, {"final_obs": final}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class Driven(Environments):
    """Vector environments that `moolink.drive` takes; a step is over when all rows have arrived.

    If `metadata` does not say SAME_STEP, the step after the end of an episode resets: its action is
    ignored, its reward is 0, and its observation is the first of the next episode. This class
    reports that step as one that ends like the step before it, at the same observation. So no
    return goes beyond it.
    """

    def __init__(self, envs: Any) -> None:
        super().__init__(moolink.drive(envs))
        metadata = getattr(envs, "metadata", None) or {}
        self._mode = metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if self._mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            raise OptionError(f"{self._mode} is for programs that reset environments themselves")
        self._space = self._envs.single_observation_space
        for name, space in parts_of(self._space):
            if not isinstance(space, spaces.Box):
                raise OptionError(
                    f"observation part {name!r} is {space}, but a vector environment's have to be "
                    "Boxes: gymnasium.wrappers.vector.VectorizeTransformObservation makes them so"
                )
            self.observation_spaces[name] = as_box(space)
        self._seeded = hasattr(envs, "all_env_ids")  # EnvPool, whose seed envpool.make takes

    def reset(self, seed: int | None) -> Observation:
        self._envs.async_reset(None if self._seeded else seed)
        self._ended = np.zeros((2, self.num_envs), np.bool_)
        self._before = self._gather().observation
        return self._before

    def send(self, action: NDArray[Any]) -> None:
        self._envs.send(self.actions.of(action), np.arange(self.num_envs))

    def recv(self) -> Step:
        step, before = self._gather(), self._before
        self._before = step.observation
        if self._mode is AutoresetMode.SAME_STEP:
            return step
        began = self._ended.any(0)
        terminated, truncated = self._ended | [step.terminated, step.truncated]
        self._ended = np.array([step.terminated, step.truncated]) & ~began
        last = None
        if truncated.any():
            last = {name: x.copy() for name, x in step.observation.items()}
            for name, x in last.items():
                x[began] = before[name][began]
        return Step(step.observation, step.reward, terminated, truncated, began, last)

    def _gather(self) -> Step:
        """Receives until each row has arrived once; returns arrays in the order of rows."""
        E, left = self.num_envs, self.num_envs
        reward, flags = np.empty(E, np.float32), np.empty((2, E), np.bool_)
        observation, last = self._empty(), None
        while left:
            received, rewards, terminated, truncated, infos = self._envs.recv()
            rows = on_host(infos["env_id"])
            if not on_host(infos.get("mask", True)).all():
                raise ValueError("a row is without an agent: each has to act in every step")
            for name, value in self._parts(received).items():
                observation[name][rows] = value
            reward[rows] = on_host(rewards)
            flags[0, rows], flags[1, rows] = on_host(terminated), on_host(truncated)
            flags[1, rows] &= ~flags[0, rows]
            if self._mode is AutoresetMode.SAME_STEP and flags[1, rows].any():
                last = last or self._empty()
                ended = np.flatnonzero(flags[1, rows])
                for name, value in self._last(infos["final_obs"], ended, received).items():
                    last[name][rows] = value
            left -= len(rows)
        return Step(observation, reward, *flags, flags.any(0), last)

    def _parts(self, observation: Any) -> Observation:
        return {name: on_host(x) for name, x in values_of(self._space, observation)}

    def _empty(self) -> Observation:
        boxes = self.observation_spaces.items()
        return {name: np.empty((self.num_envs, *box.shape), box.dtype) for name, box in boxes}


def on_host(array: Any) -> NDArray[Any]:
    """Returns any array, also a tensor on a GPU, as a numpy array."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def make_envs(options: Options, num_envs: int) -> Environments:
    """`num_envs` environments. Raises OptionError for an id that is unknown."""
    kind = constructor(options.env_id)
    if makes_vectors(kind):
        return Driven(kind(num_envs=num_envs))
    if kind is not None:
        env = _made(kind, options.env_id)
        if hasattr(env, "possible_agents"):  # of PettingZoo
            agents = len(env.possible_agents)
            if num_envs % agents:
                raise OptionError(f"--num-envs {num_envs} must be a multiple of {agents} agents")
            copies = [env, *(kind() for _ in range(num_envs // agents - 1))]
            return Environments(ParallelEnvs([as_parallel(copy) for copy in copies]))
        env.close()
    elif (envs := make_vector(options, num_envs)) is not None:
        return envs
    make = partial(make_one, options.env_id, has_masks(options.env_id))
    if options.env_processes:
        return Environments(Pooled(make, num_envs, min(options.env_processes, num_envs)))
    return Environments(
        SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP, copy=True)
    )


def agents_of(env_id: str) -> int:
    """How many rows an environment has: 1, or its number of agents."""
    kind = constructor(env_id)
    if kind is None or makes_vectors(kind):
        return 1
    env = _made(kind, env_id)
    env.close()
    return len(getattr(env, "possible_agents", (None,)))


def make_one(env_id: str, masked: bool) -> DictOfBoxes:
    """One environment, in whatever process it is stepped."""
    kind = constructor(env_id)
    env = gymnasium.make(env_id) if kind is None else _made(kind, env_id)
    return DictOfBoxes(env, masked)


@cache
def has_masks(env_id: str) -> bool:
    """Whether infos have masks of the actions, as Gymnasium's Taxi has. Says which parts of the
    observation are left out."""
    env = make_one(env_id, masked=False)
    try:
        say_left_out(env.parts)
        return MASK in env.reset()[1]
    finally:
        env.close()


def constructor(env_id: str) -> Callable[[], Any] | None:
    """The function that `module:function` names; None for an id of Gymnasium."""
    module, colon, name = env_id.partition(":")
    if not colon:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise OptionError(f"--env-id {env_id}: {error}; install the package that has it") from None


def _made(kind: Callable[[], Any], env_id: str) -> Any:
    env = kind()
    if env is None:
        raise OptionError(f"--env-id {env_id}: the function returns None, not an environment")
    return env


def makes_vectors(kind: Callable[..., Any] | None) -> TypeGuard[Callable[..., Any]]:
    """Whether it makes a vector environment of `num_envs` rows."""
    return kind is not None and "num_envs" in inspect.signature(kind).parameters


def make_vector(options: Options, num_envs: int) -> Environments | None:
    """The vector environment that an id is registered with, if the learner can use it as it is."""
    spec = spec_of(options.env_id)
    if spec.vector_entry_point is None or spec.additional_wrappers:
        return None  # `make_vec` does not take wrappers
    given = atari_keywords(options) if options.is_atari else {}
    try:
        envs = gymnasium.make_vec(spec, num_envs=num_envs, **given)
    except TypeError as error:
        raise OptionError(f"{spec.vector_entry_point} does not make {spec.id}: {error}") from None
    if options.is_atari:
        return Atari(envs)
    if envs.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
        return Environments(envs)
    if spec.entry_point is None:
        return Driven(envs)
    envs.close()  # such as Gymnasium's CartPole, which loses last observations
    return None


def atari_keywords(options: Options) -> dict[str, Any]:
    """The keywords that `gymnasium.make_vec` gets in addition to those of the registration."""
    rules = {
        "repeat_action_probability": options.repeat_action_probability,
        "noop_max": options.no_op_max,
        "full_action_space": options.full_action_space or None,
        "max_num_frames_per_episode": options.max_frames,
    }
    return {
        "img_height": options.frame_size,
        "img_width": options.frame_size,
        "num_threads": options.env_threads or options.cores,
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "reward_clipping": False,  # the learner clips: returns are those of the game
        # ALE's `episodic_life` would restart the whole game.
        "life_loss_info": options.episodic_life,
        **{name: value for name, value in rules.items() if value is not None},
    }


def rules_of(options: Options) -> dict[str, Any]:
    """What decides how an environment of Gymnasium behaves, by the names of its keywords.

    JSON values: those of the registration, what options of the learner have changed, and for
    Atari the defaults of ALE's vector environment. Empty for `module:function`.
    """
    if constructor(options.env_id) is not None:
        return {}
    spec = spec_of(options.env_id)
    rules: dict[str, Any] = {"id": spec.id}
    if options.is_atari:
        from ale_py.vector_env import AtariVectorEnv

        parameters = inspect.signature(AtariVectorEnv).parameters.values()
        rules |= {p.name: p.default for p in parameters if p.default is not p.empty}
    rules |= spec.kwargs
    if options.is_atari:
        rules |= atari_keywords(options)
        # Speed, and what has no meaning here.
        for name in ("num_threads", "thread_affinity_offset", "batch_size", "autoreset_mode"):
            del rules[name]
    rules["max_episode_steps"] = spec.max_episode_steps
    rules["wrappers"] = [wrapper.name for wrapper in spec.additional_wrappers] or None
    known = {name: value for name, value in rules.items() if value is not None}
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return plain


def said_rules(options: Options) -> str:
    """One line for the log: the rules that the id is registered with, and the options that change
    them or what is learned of them."""
    said = options.env_id
    if constructor(options.env_id) is None:
        spec = spec_of(options.env_id)
        registered = {**spec.kwargs, "max_episode_steps": spec.max_episode_steps}
        rules = [f"{name}={value}" for name, value in registered.items() if value is not None]
        said += f" ({', '.join(rules)})" if rules else ""
    names = (*ATARI_OPTIONS, "frame_size") if options.is_atari else ()
    changes = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name in (*names, "clip_reward")
        if (value := getattr(options, name)) is not None and value is not False
    ]
    return said + (f" with {' '.join(changes)}" if changes else "")


def spec_of(env_id: str) -> EnvSpec:
    """The registration that `gymnasium.make` finds for an id, whose module is imported already."""
    assert tasks  # imported for its registrations
    name = env_id.rpartition(":")[2]
    if name.startswith(ATARI):
        import ale_py  # here because other environments need no emulator

        gymnasium.register_envs(ale_py)
    try:
        space, plain, version = registration.parse_env_id(name)
        if version is None:  # the newest one
            version = registration.find_highest_version(space, plain)
            name = registration.get_env_id(space, plain, version)
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        module, colon, function = env_id.partition(":")
        also = f" Module {module!r} has no {function!r} either." if colon else ""
        raise OptionError(f"no environment {env_id!r}: {error}{also}") from None


def random_means(
    envs: Environments, seed: int, steps: int = 100, seed_envs: bool = False
) -> Observation:
    """The mean of each uint8 part of an observation in random play, float32, of the part's shape.

    Networks subtract it. Without it the ball of a game in small frames is one pixel that differs
    little from its ground, and nothing is learned. All peers use the leader's.
    """
    random = np.random.default_rng(seed)
    observation = envs.reset(seed if seed_envs else None)
    names = [k for k, space in envs.observation_spaces.items() if space.dtype == np.uint8]
    sums = {name: observation[name].sum(0, dtype=np.float64) for name in names}
    for _ in range(steps if names else 0):
        choices = [random.integers(n, size=envs.num_envs) for n in envs.actions.choices]
        if MASK in observation:
            chances = random.random(observation[MASK].shape) * observation[MASK]
            ends = np.cumsum(envs.actions.choices)[:-1]
            choices = [of_part.argmax(-1) for of_part in np.split(chances, ends, -1)]
        uniform = random.uniform(-1, 1, (envs.num_envs, envs.actions.size))
        action = np.stack(choices, -1) if choices else uniform
        envs.send(action.astype(envs.actions.dtype))
        observation = envs.recv().observation
        for name in names:
            sums[name] += observation[name].sum(0, dtype=np.float64)
    count = envs.num_envs * (steps + 1)
    return {name: (total / count).astype(np.float32) for name, total in sums.items()}
