"""What the user asked a pool for, and create_env on its way to the workers."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from moolink.env_pool import channel
from moolink.errors import Error


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """What the user asked for; see EnvPool for the meaning."""

    create_env: Callable[..., Any]
    workers: int
    batches: int
    batch_size: int
    seed: int | None
    restart: bool
    terminal_observation: bool
    start_timeout: float | None


def setup_of(options: PoolOptions) -> channel.Setup:
    """Makes the part of the workers' setup that depends on what the user gave.

    Raises:
        Error: create_env cannot be sent to the workers.
        TypeError: it takes too many arguments.
    """
    create_env, by_value = _pickle(options.create_env)
    main = None
    if b"__main__" in create_env and not by_value:
        main = spawn.get_preparation_data("moolink-env-pool")
        main.pop("authkey", None)  # Refuses to be pickled, and is of no use to the workers.
    return channel.Setup(
        create_env=create_env,
        main=main,
        passes_index=_takes_index(options.create_env),
        workers=options.workers,
        batches=options.batches,
        batch_size=options.batch_size,
        seed=options.seed,
        recreate=options.restart,
        memory=-1,
        doorbells=[],
        bells=[],
        tokens=[],
        channels=[],
    )


def _pickle(create_env: Callable[..., Any]) -> tuple[bytes, bool]:
    """By reference where the workers can import it, else by value, which needs cloudpickle.

    Returns:
        The pickle, and whether it is by value.
    """
    try:
        pickled = pickle.dumps(create_env)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"{error}. Lambdas and functions inside functions cannot be pickled"
    else:
        if b"__main__" not in pickled or _main_can_be_loaded():
            return pickled, False
        why = (
            "it is defined in a notebook, on standard input or by `python -c`, which the workers "
            "cannot load"
        )
    try:
        import cloudpickle
    except ImportError:
        raise Error(
            f"create_env cannot be sent to the worker processes: {why}. Define it at the top level "
            "of a module, and give it arguments with functools.partial, or install cloudpickle"
        ) from None
    try:
        return cloudpickle.dumps(create_env), True
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Error(
            f"create_env cannot be sent to the worker processes: {error}. Let it refer to nothing "
            "that cannot be pickled, such as open files, locks or an Rpc"
        ) from error


def _main_can_be_loaded() -> bool:
    """Tells whether the program's main module has a file, which the workers can load again."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # of `python -m`
        return True
    return Path(getattr(main, "__file__", None) or "").is_file()


def _takes_index(create_env: Callable[..., Any]) -> bool:
    """Tells whether create_env wants the environment's index: a required parameter, or "index"."""
    try:
        parameters = inspect.signature(create_env).parameters
    except ValueError:
        return False  # Some built-in callables do not tell.
    positional = [
        parameter
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if len(required) > 1:
        names = ", ".join(parameter.name for parameter in required)
        raise TypeError(
            f"create_env takes no argument or the environment's index, but it needs {names}: "
            "bind the others with functools.partial"
        )
    return bool(required) or bool(positional and positional[0].name == "index")
