"""A folder for the files of a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

_PREFIX = "moolink-run-"


class RunFolder:
    """A folder that only this user can read, with a lock that ends with this process.

    The process removes it, or the process's guard. After a power cut the next run does: it removes
    the folders whose lock no process holds.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        lock = f"lock-{socket.gethostname()}"  # other hosts may have the parent folder, too
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_if_left(path, lock)
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.path = self._folder.name
        new = Path(self.path, "new")
        self._descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            new.rename(new.with_name(lock))  # it has its name only while it is held

    def close(self) -> None:
        """Removes the folder."""
        self._folder.cleanup()
        os.close(self._descriptor)


def _remove_if_left(path: Path, lock: str) -> None:
    with contextlib.suppress(OSError):  # it has no lock, a process holds it, or it was just removed
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        descriptor = os.open(path / lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        finally:
            os.close(descriptor)
