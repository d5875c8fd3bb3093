"""`moolink launch --slurm` with a program in place of srun, which runs the processes here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moolink.launch.slurm import options_of

LONG = 60.0  # only bounds a hang
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
# Srun says that the node failed, and does not end.
WAITS = f"""#!/bin/sh
echo "srun: error: Node failure on n3" >&2
exec {sys.executable} -c 'import time; time.sleep(600)'
"""
TAKES_LONG = """
import sys, time
print("again, after a node failure", file=sys.stderr, flush=True)
time.sleep(3)  # longer than a node that has failed is waited for
print("done", flush=True)
"""


def launch(folder: Path, srun: str, *roles: str) -> subprocess.CompletedProcess[str]:
    """Runs a job; what scancel is asked is in the file "cancelled"."""
    programs = {"srun": srun, "scancel": f'#!/bin/sh\necho "$@" >> {folder}/cancelled\n'}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    tables = "".join(f"[[role]]\n{role}\n" for role in roles)
    (folder / "job.toml").write_text(f'broker = "h:1"\ninsecure = true\n{tables}')
    command = (sys.executable, "-m", "moolink", "launch", "--slurm", "time=1")
    return subprocess.run(
        [*command, str(folder / "job.toml")], capture_output=True, text=True, timeout=LONG,
        check=False, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )  # fmt: skip


@pytest.fixture
def long_script(tmp_path: Path) -> Path:
    path = tmp_path / "long.py"
    path.write_text(TAKES_LONG)
    return path


def test_a_process_may_write_of_nodes_that_fail(tmp_path: Path, long_script: Path) -> None:
    result = launch(tmp_path, SRUN, f'name = "learner"\ncommand = ["{long_script}"]')
    assert (result.returncode, result.stdout) == (0, "[0] done\n"), result.stderr


def test_an_srun_that_waits_for_a_failed_node_is_ended_and_its_job_cancelled(
    tmp_path: Path,
) -> None:
    result = launch(tmp_path, WAITS, 'name = "learner"\ncommand = "true"')
    assert result.returncode == 1
    assert "its node failed and ended the job" in result.stderr
    assert "-learner-0-0" in (tmp_path / "cancelled").read_text()


def test_a_status_of_0_from_a_node_that_failed_is_no_good_end(tmp_path: Path) -> None:
    ends = 'echo "srun: error: Node failure on n3" >&2; exit 0'
    result = launch(tmp_path, f"#!/bin/sh\n{ends}\n", 'name = "learner"\ncommand = "true"')
    assert result.returncode == 1
    assert "its node failed and ended the job" in result.stderr


def test_the_good_end_of_one_role_does_not_take_restarts_from_another(tmp_path: Path) -> None:
    wait = f"while [ ! -e {tmp_path}/first ]; do :; done"
    result = launch(
        tmp_path,
        SRUN,
        f'name = "first"\ncommand = ["touch", "{tmp_path}/first"]',
        f'name = "learner"\nrestarts = 2\ncommand = ["sh", "-c", "{wait}; echo try; exit 3"]',
    )
    assert result.stdout.count("try") == 3, result.stderr
    assert result.returncode == 3


@pytest.mark.parametrize(
    "option", ["output=x", "out=x", "o=x", "job-nam=x", "job=x", "nod=2", "n=3"]
)
def test_an_option_that_the_launcher_sets_is_refused_abbreviated_too(option: str) -> None:
    with pytest.raises(ValueError, match="is set by the launcher"):
        options_of([option])


@pytest.mark.parametrize("option", ["ntasks-per-core=1", "nodelist=a,b", "time=5", "exclude=x"])
def test_an_option_that_only_begins_like_one_is_taken(option: str) -> None:
    assert options_of([option]) == [f"--{option}"]
