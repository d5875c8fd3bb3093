"""`moolink launch --slurm`: each process is a job of a real Slurm."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moolink.launch.slurm import options_of
from tests.slurm.cluster import Cluster
from tests.slurm.log import Log
from tests.waiting import until

LAUNCH = (sys.executable, "-m", "moolink", "launch")
ROLE = """
[[role]]
name = "{name}"
command = ["-m", "tests.slurm.peer", "{folder}"]
cores = 1
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Returns a function that launches a learner and elastic actors; their output is `out`."""
    roles = ROLE.format(name="learner", folder=tmp_path)
    roles += ROLE.format(name="actor", folder=tmp_path) + "elastic = true\ncount = 2\n"
    (tmp_path / "job.toml").write_text(f'name = "walk"\ngrace = 5\n{roles}')
    processes = []

    def launch(*options: str) -> subprocess.Popen[str]:
        command = " ".join([*LAUNCH, *options, str(tmp_path / "job.toml")])
        output = tmp_path / "out"
        process = cluster.popen("sh", "-c", f"exec {command} > {output} 2>&1")
        processes.append(process)
        return process

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


def all_three(log: Log) -> None:
    """Waits until the learner sees both actors."""
    log.until("members", "actor-0", "actor-1", "learner-0", count=3)


def test_roles_run_as_jobs_and_a_preempted_actor_comes_back(
    cluster: Cluster, tmp_path: Path, start: Start
) -> None:
    process, log = start("--slurm", "exclusive,partition=low"), Log(tmp_path / "out")
    all_three(log)
    found = [line.split() for line in cluster.run("squeue", "-h", "-o", "%j %N").splitlines()]
    (node,) = [node for name, node in found if name.endswith("-actor-0-0")]
    cluster.run("srun", "--partition=high", "--exclusive", f"--nodelist={node}", "true")
    assert log.until("starts", count=4)[-1][1] == "actor-0"
    everyone = ("members", "actor-0", "actor-1", "learner-0")
    until(lambda: [x[1] for x in log.lines(*everyone)].count("learner-0") == 2, "the actor")
    (tmp_path / "end").touch()
    assert process.wait(60) == 0, log.path.read_text()
    log.longest_wait("learner-0")
    assert cluster.run("squeue", "--noheader", "--states=RUNNING,PENDING") == ""


def test_ctrl_c_cancels_all_jobs(cluster: Cluster, tmp_path: Path, start: Start) -> None:
    process, log = start("--slurm", "partition=low"), Log(tmp_path / "out")
    all_three(log)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert len(log.lines("left")) == 3, "each has closed its peer"
    assert "moolink launch: ended by SIGINT" in log.path.read_text()
    assert cluster.run("squeue", "--noheader", "--states=RUNNING,PENDING") == ""


def test_jobs_do_not_outlive_a_launcher_that_is_killed(
    cluster: Cluster, tmp_path: Path, start: Start
) -> None:
    process = start("--slurm", "partition=low")
    all_three(Log(tmp_path / "out"))
    process.kill()
    process.wait()
    states = ("--states=RUNNING,PENDING",)
    until(lambda: not cluster.run("squeue", "--noheader", *states), "jobs to be cancelled", 0.1, 60)


def test_what_slurm_refuses_ends_the_job_with_its_words(tmp_path: Path, start: Start) -> None:
    assert start("--slurm", "partition=none").wait(60) == 1
    text = (tmp_path / "out").read_text()
    assert "srun: error: invalid partition specified: none" in text
    assert "learner 0 (on slurm) exited with status 1 and ended the job" in text


def test_options_are_those_of_srun() -> None:
    assert options_of(["partition=gpu,time=2:00", "nodelist=a,b"]) == [
        "--partition=gpu",
        "--time=2:00",
        "--nodelist=a,b",
    ]
    assert options_of(["exclusive,mem=1G"]) == ["--exclusive", "--mem=1G"]
    for wrong in ("", "--partition=x", "a b"):
        with pytest.raises(ValueError, match="no option of srun"):
            options_of([wrong])
    with pytest.raises(ValueError, match=r"'ntasks=3' is set by the launcher"):
        options_of(["ntasks=3"])
