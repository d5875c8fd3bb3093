"""Running a job by Slurm, from a login node: each process is a job of Slurm's own.

So processes start, are preempted and restart independently, each as soon as there is a place for
it. srun carries the output, the exit status and the environment. The broker runs beside the
launcher.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from moolink.launch.description import Job, Role
from moolink.launch.host import HostWatcher, JobError, LocalHost, Task
from moolink.launch.local_processes import LocalProcess, Machine
from moolink.launch.loop import Loop
from moolink.launch.plan import plan_with_broker_here
from moolink.launch.scheduled_host import ScheduledHost
from moolink.launch.settings import local_security
from moolink.launch.shares import Seat
from moolink.launch.supervisor import Supervisor

_GUARD = str(Path(__file__).with_name("slurm_guard.py"))
_KILL_TIME = 10.0  # seconds for Slurm to end a process, before its srun is killed
_NODE_TIME = 2.0  # seconds that output still comes from a node that has failed
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.+)?", re.DOTALL)
_OURS = {"ntasks", "nodes", "job-name", "output", "error", "input", "label", "export"}
# Messages of srun and slurmstepd when Slurm ends a process that the user has not cancelled.
# Their messages begin with their names; the process itself may write of such things, too.
_THEIRS = rb"\b(?:srun|slurmstepd[^:\n]*): [^\n]*"
_FAILURE = rb"[Nn]ode failure|NODE FAIL"
_TAKEN = re.compile(_THEIRS + rb"(?:CANCELLED AT \S+ DUE TO|allocation revoked|" + _FAILURE + rb")")
_NODE_FAILED = re.compile(_THEIRS + rb"(?:" + _FAILURE + rb")")
_SIGTERM_CODES = (128 + 15, -15)  # ended by SIGTERM, which we have not sent
_LONGEST_MESSAGE = 200  # bytes of a message of theirs


def options_of(texts: Sequence[str]) -> list[str]:
    """Returns options of srun from texts like ``partition=gpu,time=2:00:00``.

    Text without ``=`` belongs to the value before it (``nodelist=a,b``), unless it comes first
    (``exclusive,partition=gpu``).

    Raises:
        ValueError: a text is no such list, or names an option that the launcher sets itself.
    """
    parts: list[str] = []
    for text in texts:
        own: list[str] = []
        for part in text.split(","):
            if own and "=" not in part:
                own[-1] += f",{part}"
            else:
                own.append(part)
        parts += own
    for part in parts:
        if not _OPTION.fullmatch(part):
            raise ValueError(
                f"slurm: {part!r} is no option of srun: write NAME=VALUE, as in partition=gpu"
            )
        name = part.partition("=")[0]
        # srun takes abbreviations.
        if any(option.startswith(name) for option in _OURS):
            raise ValueError(
                f"slurm: {part!r} is set by the launcher: leave it out, and say in the job's "
                "description how many processes a role has, and with which cores and GPUs"
            )
    return [f"--{part}" for part in parts]


class Submitter:
    """Runs srun and scancel on this machine."""

    def __init__(self, loop: Loop, machine: Machine, options: Sequence[str]) -> None:
        self.loop = loop
        self.machine = machine
        self.options = list(options)
        # Its own session: Ctrl-C in a terminal is for the launcher alone.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment_of(os.environ),
            start_new_session=True,
        )

    def run(self, name: str, role: Role, task: Task, watcher: SlurmProcess) -> LocalProcess:
        """Submits a process; returns the srun that waits for it.

        Raises:
            OSError: srun cannot be started.
        """
        command = ["srun", f"--job-name={name}", "--nodes=1", "--ntasks=1", "--input=none"]
        if role.cores is not None:
            command.append(f"--cpus-per-task={role.cores}")
        if role.gpus:
            command.append(f"--gpus-per-task={role.gpus}")
        variables = environment_of(task.variables({}))
        if role.gpus:
            variables.pop("CUDA_VISIBLE_DEVICES", None)  # Slurm knows which they are
        process = self.machine.start([*command, *self.options, *task.command], variables, watcher)
        self._tell_guard(f"+{name}")
        return process

    def cancel(self, name: str, *options: str) -> None:
        """Ends the job of this name, running or not; waits for nothing."""
        command = ["scancel", f"--jobname={name}", f"--user={os.getuid()}", *options]
        self.machine.start(command, environment_of(os.environ), _Unwatched())

    def forget(self, name: str) -> None:
        """The job of this name has ended."""
        self._tell_guard(f"-{name}")

    def close(self) -> None:
        """Called when all have ended."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        try:
            os.write(self._guard.stdin.fileno(), f"{line}\n".encode())
        except BrokenPipeError:
            return  # The guard was killed: if the launcher is killed, too, its jobs go on.


class _Unwatched:
    """A watcher of processes whose output and end do not matter."""

    def output(self, stream: str, data: bytes) -> None:
        """Drops the message of scancel that there is no such job."""

    def announced(self, text: str) -> None:
        """Does not come."""

    def ended(self, returncode: int) -> None:
        """Changes nothing."""

    def drained(self) -> None:
        """Changes nothing."""


class SlurmProcess:
    """A process that runs, or waits for its turn, as a job of Slurm's."""

    def __init__(self, host: SlurmHost, name: str, watcher: HostWatcher) -> None:
        self._host = host
        self._watcher = watcher
        self._name = name
        self._is_ours = False  # we are ending it
        self._is_taken = False
        self._words = b""
        self.local: LocalProcess | None = None
        self.pid = 0

    def terminate(self) -> None:
        """Slurm sends SIGTERM to it, and SIGKILL when its KillWait is over."""
        self._is_ours = True
        self._host.submitter.cancel(self._name)

    def kill(self) -> None:
        """Slurm kills it; srun ends with it."""
        self._is_ours = True
        self._host.submitter.cancel(self._name, "--signal=KILL", "--full")
        self._host.submitter.cancel(self._name)
        if self.local is not None:
            self._host.submitter.loop.after(_KILL_TIME, self.local.kill)

    def output(self, stream: str, data: bytes) -> None:
        """It wrote something, or srun did."""
        if stream == "stderr" and not self._is_taken:
            words = self._words + data
            self._is_taken = _TAKEN.search(words) is not None
            self._words = words[words.rfind(b"\n") + 1 :][:_LONGEST_MESSAGE]  # of the last line
            if _NODE_FAILED.search(words) and self.local is not None:
                # Srun would wait for a node that does not answer.
                self._host.submitter.loop.after(_NODE_TIME, self.local.kill)
        self._watcher.output(stream, data)

    def announced(self, text: str) -> None:
        """Peers announce nothing."""

    def ended(self, returncode: int) -> None:
        """Its srun ended, with its status."""
        if returncode >= 0:  # else we killed srun, and the guard cancels its remaining jobs
            self._host.submitter.forget(self._name)
        self._returncode = returncode

    def drained(self) -> None:
        """All of its output has arrived, with Slurm's message about its end."""
        # Whatever srun's status: it is 0 if the node failed, or if the process left well.
        if (self._is_taken or self._returncode in _SIGTERM_CODES) and not self._is_ours:
            self._watcher.lost("Slurm preempted or cancelled it, or its node failed")
        else:
            self._host.finish(self._watcher, self._returncode)


class SlurmHost(ScheduledHost):
    """The place of one process: the node that Slurm chooses for it."""

    def __init__(self, submitter: Submitter, name: str, role: Role) -> None:
        super().__init__("slurm", role)
        self.submitter = submitter
        self._name = name
        self._role = role
        self._starts = 0

    def start(self, task: Task, watcher: HostWatcher) -> SlurmProcess | None:
        """Submits it, under a name that no other job has."""
        name = f"{self._name}-{self._starts}"
        self._starts += 1
        process = SlurmProcess(self, name, watcher)
        try:
            process.local = self.submitter.run(name, self._role, task, process)
        except OSError as error:
            watcher.refused(f"srun: {error.strerror}")
            return None
        process.pid = process.local.pid
        return process


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns them without those of a job that the launcher itself may run in."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {k: v for k, v in variables.items() if not k.startswith("SLURM_") or k in kept}


def launch(
    job: Job,
    options: Sequence[str] = (),
    *,
    listen: str | None = None,
    python: str | None = None,
    program: str = "moolink launch",
) -> int:
    """Runs a job to its end by Slurm. Call it on a login node.

    Each process is a job of Slurm's own, with the cores and GPUs of its role. A process that Slurm
    preempts or cancels, or whose node fails, is submitted again: as often as that happens if its
    role is elastic, else as often as the role's ``restarts`` say. Everything else is as for
    :func:`moolink.launch.launch`. The folder of the programs, moolink and the token file must be
    in a file system that all nodes have.

    Args:
        job: the job to run.
        options: texts like ``"partition=gpu,time=2:00:00"``: options of srun.
        listen: ``HOST:PORT`` on which the broker listens here, as the nodes reach it. Default: a
            free port of all interfaces, by this machine's name.
        python: the interpreter on the nodes. Default: the path of this one.
        program: the prefix of the launcher's messages.

    Returns:
        The exit status: 0, or that of the process that ended the job (128 + n for signal n).

    Raises:
        ValueError: the options are invalid.
        moolink.AuthError: the token cannot be read or made.
    """
    arguments = options_of(options)
    if any(role.hosts for role in job.roles):
        raise ValueError("slurm: a role has hosts, but Slurm chooses them: use nodelist=")
    security = local_security(job)
    unique = f"{job.name}-{secrets.token_hex(4)}"
    with (
        closing(Loop()) as loop,
        closing(LocalHost(loop)) as local,
        closing(Submitter(loop, local.machine, arguments)) as submitter,
    ):
        seats = [
            Seat(role, index, SlurmHost(submitter, f"{unique}-{role.name}-{index}", role))
            for role in job.roles
            for index in range(role.count)
        ]
        plan = plan_with_broker_here(
            *(job, local, seats, security),
            program=program,
            python=python or sys.executable,
            listen=listen or "0.0.0.0:0",
            name=socket.gethostname(),
        )
        return Supervisor(loop).run(plan, connect=_require_slurm)


def _require_slurm() -> None:
    for name in ("srun", "scancel"):
        if shutil.which(name) is None:
            raise JobError(f"{name} is not found: run the launcher on a login node of Slurm's")
