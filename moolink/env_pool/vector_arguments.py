"""Arguments of VectorEnv, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.internal.integers import integer_of


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
