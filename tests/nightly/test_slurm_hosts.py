"""Training on four nodes of Slurm, one of which is killed in between.

`tests/slurm/test_launch.py` and `test_place.py` have short twins.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import four_learners
from tests.slurm.cluster import Cluster, why_not


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(tmp_path, 4)
    yield made
    made.close()


@pytest.mark.timeout(1200)
def test_a_node_is_killed_while_four_learn_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    folder, lost = tmp_path / "run", []
    launcher = cluster.popen(
        *(sys.executable, "-m", "moolink", "launch", "--slurm", "exclusive", "-n", "4"),
        *("--restart", "1", *four_learners.COMMAND, "--save-dir", str(folder)),
        stderr=subprocess.STDOUT,
    )

    def lose(index: int) -> None:
        jobs = cluster.run("squeue", "--noheader", "--format=%j %N").splitlines()
        (node,) = [line.split()[1] for line in jobs if f"-peer-{index}-" in line]
        lost.append(int(node.removeprefix("node")))
        cluster.kill_node(lost[0])

    try:
        four_learners.learn(launcher, folder, lose, lambda: cluster.start_node(lost[0]))
    finally:
        launcher.kill()
        launcher.wait()
