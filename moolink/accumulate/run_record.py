"""The record of a run of ``moolink run``: which of its jobs have finished.

A peer that is restarted after the others have finished finds an empty group. It would found the
job anew, train all of it alone and end without an error. So members record the end in a
directory of the run, which a restarted peer reads before it founds a group.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from moolink import files
from moolink.errors import Error

DIRECTORY = "MOOLINK_RUN_DIR"  # environment variable: the run's directory
RESTARTED = "MOOLINK_RESTARTED"  # environment variable: "1" in a peer that was restarted


def note_end(group: str, accumulator: str, version: int) -> None:
    """Notes that the group's job has finished at this version of the model."""
    if directory := os.environ.get(DIRECTORY):
        _write(_path(directory, group, accumulator), str(version))


def require_unfinished(group: str, accumulator: str) -> None:
    """Called by a peer that is about to found the group's job.

    Raises:
        moolink.Error: it was restarted, and the job has finished.
    """
    directory = os.environ.get(DIRECTORY)
    if not directory or os.environ.get(RESTARTED) != "1":
        return
    path = _path(directory, group, accumulator)
    if path.exists():
        raise Error(
            f"the job of group '{group}' has finished at version {path.read_text()}: this peer was "
            "restarted after the others had left, and has not their model. Go on from a "
            "checkpoint, or start the job anew",
            function=group,
        )


def read_all(directory: str) -> dict[str, str]:
    """Returns the notes of the jobs of this run that have finished, by the names of their files."""
    return {path.name: path.read_text() for path in Path(directory).glob("*.ended")}


def add(directory: str, notes: Mapping[str, str]) -> None:
    """Adds notes that were made in another directory of the run, on another host."""
    for name, text in notes.items():
        if re.fullmatch(r"[0-9a-f]{32}\.ended", name):
            _write(Path(directory) / name, text)


def _write(path: Path, text: str) -> None:
    with files.written(path) as file:
        file.write(text.encode())


def _path(directory: str, group: str, accumulator: str) -> Path:
    name = hashlib.sha256(f"{group}/{accumulator}".encode()).hexdigest()[:32]
    return Path(directory) / f"{name}.ended"
