"""Seats: which process runs on which host, with which cores and GPUs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from moolink.internal.processes import share_cores
from moolink.launch.description import Job, Role
from moolink.launch.host import Host, JobError

# A user or not, a name or an address (in brackets if it has colons), a count or not. No part may
# begin with "-": ssh would take it for an option.
_PLAIN = r"[^\s@:,\[\]-][^\s@:,\[\]]*"
_HOST = re.compile(rf"((?:{_PLAIN}@)?(?:\[[^\s\[\]]+\]|{_PLAIN}))(?::(\d+))?")


@dataclasses.dataclass
class Seat:
    """A place for one process of a role.

    Attributes:
        role: the process's.
        index: in the role.
        host: on which it runs.
        cores: its share of them.
        gpus: those it gets; ``None``: all that the host shows to every process.
    """

    role: Role
    index: int
    host: Host
    cores: int = 1
    gpus: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class HostShare:
    """A host, and how many processes it takes: ``None``, an even share of them."""

    target: str
    count: int | None


def parse_hosts(texts: Sequence[str], where: str) -> list[HostShare]:
    """Reads hosts, each ``HOST`` or ``HOST:COUNT``.

    Raises:
        ValueError: one is not written so, or some have a count and some have none.
    """
    shares = []
    for text in texts:
        match = _HOST.fullmatch(text)
        if match is None or match[2] == "0":
            raise ValueError(
                f"{where}: {text!r} is no host: write HOST or HOST:COUNT, with a user before it "
                "(user@HOST) if need be"
            )
        shares.append(HostShare(match[1], int(match[2]) if match[2] else None))
    if len({share.count is None for share in shares}) > 1:
        raise ValueError(f"{where}: give all of the hosts a count, or none")
    return shares


def seats_on(role: Role, shares: list[HostShare], hosts: dict[str, Host]) -> list[Seat]:
    """Gives the role's processes seats on hosts, and removes these from the hosts' free seats.

    Raises:
        ValueError: the hosts do not take so many.
    """
    if shares[0].count is None:
        each, rest = divmod(role.count, len(shares))
        counts = [each + (position < rest) for position in range(len(shares))]
    else:
        free = [share.count or 0 for share in shares]
        if sum(free) < role.count:
            raise ValueError(
                f"role {role.name!r}: count is {role.count}, but the hosts take {sum(free)} more "
                "processes: give them higher counts, or more hosts"
            )
        counts, left = [], role.count
        for position, share in enumerate(shares):
            counts.append(min(left, free[position]))
            left -= counts[-1]
            shares[position] = HostShare(share.target, free[position] - counts[-1])
    targets = [share.target for share, n in zip(shares, counts, strict=True) for _ in range(n)]
    return [Seat(role, index, hosts[target]) for index, target in enumerate(targets)]


def seats_of(job: Job, given: Sequence[str], hosts: dict[str, Host]) -> list[Seat]:
    """Gives all of a job's processes seats: on their role's hosts, or else on those `given`."""
    common = parse_hosts(given, "hosts")
    seats = []
    for role in job.roles:
        if role.hosts:
            own = parse_hosts(role.hosts, f"role {role.name!r}: hosts")
            seats += seats_on(role, own, hosts)
        elif common:
            seats += seats_on(role, common, hosts)
        else:
            raise ValueError(
                f"role {role.name!r}: hosts are missing: give the role hosts, or all with --hosts"
            )
    return seats


def share_out(seats: Sequence[Seat]) -> None:
    """Divides the cores and GPUs of each host among its seats, once they are known.

    Raises:
        JobError: a host has not as many GPUs as its processes shall get.
    """
    has_gpus = any(seat.role.gpus for seat in seats)
    for host in {id(seat.host): seat.host for seat in seats}.values():
        here = [seat for seat in seats if seat.host is host]
        fixed = sum(seat.role.cores or 0 for seat in here)
        sharing = [seat for seat in here if seat.role.cores is None]
        for seat in here:
            seat.cores = seat.role.cores or 1
        if sharing:
            shares = share_cores(max(0, host.cores - fixed), len(sharing))
            for seat, cores in zip(sharing, shares, strict=True):
                seat.cores = cores
        if not has_gpus:
            continue
        free = list(host.gpus)
        for seat in here:
            if seat.role.gpus > len(free):
                raise JobError(
                    f"role {seat.role.name!r}: gpus is {seat.role.gpus}, but "
                    f"{host.label or 'this machine'} has {len(host.gpus)} in all, which do not "
                    f"suffice for {seat.role.name} {seat.index}"
                )
            seat.gpus, free = free[: seat.role.gpus], free[seat.role.gpus :]
