"""The options that the accumulators of all frameworks have."""

from __future__ import annotations

from typing import Literal, TypedDict

Role = Literal["member", "observer"]
Divergence = Literal["raise", "warn", "resync"]
Nonfinite = Literal["keep", "skip", "raise"]


class AccumulatorOptions(TypedDict, total=False):
    """Keyword arguments, explained at :class:`moolink.accumulate.AccumulatorBase`."""

    role: Role
    checksum_every: int
    on_divergence: Divergence
    max_grad_norm: float | None
    on_nonfinite: Nonfinite
    sync_every: int | None
    units: int | None
