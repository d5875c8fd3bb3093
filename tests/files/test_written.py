"""Files that are written whole or not at all, whatever happens to their writers."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from moolink import files
from tests import processes, waiting

# Writes to a file until it is killed, and reports that it has begun.
WRITER = """
import sys
from moolink import files
with files.written(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("begun", flush=True)
    sys.stdin.read()
"""


def write(path: Path, data: bytes, previous: str | None = None) -> None:
    with files.written(path, previous=previous) as file:
        file.write(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path, other = tmp_path / "a[b]*.bin", tmp_path / ".a[b]*.bin.user.tmp"
    other.write_bytes(b"of the user")
    with processes.killed_at_the_end() as started:
        for _ in range(2):
            started.append(processes.start_python("-c", WRITER, path))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline() == "begun\n"
        killed, living = started
        assert len(names(tmp_path)) == 3
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        write(path, b"whole")
        assert len(names(tmp_path)) == 3  # the user's, the living writer's, and the file
        assert path.read_bytes() == b"whole"
        living.communicate(timeout=waiting.PROCESS_LIMIT)  # it ends, and so its file is whole
    assert path.read_bytes() == b"half"
    assert names(tmp_path) == sorted([path.name, other.name])


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, previous = tmp_path / "file", tmp_path / "file.previous"  # names with one begin
    errors: list[BaseException] = []

    def write_often(number: int) -> None:
        try:
            for _ in range(30):
                write(path, bytes([number]) * 5000, previous.name)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=write_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(waiting.PROCESS_LIMIT)
    assert errors == []
    assert names(tmp_path) == ["file", "file.previous"]
    for written in (path, previous):
        data = written.read_bytes()
        assert data in [bytes([number]) * 5000 for number in range(4)]


def test_the_previous_one_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, previous = tmp_path / "file", tmp_path / "before"
    write(path, b"1", previous.name)
    assert names(tmp_path) == ["file"]
    write(path, b"2", previous.name)
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")
    # The files that a writer leaves if it is killed just before its last rename.
    previous.unlink()
    os.link(path, previous)
    write(path, b"3", previous.name)
    assert (path.read_bytes(), previous.read_bytes()) == (b"3", b"2")
    assert names(tmp_path) == ["before", "file"]


@pytest.mark.parametrize("code", ["EPERM", "ENOTSUP", "EMLINK", "EINVAL", "EACCES", "EXDEV", "EIO"])
def test_the_previous_one_is_a_copy_where_there_are_no_links(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, previous = tmp_path / "file", tmp_path / "before"

    def no_links(*_: object) -> None:
        raise OSError(getattr(errno, code), "no links")

    monkeypatch.setattr("os.link", no_links)
    for data in (b"1", b"2", b"3"):
        write(path, data, previous.name)
        path.chmod(0o640)
    assert (path.read_bytes(), previous.read_bytes()) == (b"3", b"2")
    assert previous.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["before", "file"]


def test_a_folder_that_cannot_be_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    fsync, open_, codes = os.fsync, os.open, [errno.EINVAL, errno.ENOTSUP]

    def fsync_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(codes.pop(), "no folders")
        fsync(descriptor)

    def open_files(name: str, *options: int) -> int:
        if os.path.isdir(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root is never refused
        return open_(name, *options)

    monkeypatch.setattr(os, "fsync", fsync_files)
    write(path, b"1")
    write(path, b"2")
    codes.append(errno.EIO)
    with pytest.raises(OSError, match="no folders"):
        write(path, b"3")
    monkeypatch.setattr(os, "open", open_files)
    write(path, b"4")
    assert path.read_bytes() == b"4"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_into(linked: bool, tmp_path: Path) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe")
    os.mkfifo(pipe)
    if linked:
        path.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(path, b"1", "before")
        assert (os.read(reader, 100), os.read(reader, 100)) == (b"1", b"")
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert names(tmp_path) == sorted({"pipe", path.name})


def test_a_device_is_written_into(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/full'"):
        write(tmp_path / "full", b"1")
    assert names(tmp_path) == ["full"]


def test_a_descriptor_is_written_into(tmp_path: Path) -> None:
    """As /dev/stdout, which a test must not risk, where the shell directs it to a file."""
    path, link, second = tmp_path / "file", tmp_path / "link", tmp_path / "second"
    with path.open("wb", buffering=0) as file:
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        second.symlink_to("link")
        file.write(b"1")
        for target in (link, second, Path(f"/proc/self/fd/{file.fileno()}")):
            write(target, b"2")
    assert path.read_bytes() == b"1222"
    assert link.is_symlink()
    assert second.is_symlink()


def test_a_link_to_a_file_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"1")
    link.symlink_to(path)
    write(link, b"2")
    assert not link.is_symlink()
    assert (path.read_bytes(), link.read_bytes()) == (b"1", b"2")


def test_a_writer_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"1")

    def fail() -> None:
        with files.written(path) as file:
            file.write(b"2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"1"
    assert names(tmp_path) == ["file"]


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    full = tmp_path / "full"

    def fill() -> None:
        with files.written(full) as file:
            file.write(b"2")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = [
        (tmp_path / "folder", IsADirectoryError),
        (tmp_path / "nowhere" / "file", FileNotFoundError),
        (tmp_path / "plain" / "file", NotADirectoryError),
        (tmp_path / ("n" * 256), OSError),
    ]
    for path, kind in cases:
        with pytest.raises(kind) as caught:
            write(path, b"1")
        assert caught.value.filename == str(path)
        assert caught.value.filename2 is None
    with pytest.raises(OSError, match=f"No space left on device: '{full}'"):
        fill()
    write(tmp_path / ("n" * 255), b"the longest name")
    write(tmp_path / "loop", b"1")  # in the place of a link, not through it
    assert names(tmp_path) == ["folder", "loop", "n" * 255, "plain"]


def test_a_file_that_is_there_may_be_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")

    def make(where: Path) -> None:
        with files.written(where, mode=0o600, replace=False) as file:
            file.write(b"2")

    with pytest.raises(FileExistsError):
        make(path)
    assert path.read_bytes() == b"1"
    make(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file", "new"]
