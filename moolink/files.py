"""Files that are written whole or not at all, and files whose contents are checked when read.

The library and its examples write and read all their files through this module.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import select
import shutil
import stat
import time
import tomllib
from collections.abc import Iterator
from typing import Any, BinaryIO

from moolink import _core
from moolink.errors import FileError

__all__ = [
    "check_seal",
    "contents",
    "crc32c",
    "naming",
    "open_data",
    "read_text",
    "read_toml",
    "seal",
    "seal_size",
    "written",
]

_PIPE_SECONDS = 10.0  # for the process that writes into a pipe
_LONGEST_NAME = 255  # bytes
_MOST_TEXT = 1 << 20  # bytes
_MOST_COMMENT = 65535  # bytes of a zip archive's comment at most
_AT_ONCE = 8 << 20  # bytes that are summed together
_DIRECTORY_END = b"PK\x05\x06"  # of a zip archive; 22 bytes with an empty comment
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)


@contextlib.contextmanager
def written(
    path: str | os.PathLike[str],
    *,
    mode: int = 0o666,
    replace: bool = True,
    previous: str | None = None,
) -> Iterator[BinaryIO]:
    """A file that gets the name `path` once it is whole and on the disk.

    Until then it has a name of its own in the same folder, ``.NAME.xxxxxxxx.tmp``, and this process
    holds a lock on it. The next process that writes `path` removes the scratch files of killed
    processes. Any number of processes may write one path: the file that is finished last stays.
    A link at `path` is replaced, and its file stays. A pipe, a device or a descriptor such as
    ``/dev/stdout`` is written into.

    Args:
        mode: permissions, less the process's umask.
        replace: whether an existing file is replaced; if not, it is an error.
        previous: the name in the same folder that an existing file gets before it is replaced.

    Raises:
        OSError: it cannot be written; the error names `path`. An existing file stays.
    """
    target = os.path.abspath(os.fsdecode(path))
    folder, name = os.path.split(target)
    with naming(path):
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if replace and _is_written_into(target):
            with open(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb") as file:
                yield file
            return
        _remove_left(folder, name)
        with _scratch(folder, name, mode) as (scratch, file):
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not replace:
                os.link(scratch, target)  # unlike a rename, fails where there is a file
            else:
                if previous is not None:
                    _keep(target, os.path.join(folder, previous))
                os.replace(scratch, target)
        _sync(folder)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes system errors that name no file, or a scratch file, name this one."""
    try:
        yield
    except OSError as error:
        named = error.filename is None or _is_scratch(error.filename)
        if error.errno is None or not named:
            raise
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from error


def _is_written_into(path: str) -> bool:
    """Whether no file can take this place: a pipe, a device, or a link to an open descriptor."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return True
    except OSError:  # nothing is there, or a link to nothing
        return False
    while os.path.islink(path):
        folder = os.path.dirname(path)
        if os.path.realpath(folder).startswith("/proc/"):
            return True
        path = os.path.join(folder, os.readlink(path))
    return False


def _is_scratch(name: str | bytes) -> bool:
    return bool(re.fullmatch(r"\..*\.[0-9a-f]{8}\.tmp", os.path.basename(os.fsdecode(name))))


def _stem(name: str) -> str:
    """The beginning of the names of a file's scratch files."""
    if len(os.fsencode(name)) > _LONGEST_NAME - len("..xxxxxxxx.tmp"):
        return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return name


def _scratch_name(folder: str, name: str) -> str:
    return os.path.join(folder, f".{_stem(name)}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def _scratch(folder: str, name: str, mode: int) -> Iterator[tuple[str, BinaryIO]]:
    """A new, locked file with its path, which is removed at the end if it is still there."""
    while True:
        path = _scratch_name(folder, name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # before the lock, another writer removed it as a leftover
    with os.fdopen(descriptor, "w+b") as file:
        try:
            yield path, file
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _lock(descriptor: int, kind: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: nothing is ever removed
        fcntl.flock(descriptor, kind)


def _remove_left(folder: str, name: str) -> None:
    """Removes the scratch files of killed processes: those that no process has locked."""
    left = re.compile(rf"\.{re.escape(_stem(name))}\.[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):  # a folder that cannot be listed can still be written
        for entry in os.listdir(folder):
            if left.fullmatch(entry):
                _remove_unlocked(os.path.join(folder, entry))


def _remove_unlocked(path: str) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):  # it was just removed, is locked, or belongs to another user
        descriptor = os.open(path, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def _keep(target: str, previous: str) -> None:
    """Gives the file at `target`, if there is one, the second name `previous`, so that it never
    loses its own name. Where there are no hard links, `previous` is a copy."""
    while True:
        try:
            old = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        scratch = _scratch_name(*os.path.split(target))
        try:
            _lock(old, fcntl.LOCK_SH)  # so that no other writer removes the link
            with contextlib.suppress(FileNotFoundError):  # another file has come after the lock
                _link_or_copy(target, scratch)
                os.replace(scratch, previous)
                return
        finally:
            os.close(old)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)  # a rename to another link of the same file does nothing


def _link_or_copy(target: str, scratch: str) -> None:
    try:
        os.link(target, scratch)
    except FileNotFoundError:
        raise
    except OSError:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        private = os.open(scratch, flags, 0o600)
        with open(private, "wb") as copy, open(target, "rb") as source:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(private)
        with contextlib.suppress(OSError):  # a file system without permissions
            shutil.copymode(target, scratch)


def _sync(folder: str) -> None:
    """Brings the names in a folder to the disk, where the file system and permissions allow it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def crc32c(data: bytes, before: int = 0) -> int:
    """The CRC-32C of bytes, or with the earlier bytes' sum as `before`, of all bytes so far."""
    return _core.crc32c(data, before)


def seal_size(kind: str, version: int) -> int:
    """The bytes of a seal."""
    return len(_seal_line(kind, version)) + 8 + 4


def seal(file: BinaryIO, kind: str, version: int, *, room: int = 0) -> None:
    """Writes a seal to the end of a zip archive: a line with the file's kind and version, the
    file's length, and the checksum of all bytes before it; little-endian.

    Args:
        room: bytes at the end of the file that the seal replaces, such as the archive's comment.
    """
    end = file.seek(-room, os.SEEK_END)
    length = end + seal_size(kind, version)
    start = _seal_line(kind, version) + length.to_bytes(8, "little")
    checksum = crc32c(start, _sum(file, end))
    file.seek(end)
    file.write(start + checksum.to_bytes(4, "little"))


def check_seal(file: BinaryIO, path: str | os.PathLike[str], kind: str, version: int) -> None:
    """Raises FileError unless each byte of a sealed file is as it was written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(-min(size, _MOST_COMMENT), os.SEEK_END)
    end = file.read()
    found = re.compile(rb"moolink %s (\d{1,9})\n(.{8})(.{4})" % kind.encode(), re.DOTALL)
    seals = list(found.finditer(end))
    if not seals:
        raise _unusable(path, _without_seal(file, end, size, kind, version))
    saved, length, checksum = seals[-1].groups()
    after = len(end) - seals[-1].end()
    if int(saved) != version:
        what = f"is of version {int(saved)}, and this program reads version {version} only"
    elif after > 0:
        what = f"is longer than it should be: {after} of its {size} bytes come after its end"
    elif int.from_bytes(length, "little") != size:
        what = f"has {size} bytes, and should have {int.from_bytes(length, 'little')}"
    elif crc32c(
        _seal_line(kind, version) + length, _sum(file, size - seal_size(kind, version))
    ) != int.from_bytes(checksum, "little"):
        what = f"is damaged: the checksum of its {size} bytes is wrong"
    else:
        return
    raise _unusable(path, what)


def _seal_line(kind: str, version: int) -> bytes:
    return f"moolink {kind} {version}\n".encode()


def _without_seal(file: BinaryIO, end: bytes, size: int, kind: str, version: int) -> str:
    file.seek(0)
    if file.read(2) != b"PK":
        return f"is no checkpoint of a {kind} ({size} bytes)"
    if end[-22:].startswith(_DIRECTORY_END):
        return f"is of version 1, and this program reads version {version} only"
    return f"is cut off after {size} bytes, or its end is damaged"


def _sum(file: BinaryIO, length: int) -> int:
    """The checksum of the file's first bytes."""
    file.seek(0)
    checksum = 0
    while length > 0:
        part = file.read(min(length, _AT_ONCE))
        if not part:
            break  # another program is cutting the file: the checksum will differ
        checksum = crc32c(part, checksum)
        length -= len(part)
    return checksum


def open_data(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file of data.

    Raises:
        OSError: it cannot be opened.
        FileError: it is not a regular file, but for example a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(path))
        if not stat.S_ISREG(mode):
            raise _wrong(path, "is a pipe or a device: give the path of a file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: str | os.PathLike[str], kind: str, most: int = _MOST_TEXT) -> str:
    """Returns the text of a file, or of a pipe such as a shell's ``<(command)``.

    Args:
        kind: of the file, for errors: "a TOML file".
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read.
        FileError: it is no text in UTF-8; the message names the line.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with naming(path):
            data = contents(descriptor, most)
    except TimeoutError:
        waited = f"is a pipe whose writer did not end within {_PIPE_SECONDS:.0f} s"
        raise _wrong(path, f"{waited}; expected {kind}") from None
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise _wrong(path, f"is larger than {most} bytes; expected {kind}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _wrong(path, f"line {line} is not UTF-8; expected {kind} in UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise _wrong(path, f"line {line} has a NUL byte in it; expected {kind} in UTF-8")
    return text


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the tables of a TOML file.

    Raises:
        OSError: it cannot be read.
        FileError: it is no TOML; the message names the line.
    """
    try:
        return tomllib.loads(read_text(path, "a TOML file"))
    except FileError:
        raise
    except RecursionError:
        raise _wrong(path, "its values are nested too deeply") from None
    except ValueError as error:  # a number that is too long is no TOMLDecodeError
        raise _wrong(path, f"{error}") from error


def contents(descriptor: int, most: int) -> bytes:
    """Returns what a descriptor that does not block holds, at most `most` bytes and one more.

    Raises:
        OSError: it cannot be read.
        TimeoutError: it is a pipe whose writer did not open it, write or end in time.
    """
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    data = b""
    until = time.monotonic() + _PIPE_SECONDS
    while len(data) <= most:
        # Checked first: a read from a named pipe without a writer returns an end of file.
        if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
            did_not = "did not end" if data else "wrote nothing"
            raise TimeoutError(f"is a pipe whose writer {did_not} in {_PIPE_SECONDS:.0f} s")
        try:
            piece = os.read(descriptor, most + 1 - len(data))
        except BlockingIOError:  # another process has read it
            continue
        if not piece:
            break
        data += piece
    return data


def _wrong(path: str | os.PathLike[str], what: str) -> FileError:
    name = os.fsdecode(path)
    return FileError(f"{name}: {what}", path=name)


def _unusable(path: str | os.PathLike[str], what: str) -> FileError:
    name = os.fsdecode(path)
    return FileError(f"{name} {what}", path=name)
