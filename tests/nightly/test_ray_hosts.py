"""Training on four nodes of a local Ray cluster, one of which is killed in between.

`tests/interop_libraries/test_ray_launch.py` has a short twin.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="needs ray: tools/nightly.sh runs it in build/interop")

from ray.cluster_utils import Cluster

from tests.launch import four_learners
from tests.processes import ROOT


@pytest.fixture
def cluster() -> Iterator[Any]:
    head = {"num_cpus": 0, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def runs_on(node: Any, index: int) -> bool:
    """Whether a node has started the peer of this index."""
    (raylet,) = node.all_processes["raylet"]
    for process in psutil.Process(raylet.process.pid).children(recursive=True):
        try:
            if process.environ().get("MOOLINK_PEER_INDEX") == str(index):
                return True
        except psutil.NoSuchProcess:
            continue  # it has just ended
    return False


@pytest.mark.timeout(1200)
def test_a_node_is_killed_while_four_learn_and_comes_back(cluster: Any, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(4)]
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.interop_libraries.ray_driver"),
            *(cluster.address, "learn", str(tmp_path)),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def lose(index: int) -> None:
        (node,) = [node for node in nodes if runs_on(node, index)]
        cluster.remove_node(node, allow_graceful=False)

    try:
        four_learners.learn(launcher, tmp_path, lose, lambda: cluster.add_node(num_cpus=1))
    finally:
        launcher.kill()
        launcher.wait()
