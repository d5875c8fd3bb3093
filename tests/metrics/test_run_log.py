"""The log that training loops write at the leader."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

import moolink
from moolink.accumulate import Totals
from moolink.accumulate.totals import with_means
from moolink.metrics import RunLog


def totals(steps: int, *returns: float) -> Totals:
    return Totals(with_means({"steps": steps}, {"return": returns}))


def rows(log: RunLog) -> list[dict[str, str]]:
    with log.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_totals_means_since_the_row_before_and_values(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    log.write(1, totals(64, 1.0))
    log.write(2, totals(128, 1.0, 5.0), {"loss": 0.5, "rate": None})
    first, second = rows(log)
    assert float(first.pop("seconds")) <= float(second.pop("seconds"))
    assert first == {"version": "1", "steps": "64", "return": "1.0", "loss": "", "rate": ""}
    assert second == {"version": "2", "steps": "128", "return": "5.0", "loss": "0.5", "rate": ""}


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        RunLog(tmp_path).write(version, totals(10 * version))
    log = RunLog(tmp_path)
    with log.path.open("a") as file:
        file.write("1.5,4,")  # of a process that was killed
    log.write(3, totals(33))
    assert [(row["version"], row["steps"]) for row in rows(log)] == [
        ("1", "10"),
        ("2", "20"),
        ("3", "33"),
    ]
    assert float(rows(log)[2]["seconds"]) >= float(rows(log)[1]["seconds"])
    anew = RunLog(tmp_path)
    anew.write(0, totals(0))
    assert len(rows(anew)) == 1


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(moolink.FileError, match="is no log of a training loop"):
        RunLog(tmp_path).write(0, totals(0))
    assert (tmp_path / "log.csv").read_text() == "a,b\n1,2\n"


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"tensorboard=True needs .* pip install tensorb"):
        RunLog(tmp_path, tensorboard=True)
    with pytest.raises(ModuleNotFoundError, match="wandb='mine' needs the package wandb"):
        RunLog(tmp_path, wandb="mine")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, tensorboard=True, x="steps")
    log.write(1, totals(64, 2.0), {"loss": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = {
        name: (event.step, event.tensor_proto.float_val[0])
        for name in events.Tags()["tensors"]
        for event in events.Tensors(name)
    }
    assert written["return"] == (64, 2.0)
    assert written["loss"] == (64, 0.5)


WANDB = """
rows = []

def init(**options):
    rows.append(options)
    return __import__(__name__)

def log(row, step):
    rows.append((step, row))

def finish():
    rows.append("finished")
"""


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package that only notes what it is given."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    log = RunLog(tmp_path / "run", wandb="mine")
    log.write(7, totals(64, 2.0), {"loss": 0.5})
    log.close()
    noted = sys.modules["wandb"].rows
    monkeypatch.delitem(sys.modules, "wandb")
    assert noted[0] == {"project": "mine", "dir": str(tmp_path / "run")}
    step, row = noted[1]
    assert (step, row["steps"], row["return"], row["loss"]) == (7, 64, 2.0, 0.5)
    assert noted[2] == "finished"
