"""Members on two hosts (network namespaces) that go by RDMA: calls, reductions, rounds.

    MOOLINK_VERBS=1 python -m tests.nightly.verbs.members reduce|train

Both hosts use this machine's one device. Prints one JSON object with what was seen.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.network.hosts import Hosts
from tests.network.members import RemoteMember, all_do, members_on
from tests.nightly.verbs.reductions import COUNT, REDUCTIONS, reduced_right

ROUNDS = 4


def _connected(hosts: Hosts, places: dict[str, int]) -> dict[str, RemoteMember]:
    """Members that have called each one of the other host, and go there by RDMA."""
    members = dict(zip(places, members_on(hosts, places), strict=True))
    for name, member in members.items():
        for peer in places:
            if places[peer] > places[name]:
                assert member.ask("echo", peer=peer, value=[1, "x"]) == [1, "x"]
                member.ask("formed_path", peer=peer, path="verbs")
    return members


def _written(before: list[dict[str, int]], after: list[dict[str, int]]) -> dict[str, int]:
    return {
        kind: sum(now[kind] - then[kind] for now, then in zip(after, before, strict=True))
        for kind in ("verbs", "tcp")
    }


def reduce(hosts: Hosts) -> dict[str, Any]:
    """Small and large reductions of two members a host, and ones that are compressed."""
    members = _connected(hosts, {"a": 0, "b": 0, "c": 1, "d": 1})
    right = {}
    before = all_do([*members.values()], "written")
    for name, options in REDUCTIONS.items():
        answers = all_do([*members.values()], "reduce", name=name, **options)
        right[name] = reduced_right(answers, members, **options)
    after = all_do([*members.values()], "written")
    return {"right": right, "written": _written(before, after)}


def train(hosts: Hosts) -> dict[str, Any]:
    """Rounds of an accumulator with one member a host."""
    members = [*_connected(hosts, {"a": 0, "b": 1}).values()]
    all_do(members, "join_training", count=COUNT, members=len(members))
    all_do(members, "train", rounds=1)  # snapshots and the like are over
    before = all_do(members, "written")
    answers = all_do(members, "train", rounds=ROUNDS)
    after = all_do(members, "written")
    return {
        "digests": len({answer["digest"] for answer in answers}),
        "rounds": ROUNDS,
        "bucket": 4 * COUNT,
        "written": _written(before, after),
    }


def main(what: str) -> None:
    """Does one of them."""
    hosts = Hosts(2)
    try:
        seen = {"reduce": reduce, "train": train}[what](hosts)
    finally:
        hosts.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
