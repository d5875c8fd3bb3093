"""The learning curve: a CSV file that grows as the job goes, a picture of it, and the same rows for
TensorBoard and Weights & Biases."""

from __future__ import annotations

import csv
import importlib.util
import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import moolink
from examples.common.options import OptionError, Options
from moolink import files

_MOST_BYTES = 1 << 28

COLUMNS = (
    "seconds",  # since the run began, without the time between its jobs
    "steps",  # of the whole group's environments that were learned from
    "updates",  # rounds applied, which is the model's version
    "episodes",  # that `mean_return` is the mean of
    "mean_return",
    "steps_per_second",  # of the whole group, since the row before, or since it began to learn
    "cpu_seconds",  # of this peer
    "contributors",  # fewest peers in any round since the row before
    "batch_size",  # of the last round
    "learning_rate",
    "gradient_norm",
    "loss",
    "entropy",
)


class LearningCurve:
    """`learning_curve.csv`, `learning_curve.png` and `tensorboard/` in a directory."""

    def __init__(self, directory: Path) -> None:
        self.csv_path = directory / "learning_curve.csv"
        self.png_path = directory / "learning_curve.png"
        self._events = directory / "tensorboard"
        self._tensorboard: Any = None
        self._wandb: Any = None

    def start(self, from_step: int, options: Options) -> None:
        """Makes the files ready for rows after `from_step`; earlier rows of the same job stay.

        Rows after it belong to a job that was not resumed, or that went on after its checkpoint.
        Raises moolink.FileError if the file there is not such a curve.
        """
        # A process that gets a signal has little time: too little to import this then.
        threading.Thread(target=_figure, name="imports matplotlib", daemon=True).start()
        if options.wandb_project is not None:  # first: if it refuses, the files are as they were
            self._wandb = _wandb().init(
                project=options.wandb_project,
                dir=str(self.csv_path.parent),
                config=options.as_dict(),
            )
        self.csv_path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._rows() if int(row["steps"]) <= from_step] if from_step else []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
        with files.written(self.csv_path) as file:
            file.write(text.getvalue().encode())
        # Imported here: only the leader needs it, and it takes half a second.
        from tensorboard.summary import Writer

        self._tensorboard = Writer(str(self._events))

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; values without a column go to TensorBoard only."""
        with self.csv_path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow(row)
        known = {name: value for name, value in row.items() if value is not None}
        if self._tensorboard is not None:
            for name, value in known.items():
                self._tensorboard.add_scalar(name, value, step=row["steps"])
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(known, step=row["steps"])

    def close(self) -> None:
        """Ends the files of TensorBoard and Weights & Biases."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def plot(self, title: str) -> None:
        """Draws the mean return over the steps, as far as any episode has ended."""
        rows = [row for row in self._rows() if row["mean_return"]]
        figure = _figure()
        axes = figure.add_subplot()
        axes.plot(
            [int(row["steps"]) / 1e6 for row in rows],
            [float(row["mean_return"]) for row in rows],
        )
        axes.set(title=title, xlabel="million steps", ylabel="mean return of 100 episodes")
        axes.grid(alpha=0.3)
        with files.written(self.png_path) as file:
            figure.savefig(file, dpi=120, format="png")

    def _rows(self) -> list[dict[str, str]]:
        if not self.csv_path.exists():
            return []
        text = files.read_text(self.csv_path, "a learning curve", _MOST_BYTES)
        whole = text[: text.rfind("\n") + 1]  # without a row that a killed process left unfinished
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        if tuple(reader.fieldnames or ()) != COLUMNS:
            self._raise(1, f"the columns {', '.join(COLUMNS)}")
        rows = []
        try:
            for row in reader:
                if not _is_row(row):
                    self._raise(reader.line_num, f"{len(COLUMNS)} numbers")
                rows.append(row)
        except csv.Error:
            self._raise(len(rows) + 2, f"{len(COLUMNS)} numbers")
        return rows

    def _raise(self, line: int, expected: str) -> NoReturn:
        raise moolink.FileError(
            f"{self.csv_path}: line {line} is not of a learning curve of this program: expected "
            f"{expected}; move the file away, or mend the line",
            path=str(self.csv_path),
        )


def _is_row(row: Mapping[str | None, Any]) -> bool:
    """Whether a row has a number in each column; all but the steps may be empty."""
    if set(row) != set(COLUMNS) or None in row.values():
        return False
    try:
        int(row["steps"])
        for value in row.values():
            float(value or 0)
    except ValueError:
        return False
    return True


def _figure() -> Any:
    # Imported here: it costs half a second and 50 MB, and only the leader needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check(options: Options) -> None:
    """Raises OptionError if the package that the options ask for is not installed."""
    if options.wandb_project is not None:
        _wandb()


def _wandb() -> Any:
    if importlib.util.find_spec("wandb") is None:
        raise OptionError("--wandb-project needs Weights & Biases: pip install wandb")
    import wandb

    return wandb
