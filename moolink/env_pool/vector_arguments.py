"""Arguments of VectorEnv, checked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from moolink.env_pool.starting import Functions
from moolink.internal.integers import integer_of
from moolink.internal.processes import available_cores


def checked_environments(
    create_env: Callable[..., Any] | Sequence[Callable[[], Any]] | None,
    num_envs: int | None,
    env_fns: Sequence[Callable[[], Any]] | None,
) -> tuple[Callable[..., Any], int]:
    """Returns one function that makes any of the environments, and their number.

    Raises:
        TypeError, ValueError: there are no functions or two sets of them, `create_env` is no
            function and no sequence of functions, or `num_envs` is missing, out of range or another
            number.
    """
    if (create_env is None) == (env_fns is None):
        got = "neither" if create_env is None else "both"
        raise TypeError(f"VectorEnv needs either create_env or env_fns, got {got}")
    create_env = env_fns if create_env is None else create_env
    if not callable(create_env):
        if not isinstance(create_env, Sequence) or not all(map(callable, create_env)):
            raise TypeError(f"create_env must be callable, or several, got {create_env!r}")
        if num_envs not in (None, len(create_env)):
            raise ValueError(f"num_envs is {num_envs}, with {len(create_env)} functions")
        num_envs = len(create_env)
        create_env = Functions(create_env)
    if num_envs is None:
        raise ValueError("VectorEnv needs num_envs, or a list of functions, one an environment")
    return create_env, integer_of(num_envs, "num_envs", least=1)


def checked_workers(num_workers: int | None, max_concurrency: int | None, num_envs: int) -> int:
    """Returns the number of worker processes; raises TypeError or ValueError for a wrong one."""
    workers = available_cores() if num_workers is None else num_workers
    workers = min(integer_of(workers, "num_workers", least=1), num_envs)
    if max_concurrency is None:
        return workers
    try:
        return min(workers, integer_of(max_concurrency, "max_concurrency", least=1))
    except TypeError as error:
        raise ValueError(str(error)) from None  # the class of AsyncVectorEnv's error


def require_async_arguments(context: str | None, worker: Callable[..., Any] | None) -> None:
    """Raises ValueError for a `context` that multiprocessing does not have; warns of a `worker`."""
    multiprocessing.get_context(context)
    if worker is not None:
        gymnasium.logger.warn(
            "VectorEnv(..., worker=) has no effect: moolink's workers have a loop of their own. "
            "Put what yours adds into a wrapper of the environment"
        )


def require_sensible(num_envs: int, batch_size: int, observation_mode: Any) -> None:
    """Raises TypeError or ValueError for a constructor's argument that makes no sense."""
    if not 1 <= integer_of(batch_size, "batch_size") <= num_envs:
        raise ValueError(f"batch_size must be 1 to num_envs={num_envs}, got {batch_size}")
    if isinstance(observation_mode, tuple):
        if len(observation_mode) != 2 or not all(
            isinstance(space, gymnasium.Space) for space in observation_mode
        ):
            raise TypeError(
                "a tuple as observation_mode has the batched and the single space, got "
                f"{observation_mode!r}"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single "
            f"and batch observation space, actual got {observation_mode}"
        )


def require_whole_batches(batch_size: int, rows: int) -> None:
    """Raises ValueError if a batch would have a part of a vector environment of so many rows."""
    if batch_size % rows:
        raise ValueError(
            f"batch_size must be a multiple of {rows}, the rows of each vector environment that "
            f"create_env makes, got {batch_size}"
        )


def checked_mask(mask: Any, num_envs: int) -> npt.NDArray[np.bool_]:
    """Returns a reset's mask; raises TypeError or ValueError as Gymnasium does."""
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{name} must contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )
    return mask
