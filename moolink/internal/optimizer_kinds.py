"""Whether a state that came, by a checkpoint or from a member, is of an optimizer of this kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def require_same_kind(state: Mapping[str, Any], kept: Collection[str], by: str) -> None:
    """Raises ValueError if a state is not of an optimizer that keeps these moments.

    One that has made no update has none of them, and SGD without momentum never has any: then
    ``keeps`` tells, which states of earlier versions lack.
    """
    theirs = set(state["moments"])
    if not theirs:
        optional = {"momentum"}
        theirs = set(state.get("keeps", kept)) - optional
        kept = set(kept) - optional
    if theirs != set(kept):
        raise ValueError(
            f"the state that came has {sorted(theirs)}, and {by} {sorted(kept)}: use the same "
            "optimizer at every member"
        )
