"""Rows of numbers during a job: a CSV file, and charts of TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moolink import files
from moolink.errors import FileError

_MOST_BYTES = 1 << 28


class RowFile:
    """A CSV file of numbers. A new name in a row adds a column.

    Args:
        path: of the file.
        what: a name for its content, with its article, for errors.
        key: the column that has an integer in each row; others may be empty.
        first: its first columns.
    """

    def __init__(self, path: Path, what: str, key: str, first: Sequence[str]) -> None:
        self.path = path
        self._what, self._key, self._first = what, key, tuple(first)
        self._columns = list(first)

    def read(self) -> list[dict[str, str]]:
        """The rows, without an unfinished one of a killed process; no rows if there is no file.

        Raises:
            moolink.FileError: it is not such a file.
        """
        if not self.path.exists():
            return []
        text = files.read_text(self.path, self._what, _MOST_BYTES)
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        columns = tuple(reader.fieldnames or ())
        if self._first != columns[: len(self._first)]:
            self._raise(1, f"the columns {', '.join(self._first)}")
        rows = []
        try:
            for row in reader:
                if not self._is_row(row):
                    self._raise(reader.line_num, f"{len(columns)} numbers")
                rows.append(row)
        except csv.Error:
            self._raise(len(rows) + 2, f"{len(columns)} numbers")
        return rows

    def rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all of it."""
        names = (name for row in rows for name in row)
        self._write(list(dict.fromkeys([*self._first, *names])), rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Columns for which it has no value stay empty."""
        if more := [name for name in row if name not in self._columns]:
            self._write([*self._columns, *more], self.read())
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _write(self, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        with files.written(self.path) as file:
            file.write(text.getvalue().encode())
        self._columns = columns  # once the file has them

    def _is_row(self, row: Mapping[str | None, Any]) -> bool:
        if None in row or None in row.values():  # too long, or too short
            return False
        try:
            int(row[self._key])
            for value in row.values():
                float(value or 0)
        except ValueError:
            return False
        return True

    def _raise(self, line: int, expected: str) -> NoReturn:
        raise FileError(
            f"{self.path}: line {line} does not belong to {self._what}: expected {expected}; move "
            "the file away, or mend the line",
            path=str(self.path),
        )


class Charts:
    """The rows for TensorBoard and Weights & Biases.

    Args:
        tensorboard: the folder of its files; None: none.
        wandb: the project of Weights & Biases; None: none.
        options: further ones of ``wandb.init``.
    """

    def __init__(self, tensorboard: Path | None, wandb: str | None, **options: Any) -> None:
        self._folder = tensorboard
        self._tensorboard: Any = None
        self._wandb: Any = None
        if wandb is not None:  # it may refuse, before anything is written
            import wandb as package

            self._wandb = package.init(project=wandb, **options)

    def show(self, x: int, row: Mapping[str, float | None]) -> None:
        """Adds the values that are not None, at position `x` of the x axis."""
        known = {name: value for name, value in row.items() if value is not None}
        if self._folder is not None and self._tensorboard is None:
            from tensorboard.summary import Writer  # only the leader needs it, for half a second

            self._tensorboard = Writer(str(self._folder))
        if self._tensorboard is not None:
            for name, value in known.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step=x)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(known, step=x)

    def close(self) -> None:
        """Ends the files and the run."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
