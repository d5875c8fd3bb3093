"""Checkpoints of training loops: what a newcomer gets from the leader, in a file.

The file is a zip archive with the message that the typed codec makes of the state: its body, and
the bytes of each array; ``about`` names the run and the version. Reading one runs no code. The
archive's comment is a seal of `moolink.files`, which is checked before anything else is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from moolink import _core, files
from moolink.errors import FileError, WireError
from moolink.internal.repeated import Repeated

if TYPE_CHECKING:
    from moolink.accumulate import AccumulatorBase

_KIND, _VERSION = "training loop", 1
_SEAL = files.seal_size(_KIND, _VERSION)
_BODY, _ABOUT = "body", "about"


class _Newer(Exception):
    """Another leader has meanwhile written a checkpoint that is as new or newer."""


class Checkpoint:
    """A loop's checkpoint at one path, which the group's leader writes.

    Args:
        path: of the file; its folder is made if need be.
        every: seconds between two times that it is written.
    """

    def __init__(
        self, accumulator: AccumulatorBase, path: str | os.PathLike[str], every: float
    ) -> None:
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds, at least 0, not {every!r}")
        self._accumulator = accumulator
        self._path = os.path.abspath(os.fspath(path))
        self._every = every
        self._next = time.monotonic() + every
        self._is_tried = False  # whether this leader has tried to write into the folder
        self._failures: dict[int | None, Repeated] = {}  # by errno

    def read(self) -> dict[str, Any] | None:
        """Returns what :meth:`save` has saved; None: there is no file.

        Raises:
            moolink.FileError: it is damaged.
            RuntimeError: the peer has been connected already.
        """
        if self._accumulator._group.rpc.was_connected:
            raise RuntimeError(
                "steps(checkpoint=...) was called after connect(): the group may have begun "
                "without the checkpoint. Call steps() first, then connect(), then begin the loop"
            )
        try:
            saved = self._read()
        except FileNotFoundError:
            return None
        with self.refusing():
            return dict(saved)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Makes errors of what the file contains a FileError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise FileError(
                f"{self._path} is not a checkpoint of this model and loop: {error}", path=self._path
            ) from error

    def save_if_due(self, run: str, rest: Callable[[], dict[str, Any]]) -> None:
        """Saves at the leader after `every` seconds. A file that cannot be written is a warning,
        at once when this peer becomes the leader: it would end one leader after another.

        Raises:
            TypeError: as :meth:`save`.
        """
        if not self._accumulator.is_leader():
            self._is_tried = False
            return
        if self._is_tried and time.monotonic() < self._next:
            return
        try:
            if not self._is_tried:
                self._is_tried = True
                self._try_folder()
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + self._every
                self.save(run, rest)
                self._next = time.monotonic() + self._every
        except OSError as error:
            self._failures.setdefault(error.errno, Repeated()).warn(
                f"the checkpoint cannot be written, so the job cannot go on from here: {error}. "
                f"It is tried again after {self._every:g} s and at the end of the loop"
            )

    def _try_folder(self) -> None:
        folder = os.path.dirname(self._path)
        with files.naming(self._path):
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass

    def save(self, run: str, rest: Callable[[], dict[str, Any]]) -> None:
        """Replaces the file, which is on the disk when this returns, unless it is of the same run
        and of this version or a later one.

        Args:
            run: names the run.
            rest: returns the state beside the model.

        Raises:
            OSError: it cannot be written; the one before stays.
            TypeError: the state has an object that the typed codec does not know.
        """
        accumulator = self._accumulator
        version = accumulator.model_version()
        if self._has(run, version):
            return
        tree = {
            "version": version,
            "model": accumulator._capture_model(),
            "rest": rest(),
            "carried": accumulator._left_out.carried(),
        }
        body, arrays = _core.encode(tree)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with contextlib.suppress(_Newer), files.written(self._path) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(_ABOUT, json.dumps({"run": run, "version": version}))
                archive.writestr(_BODY, body)
                for number, part in enumerate(arrays):
                    archive.writestr(str(number), part)
                archive.comment = bytes(_SEAL)
            files.seal(file, _KIND, _VERSION, room=_SEAL)
            file.flush()
            os.fsync(file.fileno())  # first, for it may take long
            if self._has(run, version):
                raise _Newer

    def _has(self, run: str, version: int) -> bool:
        """Whether the file is of this run, and as new or newer: another leader has written it."""
        try:
            with files.open_data(self._path) as file, zipfile.ZipFile(file) as archive:
                about = json.loads(archive.read(_ABOUT))
                return bool(about["run"] == run and about["version"] >= version)
        except (OSError, LookupError, TypeError, ValueError, zipfile.BadZipFile, FileError):
            return False  # there is none, or none of a run: it is replaced

    def _read(self) -> Any:
        path = self._path
        with files.naming(path), files.open_data(path) as file:
            files.check_seal(file, path, _KIND, _VERSION)
            try:
                with zipfile.ZipFile(file) as archive:
                    count = sum(name.isdecimal() for name in archive.namelist())
                    parts = [archive.read(str(number)) for number in range(count)]
                    return _core.decode(archive.read(_BODY), parts)
            except (LookupError, zipfile.BadZipFile, WireError) as error:
                # Its checksum is right: another program has written it.
                raise FileError(f"{path} is not understood: {error}", path=path) from error
