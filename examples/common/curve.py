"""The learning curve: a CSV file that grows as the job goes, and a picture of it."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

COLUMNS = (
    "seconds",  # since this peer began
    "steps",  # agent steps of the whole group that were learned from
    "frames",
    "updates",  # rounds applied, which is the model's version
    "episodes",  # games that `mean_return` is the mean of
    "mean_return",
    "steps_per_second",  # of the whole group, since the row before
    "cpu_seconds",  # of this peer
    "contributors",  # fewest peers in any round since the row before
    "batch_size",  # environments in the last round
    "learning_rate",
    "gradient_norm",
    "loss",
    "entropy",
)


class LearningCurve:
    """`learning_curve.csv` and `learning_curve.png` in a directory."""

    def __init__(self, directory: Path) -> None:
        self.csv_path = directory / "learning_curve.csv"
        self.png_path = directory / "learning_curve.png"

    def start(self, from_step: int) -> None:
        """Makes the file ready for rows after `from_step`; earlier rows of the same job stay.

        Raises OSError if the file there is not such a curve.

        Rows after it belong to a job that was not resumed, or that went on after its checkpoint.
        """
        self.csv_path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._rows() if int(row["steps"]) <= from_step] if from_step else []
        temporary = self.csv_path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.csv_path)

    def append(self, row: Mapping[str, object]) -> None:
        with self.csv_path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)

    def plot(self, title: str) -> None:
        """Draws the mean return over the steps, as far as any game has ended."""
        rows = [row for row in self._rows() if row["mean_return"]]
        # Imported here: it costs half a second and 50 MB, and only the leader needs it.
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(
            [int(row["steps"]) / 1e6 for row in rows],
            [float(row["mean_return"]) for row in rows],
        )
        axes.set(title=title, xlabel="million agent steps", ylabel="mean return of 100 games")
        axes.grid(alpha=0.3)
        temporary = self.png_path.with_suffix(".tmp.png")
        figure.savefig(temporary, dpi=120)
        pyplot.close(figure)
        os.replace(temporary, self.png_path)

    def _rows(self) -> list[dict[str, str]]:
        if not self.csv_path.exists():
            return []
        with self.csv_path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or COLUMNS) != COLUMNS:
                raise OSError(f"{self.csv_path} is not a learning curve of this program")
            return [row for row in reader if None not in row.values()]
