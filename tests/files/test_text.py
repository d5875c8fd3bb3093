"""Text files that people write: each mistake raises a FileError with the file, the line and the
expected text; nothing waits for ever."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import moolink
from examples.common.curve import COLUMNS, LearningCurve
from examples.common.options import ImpalaOptions
from moolink import files
from moolink.cli.replay import read_tables
from moolink.launch.description import Job

JOB = '[[role]]\nname = "a"\ncommand = "true"\n'
TABLE = '[[table]]\nname = "t"\nmax_size = 9\n'


def read_curve(path: str) -> None:
    curve = LearningCurve(Path(path).parent)
    curve._file.path = Path(path)
    curve.start(100, ImpalaOptions())


HEADER = ",".join(COLUMNS) + "\r\n"
ROW = ",".join("1" for _ in COLUMNS) + "\r\n"
READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "job": (Job.from_toml, JOB),
    "tables": (read_tables, TABLE),
    "curve": (read_curve, HEADER + ROW),
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> tuple[Callable[[str], object], bytes]:
    read, text = READERS[request.param]
    return read, text.encode()


def test_bytes_that_are_no_text(
    reader: tuple[Callable[[str], object], bytes], tmp_path: Path
) -> None:
    read, text = reader
    path = tmp_path / "file.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text)  # with the mark that editors on Windows write
    read(str(path))
    line = len(text.splitlines()) + 1
    cases = [
        (text + b"#\xff\n", f"line {line} is not UTF-8"),
        (text + b"#\0\n", f"line {line} has a NUL byte"),
        (text.decode().encode("utf-16"), "line 1 is not UTF-8"),
    ]
    for data, error in cases:
        path.write_bytes(data)
        with pytest.raises(moolink.FileError, match=f"{path}: {error}"):
            read(str(path))


def test_what_is_no_file_of_text(
    reader: tuple[Callable[[str], object], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, _ = reader
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(files, "_PIPE_SECONDS", 0.1)
    with pytest.raises(moolink.FileError, match=f"{pipe}: is a pipe whose writer did not end"):
        read(str(pipe))
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read(str(tmp_path))
    with pytest.raises(moolink.FileError, match=r"/dev/zero: is larger than \d+ bytes"):
        read("/dev/zero")


def test_a_pipe_whose_writer_comes_later_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("w") as file:  # waits for the reader
            for line in TABLE.splitlines(keepends=True):
                file.write(line)
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [table.name for table in read_tables(str(pipe))] == ["t"]
    finally:
        writer.join()


def test_a_pipe_that_another_process_reads_first_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    read, taken = os.read, []

    def read_second(descriptor: int, length: int) -> bytes:
        if not taken:  # between the poll and the read
            taken.append(read(descriptor, length))
            with pytest.raises(BlockingIOError):
                read(descriptor, length)
            os.write(writing, b"second")
            os.close(writing)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return read(descriptor, length)

    monkeypatch.setattr(os, "read", read_second)
    os.write(writing, b"first")
    try:
        assert files.contents(reading, 100) == b"second"
        assert taken == [b"first"]
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("job", "", "there is no table"),
        ("job", JOB + "x", "at end of document|line 4"),
        ("job", JOB + "count = " + "9" * 5000, "digits"),
        ("job", "a = " + "[" * 5000, "nested too deeply"),
        ("job", JOB + "count = 0", "role 'a': count"),
        ("job", JOB + JOB, "two roles"),
        ("job", "role = 5", "there is no table"),
        ("tables", "", "expected one"),
        ("tables", "[[table]\n", "line 1"),
        ("tables", "table = [1]", "expected one"),
        ("tables", TABLE + TABLE, "two tables have the name 't'"),
        ("tables", TABLE + "sampler = [1]", "table 't': a selector"),
        ("tables", TABLE + 'sampler = {name = ["a"]}', "table 't': a selector"),
        ("tables", TABLE.replace("9", "1e3"), "table 't': max_size .* must be an int"),
        ("tables", TABLE.replace("9", "99999999999999999999"), "table 't': max_size must be"),
        ("curve", "", "line 1 .*expected the columns"),
        ("curve", "a,b\r\n", "line 1 .*expected the columns"),
        ("curve", HEADER + ROW + ROW.replace("1", "x"), "line 3 .*expected 13 numbers"),
        ("curve", HEADER + ROW + "1,2\r\n", "line 3 .*expected 13 numbers"),
        ("curve", HEADER + ROW[:-2] + ",1\r\n", "line 2 .*expected 13 numbers"),
        ("curve", HEADER + "1" * 200_000 + "\r\n", "line 2 .*expected 13 numbers"),
    ],
)
def test_text_of_another_meaning(kind: str, text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text(text, newline="")
    with pytest.raises(moolink.FileError, match=error) as caught:
        READERS[kind][0](str(path))
    assert str(path) in str(caught.value)


def test_a_row_that_a_killed_learner_began_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text(HEADER + ROW + ROW[:7], newline="")
    read_curve(str(path))
    assert path.read_text() == (HEADER + ROW).replace("\r\n", "\n")
