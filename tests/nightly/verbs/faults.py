"""Takes the link of a soft-RoCE device down and up again, under load of calls and reductions.

    MOOLINK_VERBS=1 python -m tests.nightly.verbs.faults [COUNT]

Two members on two hosts (network namespaces) use this machine's one device, and reach one another
by tcp on another link, too. Prints one JSON object with what was seen; times are those of this
machine's clock, in seconds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from moolink import _core
from tests.network.hosts import Hosts
from tests.network.members import RemoteMember, all_do, members_on

# Of each member, by RDMA, before the link is cut again.
CALLS_BETWEEN = 8


def _interface() -> str:
    """The network interface of the device; of an emulated one only, which nothing else uses."""
    device = _core.verbs_info()["chosen"].split()[0]
    if not device.startswith("rxe"):
        raise SystemExit(f"the device is not an emulated one: '{device}'")
    places = Path(f"/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs")
    return (places / "0").read_text().strip()


def _set_link(interface: str, state: str) -> float:
    begin = time.monotonic()
    subprocess.run(["ip", "link", "set", interface, state], check=True)
    return begin


def _reached_by(members: list[RemoteMember], path: str) -> list[float]:
    """Waits until the two reach one another by this path; returns when each one did."""
    one, other = members
    one.begin("formed_path", peer=other.name, path=path)
    other.begin("formed_path", peer=one.name, path=path)
    return [one.end(), other.end()]


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)}


def main(count: int) -> None:
    """Cuts the link so many times."""
    interface = _interface()
    hosts = Hosts(2)
    tcp_took_over, calls_went_on, rdma_came_back = [], [], []
    try:
        members = members_on(hosts, {"a": 0, "b": 1}, "tests.nightly.verbs.loaded_member")
        members[0].ask("begin_load", peer="b")
        members[1].ask("begin_load", peer="a")
        mended = time.monotonic()
        epoch = members[0].ask("epoch")
        for _ in range(count):
            by_rdma = _reached_by(members, "verbs")
            rdma_came_back += [moment - mended for moment in by_rdma]
            all_do(members, "calls_done", after=max(by_rdma), count=CALLS_BETWEEN)
            cut = _set_link(interface, "down")
            tcp_took_over += [moment - cut for moment in _reached_by(members, "tcp")]
            calls_went_on += [end - cut for end in all_do(members, "calls_done", after=cut)]
            mended = _set_link(interface, "up")
        rdma_came_back += [moment - mended for moment in _reached_by(members, "verbs")]
        all_do(members, "end_load")
        loads = all_do(members, "loaded")
        same_epoch = epoch == members[0].ask("epoch")
        written = members[0].ask("written")
    finally:
        hosts.close()
    print(
        json.dumps(
            {
                "cuts": count,
                "tcp_took_over": _summary(tcp_took_over),
                "calls_went_on": _summary(calls_went_on),
                "rdma_came_back": _summary(rdma_came_back[2:]),
                "calls": [load["calls"] for load in loads],
                "ran": [load["ran"] for load in reversed(loads)],
                "most_often": max(load["most_often"] for load in loads),
                "reductions": [load["reductions"] for load in loads],
                "failed": [text for load in loads for text in load["failed"]],
                "same_epoch": same_epoch,
                "written": written,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
