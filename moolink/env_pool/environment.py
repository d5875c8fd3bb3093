"""One environment in a worker: the user's code, held to the Gymnasium API."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from moolink.env_pool import channel
from moolink.env_pool.spaces import Tree, describe, keys, leaves

OLD_GYM = "EnvPool needs the Gymnasium API: wrap the environment (for example with shimmy)"


class EnvironmentFailed(Exception):
    """An environment raised; `report` is what the pool is told."""

    def __init__(self, report: channel.Raised) -> None:
        super().__init__(report.error)
        self.report = report


class Environment:
    """One environment.

    Attributes:
        index: its number in the pool.
        doing: which call of the user's code is under way, for reports.
        pid: the worker's process.
        failures: how often it was made anew without a step in between.
    """

    def __init__(self, create: Callable[[], Any], index: int, seed: int | None) -> None:
        self.index = index
        self.doing = "create_env"
        self.failures = 0
        self.pid = os.getpid()
        self._create = create
        self._seed = seed
        with self.reporting():
            self.env = create()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Turns what user code raises, be it SystemExit, into `EnvironmentFailed`."""
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

    def reset(self) -> Any:
        """Begins an episode, the first one with the environment's seed; returns its observation."""
        self.doing = "reset"
        if self._seed is None:
            result = self.env.reset()
        else:
            seed, self._seed = self._seed, None
            result = self.env.reset(seed=seed)
        if os.getpid() != self.pid:
            self.end_forked_child()
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise TypeError(f"reset() must return (observation, info). {OLD_GYM}")
        return result[0]

    def recreate(self) -> None:
        """Throws the environment away and makes it anew."""
        self.close()
        self.doing = "create_env"
        with self.reporting():
            self.env = self._create()

    def close(self) -> None:
        """Closes the environment; what it raises now concerns nobody any more."""
        if hasattr(self, "env") and hasattr(self.env, "close"):
            try:
                self.env.close()
            except Exception:  # noqa: BLE001 - the user's code; it is reported and left behind
                traceback.print_exc()


def require_five(result: Any) -> None:
    """Raises unless `result` is what Gymnasium's step returns."""
    if not isinstance(result, tuple) or len(result) != 5:
        count = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(
            "step() must return (observation, reward, terminated, truncated, info), "
            f"got {count}. {OLD_GYM}"
        )


def derive_seed(seed: int, index: int, life: int) -> int:
    """Derives an environment's seed: independent of how environments are spread over workers."""
    return int(np.random.SeedSequence([seed, index, life]).generate_state(1)[0])


def describe_spaces(env: Any) -> tuple[Tree, Tree]:
    """Describes an environment's observation and action space."""
    for name in ("observation_space", "action_space", "reset", "step"):
        if not hasattr(env, name):
            raise TypeError(f"create_env returned {env!r}, which has no {name}. {OLD_GYM}")
    return describe(env.observation_space, "obs"), describe(env.action_space, "action")


def require_same_spaces(first: tuple[Tree, Tree], other: tuple[Tree, Tree], index: int) -> None:
    """Raises unless two environments' spaces are alike."""
    for a, b in zip(first, other, strict=True):
        if keys(a) != keys(b):
            spaces = [", ".join(leaf.space for leaf in leaves(tree)) for tree in (a, b)]
            raise ValueError(
                f"all environments of a pool need the same spaces: environment {index} has "
                f"{spaces[0]}, this one has {spaces[1]}"
            )
