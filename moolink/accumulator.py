"""The gradient accumulator, as far as it does not depend on a framework.

:class:`AccumulatorBase` is moolib's accumulator: its methods, its loop. What knows tensors is in
the adapters (:mod:`moolink.torch`), which gather gradients into a flat bucket and scatter results.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from moolink._core import AccumulatorCore
from moolink.group import Group
from moolink.logs import logger
from moolink.rpc import Rpc

if TYPE_CHECKING:
    import moolink.torch
    from moolink._core import GradientStats

Divergence = Literal["raise", "warn"]


class AccumulatorBase(abc.ABC):
    """Elastic data-parallel training: every member applies the same rounds in the same order.

    A round is the weighted mean of the shortest run of contributions, in the order of their arrival
    at the leader, whose batch sizes sum to the virtual batch size. The loop is moolib's::

        while True:
            accumulator.update()
            if accumulator.wants_state():
                accumulator.set_state({"optimizer": ...})
            if accumulator.has_new_state():
                state = accumulator.state()
            if accumulator.has_gradients():
                ...  # clip, optimizer step
                accumulator.zero_gradients()
            elif accumulator.wants_gradients():
                ...  # forward, backward
                accumulator.reduce_gradients(batch_size)

    Between two calls of :meth:`update` nothing changes under the user's feet: members, gradients,
    parameters and versions change there only. All methods belong to one thread at a time.
    """

    def __init__(
        self,
        name: str,
        sections: list[tuple[str, int]],
        layout: str,
        group: Group | None,
        *,
        role: Literal["member", "observer"] = "member",
        checksum_every: int = 100,
        on_divergence: Divergence = "raise",
    ) -> None:
        self._own_rpc: Rpc | None = None
        if group is None:
            self._own_rpc = Rpc()
            group = Group(self._own_rpc, name)
        self._group = group
        self._core = AccumulatorCore(group.core, name, sections, layout, role == "observer")
        self._checksum_every = checksum_every
        self._on_divergence = on_divergence
        self._has_gradients = False
        self._has_new_state = False
        self._state: Any = None

    # What an adapter knows.

    @abc.abstractmethod
    def _gather(self, bucket: npt.NDArray[np.uint8], batch_size: int) -> None:
        """Writes gradient x batch_size into the bucket and zeroes the gradients."""

    @abc.abstractmethod
    def _scatter(self, result: npt.NDArray[np.uint8]) -> None:
        """Copies the round's mean gradient to where the user finds it."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Zeroes the gradients."""

    @abc.abstractmethod
    def _capture_model(self) -> Any:
        """Returns parameters and buffers as a tree that can be sent."""

    @abc.abstractmethod
    def _install_model(self, model: Any) -> None:
        """Copies received parameters and buffers into the model."""

    @abc.abstractmethod
    def _checksum(self) -> int:
        """Returns 64 bits of a hash of the parameters."""

    # moolib's methods.

    def connect(self, address: str) -> None:
        """Connects to the broker at ``address``; only for an accumulator that made its own group.

        Raises:
            RuntimeError: a group was given; connect its ``Rpc`` instead.
        """
        if self._own_rpc is None:
            raise RuntimeError(
                "this accumulator was given a group: call connect on the group's Rpc instead"
            )
        self._own_rpc.connect(address)

    def update(self) -> None:
        """Takes over what has happened since the last call: views, a new state, a result.

        Raises:
            moolink.Error: the group refused this peer (for example, its parameters have another
                layout), or the model's checksums differ and ``on_divergence`` is ``"raise"``.
        """
        self._core.update(self._on_divergence == "raise")
        if self._core.state_overdue():
            logger.warning(
                "wants_state() has been true for 5 s: newcomers get parameters and buffers only"
            )
            self._core.set_state((self._capture_model(), None))
        if self._core.has_new_state() and (arrived := self._core.new_state()) is not None:
            number, (model, state) = arrived
            self._install_model(model)
            self._clear()  # what they hold belongs to the model before
            self._core.state_installed(number)
            self._state, self._has_new_state = state, True
            self._has_gradients = False
        if not self._has_gradients:
            result = self._core.next_result()
            if result is not None:
                self._scatter(result)
                self._has_gradients = True

    def wait(self, timeout: float) -> bool:
        """Blocks, without the GIL, until :meth:`update` may have something new.

        Args:
            timeout: seconds.

        Returns:
            Whether there is news.
        """
        return self._core.wait(timeout)

    def connected(self) -> bool:
        """Whether this peer is an active member and its model is the group's."""
        return self._core.connected()

    def wants_state(self) -> bool:
        """Whether newcomers wait for this peer's state; true once for each snapshot."""
        return self._core.wants_state()

    def set_state(self, state: Any) -> None:
        """Gives the state that newcomers receive beside parameters and buffers.

        Args:
            state: a tree of tensors, arrays and plain values, copied before this returns.

        Raises:
            RuntimeError: ``wants_state()`` is false.
            TypeError: the state holds an object that the typed codec does not know.
        """
        self._core.set_state((self._capture_model(), state))

    def has_new_state(self) -> bool:
        """Whether a state has arrived; parameters and buffers are already installed."""
        return self._has_new_state

    def state(self) -> Any:
        """Returns the state that arrived, once.

        Raises:
            RuntimeError: ``has_new_state()`` is false.
        """
        if not self._has_new_state:
            raise RuntimeError(
                "no new state has arrived: call state() when has_new_state() is true"
            )
        state, self._state, self._has_new_state = self._state, None, False
        return state

    def wants_gradients(self) -> bool:
        """Whether ``reduce_gradients`` or ``skip_gradients`` may be called now."""
        return not self._has_gradients and not self._has_new_state and self._core.wants_gradients()

    def has_gradients(self) -> bool:
        """Whether the gradients now hold a round's result."""
        return self._has_gradients

    def reduce_gradients(self, batch_size: int, counters: Mapping[str, int] | None = None) -> None:
        """Contributes the current gradients.

        Args:
            batch_size: the weight of this contribution in the mean, at least 1.
            counters: integers summed exactly over the round's contributions, such as
                ``{"steps": 640}``.

        Raises:
            RuntimeError: ``wants_gradients()`` is false.
            ValueError: ``batch_size`` is less than 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self._require_wanted("reduce_gradients")
        bucket = self._core.bucket()
        self._gather(bucket, batch_size)
        self._core.offer(batch_size, dict(counters or {}))

    def skip_gradients(self, counters: Mapping[str, int] | None = None) -> None:
        """Contributes nothing but counters. Never needed: a silent peer holds nobody up.

        Raises:
            RuntimeError: ``wants_gradients()`` is false.
        """
        self._require_wanted("skip_gradients")
        self._core.offer(0, dict(counters or {}))

    def zero_gradients(self) -> None:
        """Ends the use of a result: zeroes the gradients and makes room for the next round."""
        self._clear()
        if not self._has_gradients:
            return
        self._has_gradients = False
        version = self._core.model_version()
        if self._checksum_every and version % self._checksum_every == 0:
            self._core.checksum(version, self._checksum())
        self._core.release_result()

    def model_version(self) -> int:
        """Number of rounds that were delivered to this peer's model."""
        return self._core.model_version()

    def set_model_version(self, version: int) -> None:
        """Sets the version of a model loaded from a checkpoint, before the group forms.

        The member with the highest version becomes the first leader, and the others get its state.
        """
        self._core.set_model_version(version)

    def set_virtual_batch_size(self, size: int) -> None:
        """Sets the sum of batch sizes that makes a round; the leader's value counts (default 1)."""
        self._core.set_virtual_batch_size(size)

    def set_parallel_gradients(self, rounds: int) -> None:
        """Sets how many rounds may be under way at once; the leader's value counts (default 1).

        With 1 every gradient is of the newest parameters. With more the next contribution is
        computed while a round is reduced: gradients are up to ``rounds - 1`` updates old.
        """
        self._core.set_parallel_gradients(rounds)

    def get_leader(self) -> str:
        """Name of the leader, or ``""`` while there is none."""
        return self._core.leader()

    def is_leader(self) -> bool:
        """Whether this peer cuts the rounds."""
        return self._core.is_leader()

    def get_gradient_stats(self) -> GradientStats:
        """Returns what the round that was delivered last was made of.

        ``batch_size`` is the virtual batch (the sum over the contributions), ``num_gradients`` and
        ``num_skipped`` count contributions, ``contributors`` names their peers, ``counters`` holds
        the exact sums of what was given to ``reduce_gradients``, ``waiting_for`` names the peers
        that hold up the group now, and ``lost`` the contributions ``(peer, k)`` of dead peers that
        turned out, since the round before, to be in no round.
        """
        return self._core.stats()

    def close(self) -> None:
        """Leaves the group (at once for the others) and releases its memory."""
        self._core.close()
        if self._own_rpc is not None:
            self._group.close()
            self._own_rpc.close()

    def __enter__(self) -> AccumulatorBase:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _require_wanted(self, method: str) -> None:
        if self.wants_gradients():
            return
        if self._has_gradients:
            why = "a result is in the gradients: step the optimiser and call zero_gradients()"
        elif self._has_new_state:
            why = "a new state has arrived: call state()"
        else:
            why = self._core.why_not_wanted()
        raise RuntimeError(f"{method} was called while wants_gradients() is false: {why}")


def Accumulator(
    name: str,
    parameters: Iterable[Any],
    buffers: Iterable[Any] = (),
    group: Group | None = None,
    **options: Any,
) -> moolink.torch.Accumulator:
    """Returns the accumulator of the framework that ``parameters`` belong to.

    Raises:
        TypeError: the parameters are of no framework that has an adapter.
    """
    leaves = list(parameters)
    kind = type(leaves[0]) if leaves else object
    if any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__):
        from moolink.torch import Accumulator as TorchAccumulator

        return TorchAccumulator(name, leaves, buffers, group=group, **options)
    raise TypeError(
        f"no accumulator for parameters of type {kind.__module__}.{kind.__qualname__}: "
        "give an iterable of torch tensors"
    )
