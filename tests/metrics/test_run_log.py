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
    log.close()  # a second loop may go on with it
    log.write(2, totals(128, 1.0, 5.0), {"loss": 0.5, "rate": None})
    log.close()
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
    with pytest.raises(moolink.FileError, match="does not belong to a log of a training loop"):
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
    noted = sys.modules.pop("wandb").rows  # monkeypatch would put it back for other tests
    assert noted[0] == {"project": "mine", "dir": str(tmp_path / "run")}
    step, row = noted[1]
    assert (step, row["steps"], row["return"], row["loss"]) == (7, 64, 2.0, 0.5)
    assert noted[2] == "finished"


def test_another_leader_goes_on_from_the_last_row(tmp_path: Path) -> None:
    """Two members' logs of one folder, the second of which is older than its first row."""
    first, second = RunLog(tmp_path), RunLog(tmp_path)
    for log in (first, second):
        log._made -= 1000.0
        log._started -= 1000.0
    first.write(1, totals(1, 1.0))
    second.write(2, totals(2, 1.0, 5.0))
    second.write(3, totals(3, 1.0, 5.0, 6.0), {"rate": 0.5})
    first.write(4, totals(4, 1.0, 5.0, 6.0, 8.0), {"other": 2.0})
    found = rows(first)
    assert [row["return"] for row in found] == ["1.0", "5.0", "6.0", "8.0"]
    assert [row["rate"] for row in found] == ["", "", "0.5", ""]
    assert found[3]["other"] == "2.0"
    seconds = [float(row["seconds"]) for row in found]
    assert seconds == sorted(seconds)
    assert 1000.0 <= seconds[0] <= seconds[-1] < 1900.0


def test_the_means_of_a_resumed_run_are_since_the_last_row_that_stays(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(1, totals(1, 1.0))
    log.write(2, totals(2, 1.0, 5.0))
    log.write(4, totals(4, 1.0, 5.0, 9.0))
    with (tmp_path / ".log.sums").open("a") as file:
        file.write("[5, {")  # of a process that was killed
    again = RunLog(tmp_path)
    again.write(3, totals(3, 1.0, 5.0, 7.0))  # from a checkpoint of version 2
    again.write(4, totals(4, 1.0, 5.0, 7.0, 8.0))
    assert [row["return"] for row in rows(again)] == ["1.0", "5.0", "7.0", "8.0"]


@pytest.mark.parametrize("name", ["seconds", "version", "steps", "return"])
def test_a_column_has_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match=f"a row has one column {name!r}"):
        log.write(1, totals(1, 1.0), {name: 1.0})
    with pytest.raises(ValueError, match="a row has one column 'version'"):
        log.write(1, Totals({"version": 1}))
    assert not log.path.exists()
