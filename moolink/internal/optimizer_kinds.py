"""Checks that a checkpoint's or a member's state is of the same kind of optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def require_same_kind(state: Mapping[str, Any], kept: Collection[str], by: str) -> None:
    """Raises ValueError if a state is not of an optimizer that keeps these moments.

    A state has no moments before the first update, nor ever for SGD without momentum. Then
    ``keeps`` names those that its optimizer keeps. States of earlier versions lack it.
    """
    theirs = set(state["moments"])
    if not theirs:
        optional = {"momentum"}
        theirs = set(state.get("keeps", kept)) - optional
        kept = set(kept) - optional
    if theirs != set(kept):
        raise ValueError(
            f"the state that came has {sorted(theirs)}, and {by} has {sorted(kept)}: use the "
            "same optimizer at every member"
        )
