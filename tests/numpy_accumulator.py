"""An accumulator of one numpy array: what tests need where torch would take long to import."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import moolink
from moolink.accumulate import AccumulatorBase


class NumpyAccumulator(AccumulatorBase):
    """Rounds of ``gradients``, an array as ``weights`` is, which newcomers receive.

    Args:
        weights: the model.
    """

    def __init__(
        self,
        name: str,
        weights: npt.NDArray[Any],
        group: moolink.Group,
        role: Literal["member", "observer"] = "member",
    ) -> None:
        self.weights, self.gradients = weights, np.zeros_like(weights)
        sections = [(weights.dtype.name, weights.size)]
        super().__init__(name, sections, f"{weights.dtype}{weights.shape}", group, role=role)

    def _gather(self, batch_size: int, clear: bool) -> bool:
        piece = (self.gradients, self.gradients.size, 0)
        return self._core.gather(self.weights.dtype.name, [piece], float(batch_size), clear)

    def _show(self, result: npt.NDArray[np.uint8]) -> None:
        self.gradients[:] = result.view(self.weights.dtype).reshape(self.weights.shape)

    def _clear(self) -> None:
        self.gradients[:] = 0

    def _capture_model(self) -> Any:
        return self.weights

    def _install_model(self, model: Any) -> None:
        self.weights[:] = model

    def _checksum(self) -> int:
        return zlib.crc32(self.weights)
