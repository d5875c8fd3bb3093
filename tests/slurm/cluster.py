"""A private Slurm cluster on this machine: each node is a host in namespaces of its own.

A node has an address, a name and processes of its own, so that to kill it is to kill all that runs
on it. Host 0 is the login node, with the controller. Nothing is left behind: every daemon is killed
with the process that made the cluster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moolink.internal.processes import ends_with_parent
from tests.network import hosts
from tests.waiting import PROCESS_LIMIT, until

ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
_CONFIGURATION = """\
ClusterName=moolink
SlurmctldHost=login(10.99.0.2)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
# A job that ends while its node dies ends when the controller tells the node again. It looks for
# such jobs that often, by default every 60 s.
MinJobAge=10
SlurmdTimeout=5
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""  # noqa: E501


class Cluster:
    """A login node and ``nodes`` computing nodes of two cores, named node1, node2, ..."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("SLURM_")
        } | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._hosts = hosts.Hosts(nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files(nodes)
            self._start_controller()
            for number in range(1, nodes + 1):
                self.start_node(number)
            self.until_idle(nodes)
        except BaseException:
            self.close()
            raise

    def start_node(self, number: int) -> None:
        """Starts a node's daemon; waits for nothing."""
        self._start(f"node{number}", number, ["slurmd", "-D"], own_processes=True)

    def kill_node(self, number: int) -> None:
        """Kills everything that runs on the node, at once."""
        _kill(self._daemons.pop(f"node{number}"))

    def popen(
        self, *arguments: str, stderr: int = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        """Starts a command on the login node; its streams are the test's."""
        return subprocess.Popen(
            ends_with_parent(self._on_host(0, arguments)),
            cwd=ROOT,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> str:
        """Runs a command on the login node to its end; returns what it printed."""
        process = self.popen(*arguments, **environment)
        try:
            stdout, stderr = process.communicate(timeout=PROCESS_LIMIT)
        finally:
            process.kill()
        assert process.returncode == 0, f"{arguments}: {process.returncode}\n{stdout}{stderr}"
        return stdout

    def address(self, number: int) -> str:
        """The address of a node."""
        return self._hosts.address(number)

    def until_idle(self, nodes: int) -> None:
        """Waits until all nodes are up and nothing runs on them."""

        def idle() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
            return states.split() == ["idle"] * nodes

        until(idle, f"{nodes} nodes to be idle", poll=0.1, timeout=60)

    def empty(self) -> None:
        """Cancels all jobs and waits until their nodes are free."""
        jobs = ""

        def gone() -> bool:
            nonlocal jobs
            # Again each time: Slurm may requeue a job that was ending when it was cancelled.
            self.run("scancel", "--user=root", "--full")
            jobs = self.run("squeue", "--noheader", "--format=%i %j %T %N %r")
            return not jobs

        try:
            until(gone, "the jobs to end", 0.5, 180)
        except AssertionError as error:
            nodes = self.run("sinfo", "--Node", "--long")
            raise AssertionError(f"{error}:\n{jobs}{nodes}") from None

    def close(self) -> None:
        """Kills the daemons with everything they run."""
        for daemon in self._daemons.values():
            _kill(daemon)
        self._hosts.close()

    def _write_files(self, nodes: int) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "state").mkdir()
        names = {"login": 0} | {f"node{number}": number for number in range(1, nodes + 1)}
        for name in names:
            (folder / name).mkdir()
        known = [f"{self.address(number)} {name}" for name, number in names.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        lines = [
            f"NodeName={name} NodeAddr={self.address(number)} CPUs=2 RealMemory=1000"
            for name, number in names.items()
            if number
        ]
        configuration = _CONFIGURATION.format(folder=folder, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(configuration)

    def _start_controller(self) -> None:
        paths = {
            "--socket": "munge.socket",
            "--key-file": "munge.key",
            "--pid-file": "munged.pid",
            "--seed-file": "munged.seed",
            "--log-file": "munged.log",
        }
        options = [f"{option}={self.folder / name}" for option, name in paths.items()]
        # Forced, for the folders above the socket are not open to all.
        self._start("munged", 0, ["munged", "--foreground", "--force", *options])
        until((self.folder / "munge.socket").exists, "munged to listen")
        self._start("slurmctld", 0, ["slurmctld", "-D", "-c"], own_processes=True)
        ping = ("sh", "-c", "scontrol ping || true")
        until(lambda: " is UP" in self.run(*ping), "slurmctld to answer", 0.1)

    def _start(
        self, name: str, host: int, arguments: Sequence[str], own_processes: bool = False
    ) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ends_with_parent(self._on_host(host, arguments, own_processes)),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _on_host(
        self, number: int, arguments: Sequence[str], own_processes: bool = False
    ) -> list[str]:
        """Returns the command that runs ``arguments`` on a host, with its name and its hosts file.

        With processes of its own, the end of the command is the end of all that it started.
        """
        name = f"node{number}" if number else "login"
        setup = f'hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        apart = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
        entered = ["unshare", "--mount", "--uts", *apart, "sh", "-c", setup, name, *arguments]
        return self._hosts.command(number, entered)


def _kill(daemon: subprocess.Popen[bytes]) -> None:
    """Kills a daemon with all that it started."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    # Killed first, unshare would leave the first process of the namespace to be reaped by another.
    for process in children or [daemon.pid]:
        os.kill(int(process), signal.SIGKILL)
    daemon.wait()


def why_not() -> str | None:
    """Returns why there can be no cluster here, or ``None`` if there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client munge"
        return f"{', '.join(missing)} not found: apt-get install {packages}"
    if os.geteuid() != 0:
        return "the daemons of Slurm need root here"
    return hosts.why_not()
