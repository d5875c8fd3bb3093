"""How a job is run: where its processes and its broker run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from moolink.internal.addresses import with_port
from moolink.launch.description import Job
from moolink.launch.host import Host
from moolink.launch.settings import group_of
from moolink.launch.shares import Seat


@dataclasses.dataclass(frozen=True)
class BrokerPlan:
    """Where the job's broker runs.

    Attributes:
        host: on which it is started.
        listen: the address it listens on, without a port that is taken: ``HOST:0``.
        address_for: its address as processes on a host reach it, given the port.
    """

    host: Host
    listen: Callable[[], str]
    address_for: Callable[[Host, int], str]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a job is run.

    Attributes:
        program: the prefix of messages.
        job: the job to run.
        group: name of its group.
        python: the interpreter of scripts and modules.
        seats: a place for each process.
        hosts: all of them.
        broker: ``None``: the job has one already.
        security: environment variables that say where the token lies.
    """

    program: str
    job: Job
    group: str
    python: str
    seats: Sequence[Seat]
    hosts: Sequence[Host]
    broker: BrokerPlan | None
    security: Mapping[str, str]


def plan_with_broker_here(
    job: Job,
    here: Host,
    seats: Sequence[Seat],
    security: Mapping[str, str],
    *,
    program: str,
    python: str,
    listen: str,
    name: str,
) -> Plan:
    """Returns the plan of a job whose broker, if it needs one, runs beside the launcher.

    Args:
        here: the launcher's machine.
        listen: where the broker listens.
        name: this machine's name or address, for a broker that listens on all interfaces.
    """
    host = listen.rpartition(":")[0]
    reached = name if host in ("", "0.0.0.0", "[::]") else host
    broker = BrokerPlan(here, lambda: listen, lambda _, port: with_port(reached, port))
    hosts = list(dict.fromkeys([here, *(seat.host for seat in seats)]))
    has_broker = job.broker is not None
    return Plan(
        program, job, group_of(job), python, seats, hosts, None if has_broker else broker, security
    )
