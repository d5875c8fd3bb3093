"""Launching jobs: one description, several ways to run it; and a process's place in its job."""

from __future__ import annotations

from moolink.launch.description import Job, Role
from moolink.launch.place import Place, place

__all__ = ["Job", "Place", "Role", "place"]
