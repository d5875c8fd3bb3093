"""Jobs that Ray runs, on a real cluster of two nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: make test-interop")

from ray.cluster_utils import Cluster

from moolink.launch.host import Task
from moolink.launch.loop import Loop
from moolink.ray.call import command_of, without_call
from moolink.ray.launching import Inbox
from moolink.ray.runner import Runner
from tests.processes import ROOT
from tests.slurm.log import Log
from tests.waiting import until

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head of one core; tests add a node of two."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def nodes(cluster: Any) -> list[Any]:
    """The second node, which a test may replace."""
    return [cluster.add_node(num_cpus=2)]


@pytest.fixture
def start(cluster: Any, nodes: list[Any], tmp_path: Path) -> Iterator[Start]:
    """Returns a function that launches a job of ray_driver.py; its output is `out`."""
    started = []

    def driver(job: str) -> subprocess.Popen[bytes]:
        module = "tests.interop_libraries.ray_driver"
        with (tmp_path / "out").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, cluster.address, job, str(tmp_path)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield driver
    for process in started:
        process.kill()
        process.wait()


def everybody(log: Log, times: int) -> None:
    """Waits until a learner has seen all three so often."""
    names = ("members", "actor-0", "learner-0", "learner-1")
    until(
        lambda: (
            max([[x[1] for x in log.lines(*names)].count(f"learner-{i}") for i in (0, 1)]) >= times
        ),
        f"all three, {times} times",
        timeout=270,
    )


def test_a_thread_that_tells_the_launcher_something_waits_until_it_is_read() -> None:
    seen: list[str] = []
    with closing(Loop()) as loop, closing(Inbox(loop)) as inbox:

        def tell() -> None:
            for number in range(4):
                seen.append(f"put {number}")
                inbox.put(lambda n=number: seen.append(f"read {n}"))

        thread = threading.Thread(target=tell)
        thread.start()
        for _ in range(3):
            loop.turn()
        until(lambda: seen[-1] == "put 3", "the last one")
    thread.join()  # close() ends the wait for what is not read any more
    assert seen == [f"{what} {n}" for n in range(4) for what in ("put", "read")][:-1]


def test_a_runner_without_a_token_says_so() -> None:
    runner = Runner(Task(["true"], {}, {}), "no token", str(ROOT))
    ((name, why),) = runner.next()
    assert name == "refused"
    assert "the launcher's token" in why


def test_a_call_is_not_on_a_command_line() -> None:
    command, variables = without_call(["python", *command_of(b"secret")])
    assert command == ["python", "-m", "moolink.ray.call"]
    assert list(variables.values()) == ["c2VjcmV0"]
    assert without_call(["true"]) == (["true"], {})


def test_peers_of_a_killed_node_come_back_with_it(
    cluster: Any, nodes: list[Any], tmp_path: Path, start: Start
) -> None:
    process, log = start("train"), Log(tmp_path / "out")
    everybody(log, 1)
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    until(lambda: log.path.read_text().count("is lost with its host") == 2, "two to be lost")
    nodes.append(cluster.add_node(num_cpus=2))
    everybody(log, 2)
    (tmp_path / "end").touch()
    assert process.wait(60) == 0, log.path.read_text()
    stayed = {"learner-0", "learner-1"} - {x[1] for x in log.lines("starts") if x[2][3] == "1"}
    (name,) = stayed
    print(f"the others waited for {log.longest_wait(name):.3f} s at most for a round")


def test_ctrl_c_ends_all_peers(tmp_path: Path, start: Start) -> None:
    process, log = start("train"), Log(tmp_path / "out")
    everybody(log, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.path.read_text()
    assert len(log.lines("left")) == 3, "each has closed its peer"
    assert "moolink.ray: ended by SIGINT" in log.path.read_text()


def test_a_function_runs_in_processes_of_its_own(tmp_path: Path, start: Start) -> None:
    assert start("function").wait(120) == 3
    text = (tmp_path / "out").read_text()
    assert f"[1] called with {tmp_path} as 1 by 1 words" in text, "not on a command line"
    assert "peer 1 (pid" in text
    assert "exited with status 3 and ended the job" in text


def test_a_job_that_is_too_large_says_what_it_needs(tmp_path: Path, start: Start) -> None:
    assert start("large").wait(60) == 1
    assert (
        "had no place for the job within 1 s: it needs [{'CPU': 1000.0}]"
        in (tmp_path / "out").read_text()
    )
