"""Arguments of VectorEnv, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.env_pool.starting import Functions
from moolink.internal.integers import integer_of


def checked_environments(
    create_env: Callable[..., Any] | Sequence[Callable[[], Any]], num_envs: int | None
) -> tuple[Callable[..., Any], int]:
    """Returns one function that makes any of the environments, and their number.

    Raises:
        TypeError, ValueError: `create_env` is no function and no sequence of functions, or
            `num_envs` is missing, out of range or another number.
    """
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


def require_sensible(
    num_envs: int, num_workers: int | None, batch_size: int, observation_mode: Any
) -> None:
    """Raises TypeError or ValueError for a constructor's argument that makes no sense."""
    if not 1 <= integer_of(batch_size, "batch_size") <= num_envs:
        raise ValueError(f"batch_size must be 1 to num_envs={num_envs}, got {batch_size}")
    if num_workers is not None:
        integer_of(num_workers, "num_workers", least=1)
    if observation_mode not in ("same", "different") and not isinstance(observation_mode, tuple):
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
