"""The part of an accumulator that depends on a framework: gather, show, capture and install."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from moolink._core import AccumulatorCore


class Adapter(abc.ABC):
    """The methods that :class:`moolink.accumulate.AccumulatorBase` needs of a framework."""

    framework = "numpy"
    """In which the adapter computes: optimisers of two frameworks differ in the last bit."""

    _core: AccumulatorCore

    def _validate(self) -> None:  # noqa: B027 - an adapter of plain memory has nothing to check
        """Raises ``ValueError`` or ``TypeError`` if the parameters or gradients are not those that
        the accumulator was made for. Called before anything is taken or installed."""

    def _prepare(self) -> None:  # noqa: B027 - most adapters take gradients from anywhere
        """Called whenever gradients are wanted, also just before they are taken."""

    @abc.abstractmethod
    def _gather(self, batch_size: int, clear: bool) -> bool:
        """Writes gradient x batch_size into the bucket, by ``self._core.gather`` for each section,
        and zeroes the gradients if ``clear``. Returns whether all elements are finite."""

    @abc.abstractmethod
    def _show(self, result: npt.NDArray[np.uint8]) -> None:
        """Puts the round's mean gradient where the user finds it. The memory is the user's."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Ends the use of a result that was shown, and zeroes the gradients."""

    @abc.abstractmethod
    def _capture_model(self) -> Any:
        """Returns parameters and buffers as a tree that can be sent: for a group of several
        frameworks a pair of lists of arrays."""

    @abc.abstractmethod
    def _install_model(self, model: Any) -> None:
        """Copies received parameters and buffers into the model. Their memory is shared: this
        method must neither write it nor keep it."""

    def _capture_parameters(self) -> list[Any]:
        """Returns a copy of the parameters, as a list of arrays, for members of other frameworks
        and those with ``sync_every``."""
        raise NotImplementedError(f"{type(self).__qualname__} does not publish its parameters")

    def _install_parameters(self, parameters: list[Any]) -> None:
        """Copies received parameters into the model."""
        raise NotImplementedError(f"{type(self).__qualname__} takes no parameters over")

    @abc.abstractmethod
    def _checksum(self) -> int:
        """Returns 64 bits of a hash of the parameters."""
