"""The checksums of a repeatable run: two runs are the same if these files are equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from examples.common.job import checksum
from moolink import files

NAME = "checksums.csv"
_MOST_BYTES = 1 << 28


class Checksums:
    """A file with a line for each version of the model: the version, and a checksum of its
    parameters and buffers."""

    def __init__(self, directory: Path, version: int) -> None:
        """Keeps the lines of versions before this one; a job wrote the others after its last
        checkpoint. Raises OSError or moolink.FileError."""
        self._path = directory / NAME
        self._last = version - 1  # of those in the file
        text = files.read_text(self._path, "checksums", _MOST_BYTES) if self._path.exists() else ""
        # Without one that a killed process has left unfinished.
        lines = re.findall(r"^(\d+)(,\w{16}\n)", text, re.MULTILINE)
        with files.written(self._path) as file:
            kept = [number + rest for number, rest in lines if int(number) < version]
            file.write("".join(kept).encode())

    def note(self, version: int, parameters: Any) -> None:
        """Writes the line of a version, once. Raises OSError."""
        if version > self._last:
            self._last = version
            with self._path.open("a") as file:
                file.write(f"{version},{checksum(parameters)}\n")
