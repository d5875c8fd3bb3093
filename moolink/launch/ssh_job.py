"""A job on several hosts that are reached by SSH."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from moolink.internal.addresses import with_port
from moolink.launch.description import Job
from moolink.launch.host import Host, JobError, LocalHost
from moolink.launch.loop import Loop
from moolink.launch.plan import BrokerPlan, Plan
from moolink.launch.settings import group_of, local_security, token_text
from moolink.launch.shares import parse_hosts, seats_of
from moolink.launch.ssh_host import CONNECT_TIMEOUT, Options, RemoteHost
from moolink.launch.supervisor import Supervisor


def launch(
    job: Job,
    hosts: Sequence[str],
    options: Options,
    *,
    broker_host: str | None,
    listen: str | None,
    program: str,
) -> int:
    """Runs a job on hosts; see :func:`moolink.launch.launch`."""
    targets = _targets(job, hosts)
    if broker_host is not None and broker_host not in targets:
        raise ValueError(f"broker_host is {broker_host!r}; the hosts are {', '.join(targets)}")
    security = local_security(job)
    begin = {"token": token_text(security), "grace": job.grace, "lost_after": options.lost_after}
    with closing(Loop()) as loop, closing(LocalHost(loop)) as local:
        supervisor = Supervisor(loop)
        remote = _make_hosts(loop, local, targets, options, begin, supervisor)
        plan = Plan(
            program=program,
            job=job,
            group=group_of(job),
            python=options.python,
            seats=seats_of(job, hosts, dict(remote)),
            hosts=[*remote.values(), local],
            broker=None if job.broker else _broker(local, remote, broker_host, listen),
            security=security,
        )
        return supervisor.run(plan, lambda: _connect(supervisor, list(remote.values())))


def _targets(job: Job, hosts: Sequence[str]) -> list[str]:
    """All hosts of the job, each once."""
    shares = parse_hosts(hosts, "hosts")
    for role in job.roles:
        shares += parse_hosts(role.hosts, f"role {role.name!r}: hosts")
    return list(dict.fromkeys(share.target for share in shares))


def _make_hosts(
    loop: Loop,
    local: LocalHost,
    targets: Sequence[str],
    options: Options,
    begin: Mapping[str, Any],
    supervisor: Supervisor,
) -> dict[str, RemoteHost]:
    job_id = secrets.token_hex(8)
    seen: set[str] = set()

    def on_up(host: RemoteHost) -> None:
        if host.label in seen and not supervisor.is_stopping:
            supervisor.say(f"host {host.label} is back")
            supervisor.host_is_back(host)
        seen.add(host.label)

    # Two targets may be names of the same machine: each has an agent of its own.
    return {
        target: RemoteHost(
            *(loop, supervisor.screen, local.machine, target, options),
            {**begin, "job": f"{job_id}-{number}"},
            on_up,
            supervisor.noted,
        )
        for number, target in enumerate(targets)
    }


def _connect(supervisor: Supervisor, hosts: Sequence[RemoteHost]) -> None:
    """Brings all hosts up.

    Raises:
        JobError: one cannot be used.
    """
    for host in hosts:
        host.connect()

    def decided() -> bool:
        return all(host.is_up for host in hosts) or any(host.failure for host in hosts)

    supervisor.wait_until(decided, 2 * CONNECT_TIMEOUT, "the hosts did not answer in time")
    if failures := [host.failure for host in hosts if host.failure]:
        raise JobError(failures[0])


def _broker(
    local: LocalHost, remote: Mapping[str, RemoteHost], broker_host: str | None, listen: str | None
) -> BrokerPlan:
    on_host = None if broker_host is None else remote[broker_host]
    interface, _, port = (listen or ":0").rpartition(":")

    def listened() -> str:
        if interface:
            return f"{interface}:{port}"
        seen = [host.launcher_address or "" for host in remote.values()]
        return "[::]:0" if any(":" in address for address in seen) else "0.0.0.0:0"

    def address_for(host: Host, port: int) -> str:
        if interface not in ("", "0.0.0.0", "[::]"):
            return f"{interface}:{port}"
        seen = remote[host.label].launcher_address if on_host is None else on_host.own_address
        if seen is None:
            raise JobError(
                "SSH_CONNECTION is not set on the hosts, so the broker's address is not known: "
                "give it an interface that they reach with --listen HOST:0"
            )
        return with_port(seen, port)

    return BrokerPlan(local if on_host is None else on_host, listened, address_for)
