"""Real launchers of others: their processes find their place and one another with nothing set."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = 100.0  # only bounds a hang

pytestmark = pytest.mark.timeout(LONG + 20)

needs_torchrun = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun not found: install openmpi-bin"
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
IMPALA = [
    *("-m", "examples.torch.impala", "--env-id", "CartPole-v1", "--total-steps", "2000"),
    *("--torch-threads", "1", "--save-dir"),
]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # The tests' own token is found by XDG_CONFIG_HOME, which they inherit.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOOLINK_")}
    options = {"cwd": ROOT, "env": environment, "timeout": LONG}
    return subprocess.run(command, **options, capture_output=True, text=True, check=False)


def meetings(output: str) -> list[str]:
    """What the processes printed, sorted: launchers may put two lines into one."""
    return sorted(re.findall(r"(?:torchrun|mpirun) \d \d \d", output))


@needs_torchrun
@pytest.mark.parametrize("options", [["--standalone"], ["--master-port", "29637"]])
def test_torchrun(options: list[str]) -> None:
    done = run([*TORCHRUN, *options, "-m", "tests.launch.meets"])
    assert done.returncode == 0, done.stderr
    assert meetings(done.stdout) == ["torchrun 0 2 3", "torchrun 1 2 3"]


@needs_torchrun
def test_torchrun_that_restarts_its_processes(tmp_path: Path) -> None:
    done = run(
        [*TORCHRUN, "--standalone", "--max-restarts", "1", "-m", "tests.launch.meets", "fail"]
    )
    assert done.returncode == 0, done.stderr
    assert {"torchrun 0 2 3", "torchrun 1 2 3"} <= set(meetings(done.stdout))


@needs_mpirun
def test_mpirun() -> None:
    done = run([*MPIRUN, "-m", "tests.launch.meets"])
    assert done.returncode == 0, done.stderr
    assert meetings(done.stdout) == ["mpirun 0 2 3", "mpirun 1 2 3"]


@needs_torchrun
@pytest.mark.parametrize(
    "launcher",
    [[*TORCHRUN, "--standalone"], pytest.param(MPIRUN, marks=needs_mpirun)],
    ids=["torchrun", "mpirun"],
)
def test_the_example_needs_nothing_else(launcher: list[str], tmp_path: Path) -> None:
    done = run([*launcher, *IMPALA, str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "learning_curve.csv").exists()
