"""The place of this process in its job, as the program that started the process describes it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from typing import Literal

from moolink.errors import Error
from moolink.internal.addresses import with_port
from moolink.internal.processes import available_cores
from moolink.launch import host_lists

Source = Literal["moolink", "torchrun", "mpirun", "slurm", "jax", "alone"]

# Where brokers listen that no launcher has started: a port of these, chosen by the job's id. Linux
# gives none of them to outgoing connections.
FIRST_PORT, PORTS = 20000, 10000


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in its job.

    Attributes:
        role: of the process; ``"peer"`` where the job has no roles.
        index: of the process among those of its role, from 0.
        count: how many processes its role has.
        name: for the process's Rpc: no other peer of the broker has it, and a process that is
            started again has the same.
        group: name of the group, or ``None``: the process is alone, and chooses.
        broker: ``"HOST:PORT"``, or ``None``: the process is alone, and :meth:`start_broker` makes
            it one of its own.
        cores: how many this process may use.
        restarted: whether the process was started again after a failure or a preemption.
        source: the launcher that started the process: ``"moolink"``, ``"torchrun"``,
            ``"mpirun"``, ``"slurm"``, ``"jax"`` (the variables of ``jax.distributed``) or
            ``"alone"``.
        starts_broker: whether this process is the one that must start the broker:
            :meth:`start_broker` does.
    """

    role: str
    index: int
    count: int
    name: str
    group: str | None
    broker: str | None
    cores: int
    restarted: bool
    source: Source
    starts_broker: bool = False

    def start_broker(self) -> str:
        """Starts the job's broker if this process must; returns the broker's address.

        Every process of the job calls this once it is ready to connect. A process that is alone
        gets a broker of its own, at a free port of 127.0.0.1, so that a script needs no launcher.
        In the process of index 0 of a job whose launcher starts no broker (torchrun, mpirun, Slurm)
        it starts one, which ends with the calling thread: call it in the main thread. In others it
        starts nothing.

        Raises:
            moolink.Error: the broker cannot listen, or this is one of several processes whose
                launcher has named no broker.
        """
        # Imported here: most processes start none.
        from moolink.launch import own_broker

        if self.broker is None and self.count > 1:
            raise Error(
                f"this is process {self.index} of {self.count}, and no launcher has told them "
                "where their broker is: start one (`moolink-broker 0.0.0.0:4431`) and give all of "
                "them its address in MOOLINK_BROKER"
            )
        if self.broker is None:
            return own_broker.of_this_process()
        if self.starts_broker:
            own_broker.start(self.broker)
        return self.broker


def place(environ: Mapping[str, str] | None = None) -> Place:
    """Finds the place of this process in its job.

    It is read from the variables of `moolink run` and `moolink launch`, of torchrun, mpirun or
    Slurm, or of `jax.distributed`. Without any the process is alone: index 0 of 1. Where several
    have set theirs, that counts which was started last: torchrun in a step of Slurm, for example.
    ``MOOLINK_BROKER``, ``MOOLINK_GROUP``, ``MOOLINK_PEER_NAME`` and ``MOOLINK_CORES`` win over
    the derived values.

    Args:
        environ: the variables; ``None``: the process's own.

    Raises:
        ValueError: a variable is invalid. The message names it.
        moolink.Error: the environment does not tell where the job's first process runs.
    """
    variables = _Variables(os.environ if environ is None else environ)
    for names, find in _FINDERS:
        if all(name in variables.given for name in names.split()):
            return find(variables)
    return _alone(variables)


class _Variables:
    """Environment variables, read with checks."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given

    def text(self, *names: str) -> str | None:
        """Returns the first one that is set and not empty."""
        return next((self.given[name] for name in names if self.given.get(name)), None)

    def number(self, *names: str, default: int, least: int = 0) -> int:
        """Returns the first of these that is set, as a whole number."""
        name = next((name for name in names if self.given.get(name)), None)
        if name is None:
            return default
        text = self.given[name]
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise ValueError(f"{name} is {text!r}; it must be a whole number >= {least}")
        return int(text)


def _from_moolink(variables: _Variables) -> Place:
    count = variables.number("MOOLINK_NUM_PEERS", default=1, least=1)
    # Pods of an indexed Job of Kubernetes have the other one.
    index = variables.number("MOOLINK_PEER_INDEX", "JOB_COMPLETION_INDEX", default=0)
    return Place(
        role=variables.text("MOOLINK_ROLE") or "peer",
        index=index,
        count=count,
        name=variables.text("MOOLINK_PEER_NAME") or _own_name(),
        group=variables.text("MOOLINK_GROUP"),
        broker=variables.text("MOOLINK_BROKER"),
        cores=variables.number("MOOLINK_CORES", default=_share(count), least=1),
        restarted=variables.text("MOOLINK_RESTARTED") == "1",
        source="moolink",
    )


def _from_torchrun(variables: _Variables) -> Place:
    rank, count = _rank(variables, "RANK"), variables.number("WORLD_SIZE", default=1, least=1)
    host, port = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")
    run = variables.text("TORCHELASTIC_RUN_ID") or "none"
    return _derived(
        variables,
        "torchrun",
        rank,
        count,
        # Jobs without a name all have the run "none"; their ports differ.
        job=f"{run}/{host}:{port}",
        host=host,
        local=variables.number("LOCAL_WORLD_SIZE", default=1, least=1),
        restarts=variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _from_mpirun(variables: _Variables) -> Place:
    count = variables.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default=1, least=1)
    local = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", default=1, least=1)
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    # All processes of one machine are started by the same one, which lives as long as the job.
    of_machine = f"{socket.gethostname()}/{os.getppid()}"
    on_one_machine = count == local
    host = "127.0.0.1" if on_one_machine else _first_of_slurm(variables, "SLURM_JOB_NODELIST")
    return _derived(
        variables,
        "mpirun",
        _rank(variables, "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        count,
        job=of_machine if job is None and on_one_machine else job,
        host=host,
        local=local,
        restarts=0,
    )


def _from_slurm(variables: _Variables) -> Place:
    count = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1, least=1)
    index = _rank(variables, "SLURM_PROCID")
    local = _tasks_of_node(variables, count)
    job = variables.text("SLURM_JOB_ID", "SLURM_JOBID")
    share = variables.number("SLURM_CPUS_ON_NODE", default=available_cores(), least=1) // local
    cores = variables.number("SLURM_CPUS_PER_TASK", default=max(1, share), least=1)
    return _derived(
        variables,
        "slurm",
        index,
        count,
        job=job and f"{job}.{variables.text('SLURM_STEP_ID', 'SLURM_STEPID') or 0}",
        host=_first_of_slurm(variables),
        local=local,
        restarts=variables.number("SLURM_RESTART_COUNT", default=0),
        cores=min(available_cores(), cores),  # a task may be bound to fewer
    )


def _from_jax(variables: _Variables) -> Place:
    address = variables.text("JAX_COORDINATOR_ADDRESS")
    count = variables.number("JAX_NUM_PROCESSES", default=1, least=1)
    local = variables.text("JAX_LOCAL_PROCESS_COUNT")
    return _derived(
        variables,
        "jax",
        _rank(variables, "JAX_PROCESS_ID"),
        count,
        job=address,
        host=address and address.rpartition(":")[0].strip("[]"),
        local=int(local) if local and local.isdecimal() and int(local) else 1,
        restarts=0,
    )


def _derived(
    variables: _Variables,
    source: Source,
    index: int,
    count: int,
    *,
    job: str | None,
    host: str | None,
    local: int,
    restarts: int,
    cores: int | None = None,
) -> Place:
    """A place in a job that has a number of processes, but neither broker nor group."""
    if index >= count:
        raise ValueError(f"{source} says that this is process {index} of {count}, from 0")
    given = variables.text("MOOLINK_BROKER")
    broker, group = given, variables.text("MOOLINK_GROUP")
    if count > 1 and given is None:
        if host is None or job is None:
            raise Error(
                f"{source} does not tell its processes where the first of them runs: start a "
                "broker (`moolink-broker 0.0.0.0:4431`) and give all of them its address in "
                "MOOLINK_BROKER"
            )
        broker = with_port(host, _port(job))
    own = _own_name() if job is None else f"{source}-{_shown(job)}"
    if group is None and job is not None:
        group = own
    return Place(
        role="peer",
        index=index,
        count=count,
        # A broker and a group that were given may have other jobs' peers, too.
        name=variables.text("MOOLINK_PEER_NAME") or f"{own}-{index}",
        group=group,
        broker=broker,
        cores=variables.number("MOOLINK_CORES", default=cores or _share(local), least=1),
        restarted=restarts > 0,
        source=source,
        starts_broker=count > 1 and given is None and index == 0,
    )


def _alone(variables: _Variables) -> Place:
    return Place(
        role="peer",
        index=0,
        count=1,
        name=variables.text("MOOLINK_PEER_NAME") or _own_name(),
        group=variables.text("MOOLINK_GROUP"),
        broker=variables.text("MOOLINK_BROKER"),
        cores=variables.number("MOOLINK_CORES", default=available_cores(), least=1),
        restarted=False,
        source="alone",
    )


# The variable by which each is known, innermost first: a program that runs in a step of Slurm has
# set its own besides Slurm's. A step has a number; the script of a batch job, which has the other
# variables too, is alone.
_FINDERS = (
    ("MOOLINK_PEER_INDEX", _from_moolink),
    ("MOOLINK_NUM_PEERS", _from_moolink),
    ("TORCHELASTIC_RUN_ID", _from_torchrun),
    ("OMPI_COMM_WORLD_RANK", _from_mpirun),
    # Of MPICH's mpirun, which starts its processes by a step of one task a node; srun, which may
    # set PMI_RANK, does not set this.
    ("MPI_LOCALNRANKS", _from_mpirun),
    ("SLURM_STEP_ID", _from_slurm),
    ("SLURM_STEPID", _from_slurm),
    ("PMI_RANK", _from_mpirun),
    # Both: images set the address for programs that run alone, too.
    ("JAX_COORDINATOR_ADDRESS JAX_PROCESS_ID", _from_jax),
    ("MASTER_ADDR RANK", _from_torchrun),
)


def _rank(variables: _Variables, *names: str) -> int:
    if variables.text(*names) is None:
        raise ValueError(f"{names[0]} is not set, but other variables of its launcher are")
    return variables.number(*names, default=0)


def _first_of_slurm(variables: _Variables, first: str = "SLURM_STEP_NODELIST") -> str | None:
    """The host of a step's first task.

    mpirun starts a step of its own for all nodes but the one on which it runs: its processes are
    told different lists of the step, but the same list of the job.
    """
    hosts = variables.text(first, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return None if hosts is None else host_lists.expand(hosts)[0]


def _tasks_of_node(variables: _Variables, count: int) -> int:
    """How many tasks of the step this node has: its entry of ``2(x3),1``."""
    text = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = variables.number("SLURM_NODEID", default=0)
    for tasks, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text or ""):
        node -= int(times or 1)
        if node < 0:
            return max(1, int(tasks))
    return count


def _share(local: int) -> int:
    return max(1, available_cores() // local)


def _port(job: str) -> int:
    digest = hashlib.sha256(job.encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


def _shown(job: str) -> str:
    """A job's id as part of a name: itself if that is short and plain."""
    if re.fullmatch(r"[\w.-]{1,40}", job):
        return job
    return hashlib.sha256(job.encode()).hexdigest()[:12]


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
