"""Lets `tensordict.TensorDict` travel: importing this module registers it. Import it at both peers.

Tensors go as tensors do, without a copy of their own. A Batcher takes ``td.to_dict()``, which
copies nothing either, and ``TensorDict(batch, batch_size=[n])`` makes one of its batches.
"""

from __future__ import annotations

from typing import Any

from moolink.data.values import register
from moolink.internal.extras import needed_by

with needed_by("moolink.tensordict", "tensordict"):
    from tensordict import TensorDict

__all__ = ["TensorDict"]


def _state(value: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    return tuple(value.batch_size), dict(value.items())


def _of_state(state: tuple[tuple[int, ...], dict[str, Any]]) -> Any:
    batch_size, values = state
    return TensorDict(values, batch_size=list(batch_size))


register(TensorDict, name="tensordict:TensorDict", to_state=_state, from_state=_of_state)
