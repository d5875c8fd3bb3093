"""Programs in a real Slurm: they find their place, leave when they are told, and come back."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.log import Log
from tests.waiting import until

# What docs/slurm.md gives as the script of a job that comes back.
SCRIPT = re.findall(r"```bash\n(#!.*?)```", (ROOT / "docs/slurm.md").read_text(), re.DOTALL)[0]
PEER = (sys.executable, "-m", "tests.slurm.peer")
BROKER = "10.99.0.2:4431"


def submit(cluster: Cluster, folder: Path, name: str, *options: str) -> Log:
    """Submits a batch job of one peer in the group of BROKER."""
    script = folder / f"{name}.sh"
    script.write_text(SCRIPT.replace("python train.py", f"{' '.join(PEER)} {folder}"))
    log = Log(folder / f"{name}.log")
    files = (f"--output={log.path}", "--open-mode=append", f"--job-name={name}")
    place = {"MOOLINK_BROKER": BROKER, "MOOLINK_GROUP": "walk", "MOOLINK_PEER_NAME": name}
    cluster.run("sbatch", *files, *options, str(script), **place)
    return log


@contextmanager
def broker(cluster: Cluster) -> Iterator[None]:
    """A broker on the login node."""
    process = cluster.popen(sys.executable, "-m", "moolink.broker", BROKER, "--first")
    try:
        assert process.stdout is not None
        assert "listens" in process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def test_tasks_of_srun_find_their_place_with_nothing_set(cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = cluster.popen(
        "srun", "--nodes=2", "--ntasks=4", f"--output={output}", *PEER, str(tmp_path)
    )
    log = Log(output)
    try:
        log.until("members", count=4)
        until(lambda: any(len(line[2]) == 5 for line in log.lines("members")), "four members")
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    starts = sorted(words for _, _, words in log.lines("starts"))
    assert starts == [["starts", str(index), "4", "0", "slurm"] for index in range(4)]


def test_a_preempted_peer_leaves_at_once_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    with broker(cluster):
        stays = submit(cluster, tmp_path, "stays", "--partition=high", "--nodelist=node1")
        goes = submit(cluster, tmp_path, "goes", "--partition=low", "--nodelist=node2")
        stays.until("members", "goes", "stays")
        urgent = ("--partition=high", "--nodelist=node2", "--exclusive")
        preempting = cluster.popen("srun", *urgent, "sleep", "1")
        try:
            ((told, _, _),) = goes.until("told")
            ((left, _, _),) = goes.until("left")
            assert preempting.wait(60) == 0
        finally:
            preempting.kill()
            preempting.communicate()
        assert [words[3] for _, _, words in goes.until("starts", count=2)] == ["0", "1"]
        alone = [time for time, _, words in stays.lines("members", "stays") if len(words) == 2]
        until(lambda: len(stays.lines("members", "goes", "stays")) >= 2, "the peer to come back")
        (tmp_path / "end").touch()
        longest = stays.longest_wait("stays")
        goes.until("end")
    print(
        f"left {left - told:.3f} s after the signal; the others knew after {alone[-1] - told:.3f} s"
    )
    print(f"and waited for {longest:.3f} s at most for a round")


def test_the_signal_before_a_time_limit_is_an_end_as_any_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    with broker(cluster):
        log = submit(cluster, tmp_path, "late", "--signal=USR1@55", "--time=1")
        log.until("told")
        log.until("left")
        assert not log.lines("end")


def test_a_peer_whose_node_is_killed_comes_back_on_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    with broker(cluster):
        stays = submit(cluster, tmp_path, "stays", "--nodelist=node1")
        goes = submit(cluster, tmp_path, "goes", "--exclude=node1")
        stays.until("members", "goes", "stays")
        running = cluster.run("squeue", "--noheader", "--name=goes", "--format=%N").strip()
        number = int(running.removeprefix("node"))
        cluster.kill_node(number)
        try:
            assert [words[3] for _, _, words in goes.until("starts", count=2)] == ["0", "1"]
            until(lambda: len(stays.lines("members", "goes", "stays")) >= 2, "it to come back")
            (tmp_path / "end").touch()
            longest = stays.longest_wait("stays")
        finally:
            cluster.start_node(number)
        goes.until("end")
    print(f"the others waited for {longest:.3f} s at most for a round")


def test_without_a_broker_or_a_job_the_error_says_what_to_do() -> None:
    code = "import moolink.launch; moolink.launch.place({'SLURM_STEP_ID': '0'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "SLURM_PROCID is not set" in done.stderr
