"""The policies for the norm of a round's gradient: a limit, and values that are not finite."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import numpy.typing as npt

from moolink._core import AccumulatorCore
from moolink.accumulate.checks import require_one_of
from moolink.accumulate.options import Nonfinite


class NormPolicy:
    """The same at every member: all see the same bits of a round and do the same.

    Args:
        max_grad_norm, on_nonfinite: as for :class:`moolink.accumulate.AccumulatorBase`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, max_grad_norm: float | None, on_nonfinite: Nonfinite) -> None:
        require_one_of("on_nonfinite", on_nonfinite, get_args(Nonfinite))
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise ValueError(f"max_grad_norm must be positive and finite, not {max_grad_norm}")
        self._limit = max_grad_norm
        self.on_nonfinite = on_nonfinite
        self._is_needed = max_grad_norm is not None or on_nonfinite != "keep"
        self.norm: float | None = None
        """Of the round shown last, before it was scaled; None: it is not needed."""

    def layout(self) -> str:
        """The end of a layout's text: members with other policies have another layout."""
        limit = "" if self._limit is None else f" max_grad_norm={float(self._limit)!r}"
        return limit + ("" if self.on_nonfinite == "keep" else f" on_nonfinite={self.on_nonfinite}")

    def scale(self, core: AccumulatorCore, result: npt.NDArray[np.uint8]) -> bool:
        """Scales a round's gradient to the limit. Returns False if the round is to be skipped."""
        if not self._is_needed:
            return True
        norm = core.norm(result)
        if self.on_nonfinite == "skip" and not math.isfinite(norm):
            return False
        if self._limit is not None and self._limit < norm < math.inf:
            core.scale(result, self._limit / norm)
        self.norm = norm
        return True

    def require_finite(self, core: AccumulatorCore) -> None:
        """Raises FloatingPointError where the policy demands it for the round shown last."""
        if self.on_nonfinite != "raise" or self.norm is None or math.isfinite(self.norm):
            return
        raise FloatingPointError(
            f"the mean gradient of round {core.model_version()}, of "
            f"{core.stats()['contributors']}, is not finite: its norm is {self.norm}"
        )
