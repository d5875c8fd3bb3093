"""One environment in a worker: the user's code, with Gymnasium's API or the old Gym's."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from moolink.env_pool import channel
from moolink.env_pool.fitting import fits
from moolink.env_pool.spaces import UNDECLARED_ACTION, Tree, describe, infer, keys, leaves

_MODES = {"same": "SameStep", "next": "NextStep", "never": "Disabled"}  # Gymnasium's names
_NEITHER = "EnvPool needs the API of Gymnasium or of the old Gym"


class EnvironmentFailed(Exception):
    """An environment raised; `report` is the message to the pool."""

    def __init__(self, report: channel.Raised) -> None:
        super().__init__(report.error)
        self.report = report


class Environment:
    """One environment.

    Attributes:
        env: the user's object.
        index: its number in the pool, and its row, of a vector environment the first one.
        rows: how many rows a vector environment has; None: it is a single one.
        doing: which call of the user's code is under way, for reports.
        due: whether it is to be reset instead of being stepped.
        interrupted: whether the episode that it continues was cut off by a crash.
        pid: the worker's process.
        failures: how often it was made anew without a step in between.
    """

    def __init__(self, create: Callable[[], Any], index: int, seed: int | None) -> None:
        self.index = index
        self.doing = "create_env"
        self.due = False
        self.interrupted = False
        self.failures = 0
        self.pid = os.getpid()
        self._create = create
        self._seed = seed
        self._first: tuple[Any, dict[str, Any]] | None = None
        with self.reporting():
            self._make()

    def _make(self) -> None:
        self.env = self._create()
        for name in ("reset", "step"):
            if not hasattr(self.env, name):
                raise TypeError(
                    f"create_env returned {self.env!r}, which has no {name}. {_NEITHER}"
                )
        self._reset_takes = _parameters(self.env.reset)
        vector = hasattr(self.env, "single_observation_space") and hasattr(self.env, "num_envs")
        self.rows: int | None = int(self.env.num_envs) if vector else None

    def space(self, kind: str) -> Any:
        """The "observation" or "action" space of a row; None: it declares none."""
        prefix = "" if self.rows is None else "single_"
        return getattr(self.env, f"{prefix}{kind}_space", None)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Turns exceptions of user code, SystemExit included, into `EnvironmentFailed`."""
        try:
            yield
        except EnvironmentFailed:
            raise
        except BaseException as error:
            raise self.failed(error) from error
        if os.getpid() != self.pid:
            self.end_forked_child()

    def failed(self, error: BaseException) -> EnvironmentFailed:
        """Describes `error`, which the environment raised in `doing`."""
        if os.getpid() != self.pid:
            self.end_forked_child()
        text = "".join(traceback.format_exception(error))
        summary = traceback.format_exception_only(error)[-1].strip()
        return EnvironmentFailed(channel.Raised(self.index, self.doing, summary, text))

    def end_forked_child(self) -> NoReturn:
        """Ends this process, a child that the environment has forked and that has come back here.

        It shares the pool's memory and bells with the worker, which goes on in the parent.
        """
        print(
            f"moolink: environment {self.index} has forked in {self.doing}, and its child (pid "
            f"{os.getpid()}) came back from it. The child ends here, for its parent serves the "
            "pool: let a forked child end with os._exit",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def begin(self) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode of an environment that is reset by the pool.

        The first one has the environment's seed; it may have been begun already, to see its layout.
        """
        first, self._first = self._first, None
        if first is not None:
            return first
        seed, self._seed = self._seed, None
        return self.reset(seed, None, always=False)

    def reset(
        self, seed: int | None, options: dict[str, Any] | None, *, always: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment; returns (observation, info).

        `seed` and `options` are given to it if it takes them, None only if `always`.
        """
        self.doing = "reset"
        arguments: dict[str, Any] = {}
        for name, value in (("seed", seed), ("options", options)):
            if (value is not None or always) and name in self._reset_takes:
                arguments[name] = value
        if seed is not None and "seed" not in self._reset_takes and hasattr(self.env, "seed"):
            self.env.seed(seed)  # The old Gym's.
        result = self.env.reset(**arguments)
        if os.getpid() != self.pid:
            self.end_forked_child()
        self.doing = "step"
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}  # The old Gym's.

    def look_ahead(self) -> Any:
        """Begins the first episode already; returns its observation. `begin` gives it again."""
        self._first = self.begin()
        return self._first[0]

    def recreate(self) -> None:
        """Throws the environment away and makes it anew."""
        self.close()
        self.doing = "create_env"
        with self.reporting():
            self._make()

    def close(self) -> None:
        """Closes the environment and ignores its exceptions."""
        if hasattr(self, "env") and hasattr(self.env, "close"):
            try:
                self.env.close()
            except Exception:  # noqa: BLE001 - the user's code; it is reported and left behind
                traceback.print_exc()


def _parameters(function: Any) -> set[str]:
    """Names among "seed" and "options" that `function` takes as keywords."""
    known = {"seed", "options"}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return known  # Some built-in callables do not tell.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return known
    return known & parameters.keys()


def as_five(result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Converts the result of the old Gym's step, (observation, reward, done[, info])."""
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return (*result[:4], _require_info(result[4]))
    if not isinstance(result, (tuple, list)) or len(result) not in (3, 4):
        count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(
            "step() must return (observation, reward, terminated, truncated, info), or the old "
            f"Gym's (observation, reward, done, info), got {count}"
        )
    observation, reward, done = result[:3]
    info = _require_info(result[3]) if len(result) == 4 else {}
    truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
    return observation, reward, bool(done) and not truncated, truncated, info


def _require_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise TypeError(f"step() must return a dict as its info, got {type(info).__name__}")
    return info


def derive_seed(seed: int, index: int, life: int) -> int:
    """Derives an environment's seed: independent of how environments are spread over workers."""
    return int(np.random.SeedSequence([seed, index, life]).generate_state(1)[0])


class Layouts:
    """The layouts of an environment's observations and actions, and how they came about."""

    def __init__(self, environment: Environment, behaviour: channel.Behaviour) -> None:
        env = environment.env
        self.warning = ""
        self._any = behaviour.any_space
        self._bounds = behaviour.compare == "spaces"
        self.observation = self._described(environment.space("observation"), "obs")
        self.action = self._described(environment.space("action"), "action")
        if environment.rows is not None:
            self._require_vector(environment, behaviour.autoreset)
            return
        declared = hasattr(env, "observation_space") and hasattr(env, "action_space")
        if not declared or (behaviour.infer and self.observation is not None):
            self._look(environment)

    def _described(self, space: Any, path: str) -> Tree | None:
        if space is None:
            return None
        try:
            return describe(space, path)
        except TypeError:
            if self._any:
                return None
            raise

    def _require_vector(self, environment: Environment, autoreset: str) -> None:
        """Raises unless a pool can run this vector environment."""
        if self.observation is None or self.action is None:
            raise TypeError(
                "a vector environment needs Box, Discrete, MultiDiscrete, MultiBinary, Dict or "
                f"Tuple spaces, got {environment.space('observation')} and "
                f"{environment.space('action')}"
            )
        metadata = getattr(environment.env, "metadata", None) or {}
        mode = metadata.get("autoreset_mode", _MODES[autoreset])
        name = str(getattr(mode, "value", mode))
        if name != _MODES[autoreset]:
            raise ValueError(
                f"create_env made a vector environment of autoreset mode {name}, in a pool of mode "
                f"{_MODES[autoreset]}: give both one mode"
            )

    def _look(self, environment: Environment) -> None:
        """Lets the first observation decide where no space is declared, or where it differs."""
        env = environment.env
        try:
            first = environment.look_ahead()
        except Exception:
            if hasattr(env, "observation_space") and hasattr(env, "action_space"):
                return  # The first step raises it again, or not.
            raise
        said = []
        if not hasattr(env, "observation_space"):
            said.append("no observation_space")
        elif self.observation is not None and not fits(self.observation, first):
            said.append(
                f"observation_space {env.observation_space}, which its observations are not in"
            )
        if said:
            self.observation = infer(first, "obs")
            said[-1] += f": the layout is {_words(self.observation)}"
        if not hasattr(env, "action_space"):
            self.action = UNDECLARED_ACTION
            said.append("no action_space: actions are int64 numbers")
        if said:
            self.warning = f"{type(env).__name__} declares " + ". It declares ".join(said)

    def require_same(self, other: Layouts, index: int) -> None:
        """Raises unless `other`, of environment `index`, is the same."""
        for a, b in ((self.observation, other.observation), (self.action, other.action)):
            if keys(a, bounds=self._bounds) != keys(b, bounds=self._bounds):
                raise ValueError(
                    f"all environments of a pool need the same spaces: environment {index} has "
                    f"{_words(b)}, this one has {_words(a)}"
                )


def _words(tree: Tree | None) -> str:
    return ", ".join(leaf.space for leaf in leaves(tree)) if tree is not None else "no fixed layout"
