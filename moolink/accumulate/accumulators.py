"""Which accumulator serves a model's parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Unpack, overload

from moolink.accumulate.options import AccumulatorOptions
from moolink.group import Group

if TYPE_CHECKING:
    import torch

    import moolink.jax
    import moolink.torch


# Tensors are objects, too: the first overload that fits counts.
@overload
def Accumulator(  # type: ignore[overload-overlap]
    name: str,
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor] = (),
    group: Group | None = None,
    **options: Unpack[AccumulatorOptions],
) -> moolink.torch.Accumulator: ...
@overload
def Accumulator(
    name: str,
    parameters: object,
    buffers: object = (),
    group: Group | None = None,
    **options: Unpack[AccumulatorOptions],
) -> moolink.jax.Accumulator: ...
def Accumulator(
    name: str,
    parameters: Any,
    buffers: Any = (),
    group: Group | None = None,
    **options: Unpack[AccumulatorOptions],
) -> moolink.torch.Accumulator | moolink.jax.Accumulator:
    """Returns the accumulator of the framework that ``parameters`` belong to: an iterable of torch
    tensors, or a pytree of JAX arrays.

    Args:
        name, parameters, buffers, group: see :class:`moolink.torch.Accumulator` and
            :class:`moolink.jax.Accumulator`.
        options: ``role``, ``checksum_every``, ``on_divergence``, ``max_grad_norm``,
            ``on_nonfinite``, ``sync_every`` and ``units``; see
            :class:`moolink.accumulate.AccumulatorBase`.

    Raises:
        TypeError: the parameters are of no framework that has an adapter, or an option is unknown.
        ValueError: there are none.
    """
    if isinstance(parameters, Iterator):  # JAX takes no generators
        parameters = list(parameters)
    jax = sys.modules.get("jax")
    if jax is not None and any(isinstance(x, jax.Array) for x in jax.tree.leaves(parameters)):
        from moolink.jax import Accumulator as JaxAccumulator

        return JaxAccumulator(name, parameters, buffers, group=group, **options)
    if callable(getattr(parameters, "parameters", None)):
        raise TypeError("give model.parameters(), not the model")
    leaves = list(parameters)
    if not leaves:
        raise ValueError(
            f"accumulator {name!r} has no parameters: give an iterable of torch tensors, or a "
            "pytree of JAX arrays (a generator such as model.parameters() can be read only once)"
        )
    kind = type(leaves[0])
    if any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__):
        from moolink.torch import Accumulator as TorchAccumulator

        return TorchAccumulator(name, leaves, buffers, group=group, **options)
    raise TypeError(
        f"no accumulator for parameters of type {kind.__module__}.{kind.__qualname__}: "
        "give an iterable of torch tensors, or a pytree of JAX arrays"
    )
