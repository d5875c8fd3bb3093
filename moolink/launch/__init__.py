"""Launching jobs: one description, several ways to run it; and a process's place in its job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moolink.launch.description import Job, Role
from moolink.launch.leaving import leave_on_signals
from moolink.launch.place import Place, place

if TYPE_CHECKING:
    from moolink.launch.launching import launch

__all__ = ["Job", "Place", "Role", "launch", "leave_on_signals", "place"]


def __getattr__(name: str) -> Any:
    if name == "launch":
        from moolink.launch.launching import launch

        return launch
    raise AttributeError(f"module 'moolink.launch' has no attribute {name!r}")
