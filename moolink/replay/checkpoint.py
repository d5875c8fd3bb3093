"""A replay in a file: a header, then arrays as they lie in memory.

The header is a value in the wire's codec (no pickle): the tables' options and states, the layouts
of stores, the patterns of items, and the sizes of the arrays that follow.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.replay.layout import step_bytes
from moolink.replay.options import Table

if TYPE_CHECKING:
    from moolink.replay.tables import Tables

_MAGIC = b"moolink replay 1\n"
_LENGTH = 8  # bytes of the header's length
_AT_ONCE = 64 << 20  # bytes of steps that are read or written together


def save(replay: Tables, path: str) -> None:
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
        with _replacing(path) as file:
            _write_header(file, header)
            for state in tables:
                for array in state.values():
                    file.write(array.data)
            for layout, used in stores:
                file.write(used.data)
                for column in range(len(layout.columns)):
                    for part in _parts(used, layout.columns[column]):
                        file.write(replay.core.read(layout.store, column, part).data)
    finally:
        for layout, used in stores:
            replay.core.release(layout.store, used)


def load(replay: Tables, path: str) -> None:
    """Fills a new replay from `path`.

    Raises:
        ValueError: it is no checkpoint, or one of other tables.
    """
    with open(path, "rb") as file:
        header = _read_header(file, path)
        _require_same(
            [table.options for table in replay.opened],
            [table["options"] for table in header["tables"]],
            path,
        )
        states = [
            {name: _read(file, *kind) for name, kind in table["state"].items()}
            for table in header["tables"]
        ]
        restored = [_load_store(replay, file, store) for store in header["stores"]]
        try:
            for table, saved in zip(replay.opened, header["tables"], strict=True):
                table.skeleton, table.framework = saved["skeleton"], saved["framework"]
            replay.patterns = [
                {**pattern, "store": restored[pattern["store"]][0]}
                for pattern in header["patterns"]
            ]
            for table, state in zip(replay.opened, states, strict=True):
                _map_rows(state, header["patterns"], restored)
                replay.core.restore(table.index, state)
        finally:
            for store, _, rows in restored:
                replay.core.release(store, rows)


_Restored = tuple[int, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]  # store, saved and new rows


def _load_store(replay: Tables, file: BinaryIO, store: dict[str, Any]) -> _Restored:
    columns = [(name, dtype, tuple(shape)) for name, dtype, shape in store["columns"]]
    layout = replay.add_layout(store["skeleton"], columns, store["framework"])
    saved = _read(file, "uint32", store["steps"])
    rows = replay.core.take(layout.store, len(saved))
    for column, of in enumerate(columns):
        for part in _parts(rows, of):
            size = len(part) * step_bytes(of)
            replay.core.write(layout.store, column, part, _read(file, "uint8", size))
    return layout.store, saved, rows


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


def _parts(
    rows: npt.NDArray[np.uint32], column: tuple[str, str, tuple[int, ...]]
) -> Iterator[npt.NDArray[np.uint32]]:
    size = max(1, _AT_ONCE // max(1, step_bytes(column)))
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


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
        raise ValueError(f"{path} is of another configuration: {'; '.join(differences)}")


def _kind(array: npt.NDArray[Any]) -> tuple[str, int]:
    return array.dtype.name, len(array)


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    body, _ = _core.encode(header)
    file.write(_MAGIC + len(body).to_bytes(_LENGTH, "little") + body)


def _read_header(file: BinaryIO, path: str) -> Any:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError(f"{path} is no checkpoint of a replay")
    length = int.from_bytes(file.read(_LENGTH), "little")
    body = file.read(length)
    if len(body) != length:
        raise ValueError(f"{path} ends in the middle")
    return _core.decode(body, [])


def _read(file: BinaryIO, dtype: str, count: int) -> npt.NDArray[Any]:
    array = np.empty(count, dtype)
    if file.readinto(array.data.cast("B")) != array.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{file.name} ends in the middle")
    return array


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when it is whole and on the disk."""
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(
        dir=folder, prefix=f".{os.path.basename(path)}.", delete=False
    ) as file:
        try:
            yield file  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
