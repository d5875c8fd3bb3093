"""Numbers that users give, as Python's floats."""

from __future__ import annotations

from typing import SupportsFloat


def float_of(value: SupportsFloat) -> float:
    """The value of a number, or of an array of any framework with one element."""
    # item(): torch warns of float() of a tensor with gradients.
    return float(value.item() if hasattr(value, "item") else value)
