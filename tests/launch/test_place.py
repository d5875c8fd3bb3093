"""The place of a process in its job, from the variables of what started it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

import moolink
from moolink.launch import Place, place
from moolink.launch.place import FIRST_PORT, PORTS
from tests.waiting import PROCESS_LIMIT

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_JOB_NODELIST": "node[01-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_CPUS_PER_TASK": "3",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "[fd00::1]:1234",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
MOOLINK = {
    "MOOLINK_BROKER": "10.0.0.1:99",
    "MOOLINK_GROUP": "g",
    "MOOLINK_ROLE": "actor",
    "MOOLINK_PEER_INDEX": "1",
    "MOOLINK_NUM_PEERS": "3",
    "MOOLINK_PEER_NAME": "actor-1",
    "MOOLINK_CORES": "5",
    "MOOLINK_RESTARTED": "1",
}


def port(found: Place) -> int:
    assert found.broker is not None
    number = int(found.broker.rpartition(":")[2])
    assert FIRST_PORT <= number < FIRST_PORT + PORTS
    return number


def test_without_any_the_process_is_alone() -> None:
    found = place({})
    assert found.name == f"{socket.gethostname()}-{os.getpid()}"
    assert (found.role, found.index, found.count, found.source) == ("peer", 0, 1, "alone")
    assert (found.group, found.broker, found.starts_broker) == (None, None, False)
    assert found.cores >= 1
    given = place({"MOOLINK_BROKER": "h:1", "MOOLINK_GROUP": "g", "MOOLINK_PEER_NAME": "n"})
    assert (given.broker, given.group, given.name, given.source) == ("h:1", "g", "n", "alone")


ALONE = """
import moolink
from moolink.launch import place

mine = place()
with moolink.Rpc(mine.name) as rpc, moolink.Group(rpc, mine.group or "g") as group:
    rpc.connect(mine.start_broker())
    group.wait_for_members(mine.count, 60)
    assert place().start_broker() == mine.start_broker()  # one broker a process
    with moolink.Rpc("other") as other, moolink.Group(other, "g") as theirs:
        other.connect(mine.start_broker())
        theirs.wait_for_members(2, 60)
    print(group.members() == [mine.name])
"""


def test_a_process_that_is_alone_has_a_broker_of_its_own() -> None:
    variables = {name: value for name, value in os.environ.items() if "MOOLINK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        env=variables,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_one_of_several_processes_without_a_broker_starts_none() -> None:
    found = place({"MOOLINK_NUM_PEERS": "3", "JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(moolink.Error, match=r"process 2 of 3.*MOOLINK_BROKER"):
        found.start_broker()


def test_moolinks_own_variables_win() -> None:
    assert place(TORCHRUN | SLURM | MOOLINK) == Place(
        "actor", 1, 3, "actor-1", "g", "10.0.0.1:99", 5, True, "moolink"
    )


def test_an_indexed_job_of_kubernetes() -> None:
    given = {"MOOLINK_NUM_PEERS": "3", "MOOLINK_BROKER": "b:1", "JOB_COMPLETION_INDEX": "2"}
    found = place(given)
    assert (found.index, found.count, found.broker) == (2, 3, "b:1")
    assert place(given | {"MOOLINK_PEER_INDEX": "1"}).index == 1


def test_jobs_with_a_group_in_common_have_different_names() -> None:
    given = SLURM | {"MOOLINK_GROUP": "walk", "MOOLINK_BROKER": "b:1"}
    names = {place(given | {"SLURM_JOB_ID": job}).name for job in ("77", "78")}
    assert names == {"slurm-77.0-2", "slurm-78.0-2"}


def test_torchrun() -> None:
    found = place(TORCHRUN)
    assert (found.index, found.count, found.source) == (3, 4, "torchrun")
    assert found.broker == f"node1:{port(found)}"
    assert found.name == f"{found.group}-3"
    assert not found.starts_broker
    assert not found.restarted
    first = place(TORCHRUN | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert (first.broker, first.group) == (found.broker, found.group)
    assert first.starts_broker
    assert first.restarted
    other = place(TORCHRUN | {"MASTER_PORT": "29501"})
    assert (other.group, other.broker) != (found.group, found.broker), "another job"


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["moolink.launch.place"]  # the package's `place` is the function
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    found = place(SLURM)
    assert (found.index, found.count, found.source, found.cores) == (2, 5, "slurm", 3)
    assert found.broker == f"node03:{port(found)}"
    assert (found.group, found.name) == ("slurm-77.0", "slurm-77.0-2")
    again = place(SLURM | {"SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"})
    assert (again.broker, again.restarted, again.starts_broker) == (found.broker, True, True)
    assert place(SLURM | {"SLURM_STEP_ID": "1"}).group == "slurm-77.1"
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    assert place(SLURM).cores == 2, "the task is bound to fewer than SLURM_CPUS_PER_TASK"


def test_the_script_of_a_batch_job_is_alone() -> None:
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert place(batch).source == "alone"


@pytest.mark.parametrize("variables", [OPENMPI, MPICH])
def test_mpirun_on_one_machine(variables: Mapping[str, str]) -> None:
    found = place(variables)
    assert (found.index, found.count, found.source) == (1, 2, "mpirun")
    assert found.broker == f"127.0.0.1:{port(found)}"


def test_mpirun_on_several_machines_needs_slurm_or_a_broker() -> None:
    spread = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(moolink.Error, match=r"mpirun does not tell .* in MOOLINK_BROKER"):
        place(spread)
    found = place(spread | {"MOOLINK_BROKER": "h:4431", "OMPI_COMM_WORLD_RANK": "0"})
    assert (found.broker, found.starts_broker) == ("h:4431", False)
    in_slurm = place({**SLURM, **spread})
    assert (in_slurm.source, in_slurm.broker) == ("mpirun", f"node01:{port(in_slurm)}")
    # Where mpirun itself runs there is no step.
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert place({**batch, **spread}).broker == in_slurm.broker


def test_mpich_under_slurm_has_its_own_ranks_and_not_those_of_its_step() -> None:
    ranks = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "7"}
    found = place(SLURM | ranks)
    assert (found.source, found.index, found.count) == ("mpirun", 3, 4)
    assert found.broker == f"node01:{port(found)}"
    by_srun = {name: value for name, value in ranks.items() if name != "MPI_LOCALNRANKS"}
    assert place(SLURM | by_srun).source == "slurm"


def test_jax_distributed() -> None:
    found = place(JAX)
    assert (found.index, found.count, found.source) == (1, 2, "jax")
    assert found.broker == f"[fd00::1]:{port(found)}"


def test_the_innermost_counts() -> None:
    assert place(SLURM | TORCHRUN).source == "torchrun"
    assert place(SLURM | OPENMPI).source == "mpirun"
    assert place(SLURM | JAX).source == "slurm"


def test_a_job_of_one_process_has_no_broker() -> None:
    one = place(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"})
    assert (one.broker, one.starts_broker, one.count) == (None, False, 1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            MOOLINK | {"MOOLINK_PEER_INDEX": "one"},
            "MOOLINK_PEER_INDEX is 'one'; it must be a whole",
        ),
        (MOOLINK | {"MOOLINK_NUM_PEERS": "0"}, "MOOLINK_NUM_PEERS is '0'; it must be a whole"),
        (TORCHRUN | {"RANK": "4"}, "torchrun says that this is process 4 of 4"),
        (SLURM | {"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1"}, "is no list of hosts"),
    ],
)
def test_an_error_names_the_variable(variables: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(variables)


@pytest.mark.parametrize(
    "given", [{"MASTER_ADDR": "node1"}, {"JAX_COORDINATOR_ADDRESS": "node1:1234"}]
)
def test_an_address_without_a_rank_is_of_no_launcher(given: dict[str, str]) -> None:
    assert place(given).source == "alone"


def test_the_threads_of_a_process_have_one_broker() -> None:
    code = """
import threading
from moolink.launch import own_broker
found, together = [], threading.Barrier(4)
def ask():
    together.wait()
    found.append(own_broker.of_this_process())
threads = [threading.Thread(target=ask) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), len(set(found)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    assert ended.stdout.split() == ["4", "1"], ended.stderr
