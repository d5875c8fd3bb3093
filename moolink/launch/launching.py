"""Running a job: on this machine, or on hosts that are reached by SSH."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing

from moolink.launch.description import Job
from moolink.launch.host import LocalHost
from moolink.launch.loop import Loop
from moolink.launch.plan import plan_with_broker_here
from moolink.launch.settings import local_security
from moolink.launch.shares import Seat
from moolink.launch.ssh_host import Options
from moolink.launch.supervisor import Supervisor
from moolink.launch.wire import HEARTBEAT


def launch(
    job: Job,
    *,
    hosts: Sequence[str] = (),
    ssh: Sequence[str] = ("ssh",),
    python: str | None = None,
    directory: str | None = None,
    broker_host: str | None = None,
    listen: str | None = None,
    lost_after: float = 10.0,
    cores: int | None = None,
    program: str = "moolink launch",
) -> int:
    """Runs a job to its end: on this machine, or on hosts that are reached by SSH.

    The processes' output comes line by line on stdout and stderr, each line with the index of its
    process before it, and its role if there are several. A process that fails is started again as
    often as its role's ``restarts`` say; after that it ends the job, unless its role is elastic.
    The job ends when all processes have ended whose roles are not elastic. In the main thread
    SIGINT, SIGTERM and SIGHUP end it: processes get SIGTERM, and SIGKILL after ``job.grace``.

    Args:
        job: the job to run.
        hosts: each ``HOST`` or ``HOST:COUNT``, with a user before it if need be (``user@HOST``).
            None, and none in the job's roles: this machine.
        ssh: the command that is run for a host, with its options.
        python: the interpreter on the hosts. Default: the path of this one.
        directory: the working directory on the hosts. Default: the path of this one.
        broker_host: one of the hosts, on which the broker runs. Default: this machine.
        listen: ``HOST:PORT`` on which the broker listens. Default: a free port, on the loopback
            interface of this machine or, if there are hosts, on all interfaces.
        lost_after: a host that is not heard of for so many seconds is lost; it then ends its
            processes.
        cores: of this machine, shared out among the processes. Default: all that may be used.
        program: the prefix of the launcher's messages.

    Returns:
        The exit status: 0, or that of the process that ended the job (128 + n for signal n).

    Raises:
        ValueError: the hosts are invalid.
        moolink.AuthError: the token cannot be read or made.
    """
    if not lost_after >= 2 * HEARTBEAT:
        raise ValueError(f"lost_after is {lost_after}; it must be at least {2 * HEARTBEAT:g} s")
    if hosts or any(role.hosts for role in job.roles):
        # Imported here: jobs of one machine need none of it.
        import moolink.launch.ssh_job as remote

        return remote.launch(
            job,
            hosts,
            Options(tuple(ssh), python or sys.executable, directory or os.getcwd(), lost_after),
            broker_host=broker_host,
            listen=listen,
            program=program,
        )
    of_hosts = {"broker_host": broker_host, "python": python, "directory": directory}
    for name, value in of_hosts.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but there are no hosts")
    return _launch_here(job, listen or "127.0.0.1:0", cores, program)


def _launch_here(job: Job, listen: str, cores: int | None, program: str) -> int:
    security = local_security(job)
    with closing(Loop()) as loop, closing(LocalHost(loop, cores)) as here:
        seats = [Seat(role, index, here) for role in job.roles for index in range(role.count)]
        plan = plan_with_broker_here(
            *(job, here, seats, security),
            program=program,
            python=sys.executable,
            listen=listen,
            name="127.0.0.1",
        )
        return Supervisor(loop).run(plan)
