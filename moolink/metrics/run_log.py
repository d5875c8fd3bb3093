"""The log of a run: rows of numbers, as CSV and for TensorBoard and Weights & Biases."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from moolink import files
from moolink.internal.floats import float_of
from moolink.metrics.mean_parts import COUNT, is_part
from moolink.metrics.rows import Charts, RowFile

if TYPE_CHECKING:
    import os

    from moolink.accumulate.totals import Totals

_FIRST = ("seconds", "version")

Row = dict[str, float | int | None]


class RunLog:
    """Rows of numbers, in ``log.csv`` of a folder, and on request elsewhere. ``step.log()`` of a
    training loop writes them at the leader.

    If the folder has a log, it goes on: rows of the row's version and later ones, which belong to
    a job that was begun anew or resumed from an earlier checkpoint, are removed. The seconds go on
    from the last row, and so do the means, for which ``.log.sums`` is kept beside the log.

    Args:
        folder: is made if need be.
        tensorboard: whether TensorBoard's files are written into ``folder``, too.
        wandb: the project of Weights & Biases that gets the rows, too.
        x: the counter that is the x axis there; None: the model's version.

    Raises:
        ModuleNotFoundError: the package that ``tensorboard`` or ``wandb`` needs is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tensorboard: bool = False,
        wandb: str | None = None,
        x: str | None = None,
    ) -> None:
        self.path = Path(folder) / "log.csv"
        self._file = RowFile(self.path, "a log of a training loop", "version", _FIRST)
        if tensorboard:
            _require("tensorboard", "tensorboard=True")
        if wandb is not None:
            _require("wandb", f"wandb={wandb!r}")
        self._wants_tensorboard, self._project, self._x = tensorboard, wandb, x
        self._sums = Path(folder) / ".log.sums"  # the parts of means at each row, a line each
        self._written: tuple[int, int] | None = None  # the file as the last row left it
        self._made = time.monotonic()
        self._started = self._made  # when `seconds` was 0
        self._before: dict[str, int] = {}  # the parts of means at the row before
        self._charts: Charts | None = None

    def write(
        self,
        version: int,
        totals: Totals,
        values: Mapping[str, SupportsFloat | None] | None = None,
    ) -> None:
        """Writes a row: seconds, version, totals, means over the rounds since the row before, and
        values, which may be None.

        The row before may be another leader's, or of the job that this one resumes.

        Raises:
            ValueError: two columns have one name, such as that of a counter and of a value.
            moolink.FileError: ``log.csv`` is there, and is no such log.
            OSError: it cannot be written.
        """
        given = {
            name: None if value is None else float_of(value)
            for name, value in (values or {}).items()
        }
        _check_names(totals, given)
        if self._charts is None or self._written is None or self._written != self._found():
            self._begin(version)  # another leader may have written since
        row: Row = {"seconds": round(time.monotonic() - self._started, 3), "version": version}
        row |= totals.counters()
        row |= totals.means(self._before)
        row |= given
        self._file.append(row)
        self._before = {name: value for name, value in totals.items() if is_part(name)}
        with self._sums.open("a") as file:
            file.write(json.dumps([version, self._before]) + "\n")
        self._written = self._found()
        assert self._charts is not None
        shown = {name: value for name, value in row.items() if name != self._x}
        self._charts.show(version if self._x is None else totals[self._x], shown)

    def close(self) -> None:
        """Ends the files of TensorBoard and the run of Weights & Biases."""
        if self._charts is not None:
            self._charts.close()
        self._charts = None

    def _begin(self, version: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._file.read() if int(row["version"]) < version]
        since = self._since_last_row()
        self._file.rewrite(rows)
        seconds = float(rows[-1]["seconds"]) if rows else 0.0
        self._started = (time.monotonic() - since if rows else self._made) - seconds
        self._keep_sums({int(row["version"]) for row in rows})
        if self._charts is None:
            folder = self.path.parent
            self._charts = Charts(
                folder if self._wants_tensorboard else None, self._project, dir=str(folder)
            )

    def _since_last_row(self) -> float:
        """Seconds since the file's last row, as far as this log was there: a job that is resumed
        does not count the time in between."""
        age = time.monotonic() - self._made
        if not self.path.exists():
            return age
        return min(age, max(0.0, time.time() - self.path.stat().st_mtime))

    def _keep_sums(self, versions: set[int]) -> None:
        """Keeps the lines of these rows, and takes those parts of means that the last one has."""
        self._before = {}
        kept = []
        text = self._sums.read_text(errors="replace") if self._sums.exists() else ""
        for line in text.splitlines(keepends=True):
            # A process that was killed may have left a part of a line.
            with contextlib.suppress(ValueError, TypeError):
                version, sums = json.loads(line)
                if version in versions:
                    kept.append(line)
                    if version == max(versions):
                        self._before = {name: int(value) for name, value in dict(sums).items()}
        with files.written(self._sums) as file:
            file.write("".join(kept).encode())

    def _found(self) -> tuple[int, int] | None:
        """Tells whether the file has changed; None: there is none."""
        if not self.path.exists():
            return None
        found = self.path.stat()
        return found.st_ino, found.st_size


def _check_names(totals: Totals, given: Mapping[str, float | None]) -> None:
    means = (name.removesuffix(COUNT) for name in totals if name.endswith(COUNT))
    names = collections.Counter([*_FIRST, *totals.counters(), *means, *given])
    if twice := [name for name, number in names.items() if number > 1]:
        raise ValueError(
            f"a row has one column {twice[0]!r}: name counters, means and values of step.log() "
            f"differently from each other, and not {' or '.join(map(repr, _FIRST))}"
        )


def _require(package: str, option: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{option} needs the package {package}: pip install {package}", name=package
        )
