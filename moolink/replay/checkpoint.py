"""A replay in a file: a header, then arrays as they lie in memory.

The file begins with a line of text, ``moolink replay VERSION``, then the lengths of the header and
of the file, and a checksum of all these. The header is a value in the wire's codec (no pickle): the
tables' options and states, the layouts of stores, the patterns of items, and the sizes of the
arrays that follow. A checksum (CRC-32C) follows the lengths, the header and each part of an array.
It covers all bytes before it except the checksums. Integers are little-endian.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moolink import _core, files
from moolink.errors import Error, FileError
from moolink.replay.layout import step_bytes
from moolink.replay.options import Table

if TYPE_CHECKING:
    from moolink.replay.tables import Tables

_VERSION = 2
_FIRST_LINE = re.compile(rb"moolink replay (\d{1,9})\n")
_LENGTH = 8  # bytes of a length
_SUM = 4  # bytes of a checksum
_AT_ONCE = 64 << 20  # bytes of steps that are read or written together

_Column = tuple[str, str, tuple[int, ...]]  # name, dtype and shape


def previous_of(path: str) -> str:
    """The name of the checkpoint before the one at `path`."""
    return path + ".previous"


def save(replay: Tables, path: str, keep_previous: bool) -> None:
    """Writes a replay to `path`, whose former content stays until the new one is whole."""
    tables, rows = replay.core.snapshot()
    stores = list(zip(replay.layouts, rows, strict=False))
    try:
        header = {
            "tables": [
                {
                    "options": table.options.describe(),
                    "skeleton": table.skeleton,
                    "framework": table.framework,
                    "state": {name: _kind(array) for name, array in state.items()},
                }
                for table, state in zip(replay.opened, tables, strict=True)
            ],
            "stores": [
                {
                    "skeleton": layout.skeleton,
                    "columns": layout.columns,
                    "framework": layout.framework,
                    "steps": len(used),
                }
                for layout, used in stores
            ],
            "patterns": replay.patterns,
        }
        previous = os.path.basename(previous_of(path)) if keep_previous else None
        # Steps may be private to the user.
        with files.written(path, mode=0o600, previous=previous) as file:
            writer = _Writer(file)
            writer.header(header)
            for state in tables:
                for array in state.values():
                    writer.put(array)
            for layout, used in stores:
                writer.put(used)
                for number, column in enumerate(layout.columns):
                    for part in _parts(used, column):
                        writer.put(replay.core.read(layout.store, number, part))
    finally:
        for layout, used in stores:
            replay.core.release(layout.store, used)


def load(replay: Tables, path: str) -> None:
    """Fills a new replay from `path`.

    Raises:
        FileError: it is no checkpoint, is damaged, or is one of other tables.
        OSError: it cannot be read.
    """
    with files.open_data(path) as file:
        reader = _Reader(file, path)
        header = reader.header()
        try:
            _require_same(
                [table.options for table in replay.opened],
                [table["options"] for table in header["tables"]],
                path,
            )
            _load_all(replay, reader, header)
        except FileError:
            raise
        except (Error, LookupError, OverflowError, TypeError, ValueError) as error:
            # The checksums are right: another program has written it.
            raise _damaged(path, f"its parts contradict one another ({error})") from error


def _load_all(replay: Tables, reader: _Reader, header: dict[str, Any]) -> None:
    if reader.at + _body_size(header) != reader.size:
        raise ValueError("the arrays of the header have another size")
    states = [
        {
            name: reader.array(f"{name} of table {table['options']['name']!r}", *kind)
            for name, kind in table["state"].items()
        }
        for table in header["tables"]
    ]
    restored: list[_Restored] = []
    try:
        for store in header["stores"]:
            _load_store(replay, reader, store, restored)
        for table, saved in zip(replay.opened, header["tables"], strict=True):
            table.skeleton, table.framework = saved["skeleton"], saved["framework"]
        replay.patterns = [
            {**pattern, "store": restored[pattern["store"]][0]} for pattern in header["patterns"]
        ]
        for table, state in zip(replay.opened, states, strict=True):
            _map_rows(state, header["patterns"], restored)
            replay.core.restore(table.index, state)
    finally:
        for number, _, rows in restored:
            replay.core.release(number, rows)


_Restored = tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]  # store, saved and new rows


def _load_store(
    replay: Tables, reader: _Reader, store: dict[str, Any], restored: list[_Restored]
) -> None:
    columns = _columns(store)
    layout = replay.add_layout(store["skeleton"], columns, store["framework"])
    saved = reader.array("the numbers of steps", "uint32", store["steps"])
    rows = replay.core.take(layout.store, len(saved))
    restored.append((layout.store, saved, rows))
    for number, column in enumerate(columns):
        for part in _parts(rows, column):
            size = len(part) * step_bytes(column)
            array = reader.array(f"{column[0]!r} of {len(part)} steps", "uint8", size)
            replay.core.write(layout.store, number, part, array)


def _map_rows(
    state: dict[str, npt.NDArray[Any]], patterns: list[dict[str, Any]], restored: list[_Restored]
) -> None:
    """Puts the new rows in the place of those that were saved."""
    if not len(state["patterns"]):
        return
    # All items of a table are made of one store's steps.
    _, saved, rows = restored[patterns[int(state["patterns"][0])]["store"]]
    places = np.searchsorted(saved, state["rows"])
    if places.max() >= len(saved) or (saved[places] != state["rows"]).any():
        raise ValueError("an item of the checkpoint is made of steps that it does not have")
    state["rows"] = rows[places]


def _columns(store: Mapping[str, Any]) -> list[_Column]:
    return [(name, dtype, tuple(shape)) for name, dtype, shape in store["columns"]]


def _at_once(column: _Column) -> int:
    return max(1, _AT_ONCE // max(1, step_bytes(column)))


def _parts(rows: npt.NDArray[np.uint32], column: _Column) -> Iterator[npt.NDArray[np.uint32]]:
    size = _at_once(column)
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def _body_size(header: Mapping[str, Any]) -> int:
    """The bytes of all arrays of a header, with their checksums."""
    size = 0
    for table in header["tables"]:
        for dtype, count in table["state"].values():
            size += np.dtype(dtype).itemsize * count + _SUM
    for store in header["stores"]:
        steps = store["steps"]
        size += np.dtype(np.uint32).itemsize * steps + _SUM
        for column in _columns(store):
            parts = -(-steps // _at_once(column))
            size += steps * step_bytes(column) + parts * _SUM
    return size


def _require_same(tables: list[Table], saved: list[dict[str, Any]], path: str) -> None:
    differences = []
    now = {table.name: table.describe() for table in tables}
    then = {options["name"]: options for options in saved}
    for name in sorted(now.keys() | then.keys()):
        if name not in now or name not in then:
            where = "only in the checkpoint" if name in then else "not in the checkpoint"
            differences.append(f"table {name!r} is {where}")
            continue
        differences += [
            f"{option} of table {name!r} is {now[name][option]}, in the checkpoint {value}"
            for option, value in then[name].items()
            if now[name][option] != value
        ]
    if not differences and list(now) != list(then):
        differences.append(f"the tables' order is {list(now)}, in the checkpoint {list(then)}")
    if differences:
        raise FileError(
            f"{path} is of another configuration: {'; '.join(differences)}; give the tables with "
            "the checkpoint's options, or another file",
            path=path,
        )


def _kind(array: npt.NDArray[Any]) -> tuple[str, int]:
    return array.dtype.name, len(array)


class _Writer:
    """Writes parts with their checksums."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sum = file, 0

    def header(self, header: dict[str, Any]) -> None:
        body, _ = _core.encode(header)
        first = f"moolink replay {_VERSION}\n".encode()
        size = len(first) + 2 * _LENGTH + _SUM + len(body) + _SUM + _body_size(header)
        lengths = (length.to_bytes(_LENGTH, "little") for length in (len(body), size))
        for part in (first + b"".join(lengths), body):
            self.put(np.frombuffer(part, np.uint8))

    def put(self, array: npt.NDArray[Any]) -> None:
        data = array.view(np.uint8)
        self._sum = _core.crc32c(data, self._sum)
        self._file.write(data.data)
        self._file.write(self._sum.to_bytes(_SUM, "little"))


class _Reader:
    """Reads a checkpoint from its beginning to its end.

    Attributes:
        size: bytes of the file.
        at: bytes that have been read.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self._sum = 0

    def header(self) -> Any:
        """The header, after a check of the file's length."""
        with files.naming(self._path):
            first = self._file.readline(32)
        found = _FIRST_LINE.fullmatch(first)
        if found is None:
            raise _damaged(self._path, f"is no checkpoint of a replay ({self.size} bytes)")
        if (version := int(found[1])) != _VERSION:
            what = f"is of version {version}, and this moolink reads version {_VERSION} only"
            raise _damaged(self._path, what)
        self.at = len(first)
        self._sum = _core.crc32c(first)
        lengths = self._bytes("the lengths", 2 * _LENGTH)
        header, size = (int.from_bytes(lengths[i : i + _LENGTH], "little") for i in (0, _LENGTH))
        if self.size < size:
            raise _damaged(self._path, f"is cut off after {self.size} of {size} bytes")
        if self.size > size:
            what = f"has {self.size} bytes, which is {self.size - size} more than it should have"
            raise _damaged(self._path, what)
        body = self._bytes("the header", header)
        try:
            return _core.decode(body, [])
        except (Error, ValueError, TypeError) as error:
            raise _damaged(self._path, f"its header is not understood ({error})") from error

    def array(self, name: str, dtype: str, count: int) -> npt.NDArray[Any]:
        """The next part. The caller has compared the sizes of all parts with the file's."""
        array = np.empty(count, dtype)
        data = array.view(np.uint8)
        with files.naming(self._path):
            read = self._file.readinto(data.data)  # type: ignore[attr-defined]
        self._check(name, data, read)
        return array

    def _bytes(self, name: str, length: int) -> bytes:
        if self.at + length + _SUM > self.size:
            raise _damaged(self._path, f"is cut off in {name}, after {self.size} bytes")
        with files.naming(self._path):
            data = self._file.read(length)
        self._check(name, np.frombuffer(data, np.uint8), len(data))
        return data

    def _check(self, name: str, data: npt.NDArray[np.uint8], read: int) -> None:
        """Compares what was read of a part with the checksum after it."""
        with files.naming(self._path):
            saved = self._file.read(_SUM)
        if read != len(data) or len(saved) != _SUM:
            raise _damaged(self._path, f"was cut off in {name} while it was read")
        self._sum = _core.crc32c(data, self._sum)
        if int.from_bytes(saved, "little") != self._sum:
            what = f"is damaged: the checksum of {name} (from byte {self.at}) is wrong"
            raise _damaged(self._path, what)
        self.at += len(data) + _SUM


def _damaged(path: str, what: str) -> FileError:
    previous: str | None = previous_of(path)
    if os.path.exists(previous_of(path)):
        remedy = f"the previous checkpoint is {previous}: restore it, or rename it to {path}"
    else:
        remedy = (
            f"there is no previous checkpoint {previous} (keep_previous=True keeps one): restore "
            "another file, or begin with empty tables"
        )
        previous = None
    return FileError(f"{path} {what}; {remedy}", path=path, previous=previous)
