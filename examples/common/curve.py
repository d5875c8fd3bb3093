"""The learning curve: a CSV file that grows as the job goes, a picture of it, and the same rows for
TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.common.options import OptionError, Options
from moolink import files
from moolink.metrics.rows import Charts, RowFile

COLUMNS = (  # the first columns; further metrics follow
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
        self._file = RowFile(self.csv_path, "a learning curve of this program", "steps", COLUMNS)
        self._charts: Charts | None = None

    def start(self, from_step: int, options: Options) -> None:
        """Makes the files ready for rows after `from_step`; earlier rows of the same job stay.

        Rows after it belong to a job that was not resumed, or that went on after its checkpoint.
        Raises moolink.FileError if the file there is not such a curve.
        """
        # A process that gets a signal has little time: too little to import this then.
        threading.Thread(target=_figure, name="imports matplotlib", daemon=True).start()
        check(options)
        folder = self.csv_path.parent
        self._charts = Charts(  # first: if it refuses, the file is as it was
            self._events, options.wandb_project, dir=str(folder), config=options.as_dict()
        )
        folder.mkdir(parents=True, exist_ok=True)
        rows = self._file.read() if from_step else []
        self._file.rewrite([row for row in rows if int(row["steps"]) <= from_step])

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; a value with a new name gets a new last column."""
        self._file.append(row)
        if self._charts is not None:
            self._charts.show(row["steps"], row)

    def close(self) -> None:
        """Ends the files of TensorBoard and Weights & Biases."""
        if self._charts is not None:
            self._charts.close()

    def plot(self, title: str) -> None:
        """Draws the mean return over the steps, as far as any episode has ended."""
        rows = [row for row in self._file.read() if row["mean_return"]]
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


def _figure() -> Any:
    # Imported here: it costs half a second and 50 MB, and only the leader needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check(options: Options) -> None:
    """Raises OptionError if the package that the options ask for is not installed."""
    if options.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise OptionError("--wandb-project needs Weights & Biases: pip install wandb")
