"""Checkpoints of training loops: what a newcomer gets from the leader, in a file.

The file is a zip archive with the message that the typed codec makes of the state: its body, and
the bytes of each array. Reading one runs no code. The archive's comment is a seal of
`moolink.files`, which is checked before anything else is read.
"""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moolink import _core, files
from moolink.accumulate.left_out_rounds import checked_carried
from moolink.errors import FileError, WireError

if TYPE_CHECKING:
    from moolink.accumulate import AccumulatorBase

_KIND, _VERSION = "training loop", 1
_SEAL = files.seal_size(_KIND, _VERSION)
_BODY = "body"


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

    def load(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Takes the model and its version from the file, if there is one, and calls ``take`` with
        the rest.

        Raises:
            moolink.FileError: it is damaged, or of another model.
            RuntimeError: the peer has been connected already.
        """
        accumulator = self._accumulator
        if accumulator._group.rpc.was_connected:
            raise RuntimeError(
                "steps(checkpoint=...) was called after connect(): the group may have begun "
                "without the checkpoint. Call steps() first, then connect(), then begin the loop"
            )
        try:
            saved = self._read()
        except FileNotFoundError:
            return
        try:
            carried = checked_carried(*saved["carried"])
            accumulator._install(saved["model"])
            take(saved["rest"])
            accumulator.set_model_version(saved["version"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise FileError(
                f"{self._path} is not a checkpoint of this model and loop: {error}", path=self._path
            ) from error
        accumulator._left_out.take_over(*carried)

    def is_due(self) -> bool:
        """Whether this peer is to write the file now."""
        return time.monotonic() >= self._next and self._accumulator.is_leader()

    def save(self, rest: dict[str, Any]) -> None:
        """Replaces the file, which is on the disk when this returns.

        Args:
            rest: the state beside the model, for ``load``.

        Raises:
            OSError: it cannot be written; the one before stays.
            TypeError: the state has an object that the typed codec does not know.
        """
        accumulator = self._accumulator
        tree = {
            "version": accumulator.model_version(),
            "model": accumulator._capture_model(),
            "rest": rest,
            "carried": accumulator._left_out.carried(),
        }
        body, arrays = _core.encode(tree)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with files.written(self._path) as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(_BODY, body)
                for number, part in enumerate(arrays):
                    archive.writestr(str(number), part)
                archive.comment = bytes(_SEAL)
            files.seal(file, _KIND, _VERSION, room=_SEAL)
        self._next = time.monotonic() + self._every

    def _read(self) -> Any:
        path = self._path
        with files.naming(path), files.open_data(path) as file:
            files.check_seal(file, path, _KIND, _VERSION)
            try:
                with zipfile.ZipFile(file) as archive:
                    count = len(archive.namelist()) - 1
                    parts = [archive.read(str(number)) for number in range(count)]
                    return _core.decode(archive.read(_BODY), parts)
            except (LookupError, zipfile.BadZipFile, WireError) as error:
                # Its checksum is right: another program has written it.
                raise FileError(f"{path} is not understood: {error}", path=path) from error
