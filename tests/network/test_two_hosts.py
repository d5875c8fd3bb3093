"""Groups over two hosts: network namespaces that are joined by a router, see hosts.py."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moolink import _core
from tests.network.hosts import Hosts
from tests.network.member import elements
from tests.network.members import BROKER_PORT, all_do, members_on
from tests.waiting import PROCESS_LIMIT, until

MakeHosts = Callable[..., Hosts]
TWO_AND_TWO = {"a": 0, "b": 0, "c": 1, "d": 1}


def test_peers_of_one_host_share_memory_and_those_of_two_do_not(make_hosts: MakeHosts) -> None:
    a, _, _, _ = members_on(make_hosts(2), TWO_AND_TWO)
    for peer in ("b", "c"):
        assert a.ask("echo", peer=peer, value=[1, "x"]) == [1, "x"]
    assert a.ask("path", peer="b") == "shm"
    assert a.ask("path", peer="c") == "tcp"
    assert a.ask("why", peer="c", path="shm") == "on another host (host key differs)"
    if not _core.verbs_info()["usable"]:
        assert a.ask("why", peer="c", path="verbs") == _core.verbs_info()["reason"]


@pytest.mark.parametrize("count", [5, 300_001])
def test_all_reduce_gives_the_same_bits_on_two_hosts(make_hosts: MakeHosts, count: int) -> None:
    members = members_on(make_hosts(2), TWO_AND_TWO)
    for dtype in ("float32", "int32", "float16"):
        answers = all_do(members, "reduce", name="sum", count=count, dtype=dtype)
        assert len({answer["digest"] for answer in answers}) == 1
    answers = all_do(members, "reduce", name="head", count=5)
    expected = sum(elements(name, 5, "float32").astype(np.float64) for name in TWO_AND_TWO)
    np.testing.assert_allclose(answers[0]["head"], expected, rtol=1e-5)


@pytest.mark.parametrize(("compress", "error"), [("bf16", 2**-6), ("int8", 2**-3)])
def test_what_is_compressed_between_hosts_has_the_same_bits_and_a_bounded_error(
    make_hosts: MakeHosts, compress: str, error: float
) -> None:
    members = members_on(make_hosts(2), TWO_AND_TWO)
    answers = all_do(members, "reduce", name="x", count=100_001, compress=compress)
    assert len({answer["digest"] for answer in answers}) == 1
    expected = sum(elements(name, 100_001, "float32")[:8] for name in TWO_AND_TWO)
    head = np.array(answers[0]["head"])
    assert not np.array_equal(head, expected), "it was compressed"
    np.testing.assert_allclose(head, expected, atol=error)


def test_the_members_of_each_host_reduce_in_its_memory(make_hosts: MakeHosts) -> None:
    members = members_on(make_hosts(2), TWO_AND_TWO)
    count = 1_000_000

    def written_by_messages(do: str, **arguments: Any) -> int:
        before = sum(member.ask("written").get("shm", 0) for member in members)
        answers = all_do(members, do, **arguments)
        assert len({answer["digest"] for answer in answers}) == 1
        return sum(member.ask("written").get("shm", 0) for member in members) - before

    # The first operations may begin before all hosts have their segments.
    until(
        lambda: written_by_messages("reduce", name="sum", count=count) < 4 * count / 10,
        "an allreduce whose elements cross no connection within a host",
    )
    all_do(members, "join_training", count=count, members=4)
    until(
        lambda: written_by_messages("train", rounds=2) < 4 * count / 10,
        "rounds whose elements cross no connection within a host",
    )


def test_members_of_several_hosts_that_end_after_an_operation_fail_nobody(
    make_hosts: MakeHosts,
) -> None:
    program = """
        import sys, moolink, numpy as np
        rpc = moolink.Rpc(sys.argv[1])
        rpc.connect(sys.argv[2])
        group = moolink.Group(rpc, sys.argv[3])
        group.wait_for_members(4)
        data = np.ones(4_000_000, np.float32)
        for _ in range(3):  # the first ones may begin before all hosts have their segments
            group.all_reduce("x", data).result(60)
        group.close()
    """
    hosts = make_hosts(2)
    broker = f"{hosts.address(0)}:{BROKER_PORT}"
    hosts.start(0, "moolink.broker", broker, "--first")
    for attempt in range(3):
        members = [
            hosts.start_python(h, "-c", textwrap.dedent(program), name, broker, f"group-{attempt}")
            for name, h in TWO_AND_TWO.items()
        ]
        assert [member.wait(timeout=PROCESS_LIMIT) for member in members] == [0, 0, 0, 0]


def test_an_observer_on_a_host_of_its_own_gets_all_rounds(make_hosts: MakeHosts) -> None:
    members = members_on(make_hosts(3), {**TWO_AND_TWO, "watcher": 2})
    count = 300_000
    training = {"count": count, "members": 4}
    for member in members[:4]:
        member.begin("join_training", **training)
    members[4].begin("join_training", **training, role="observer")
    for member in members:
        member.end()
    answers = all_do(members, "train", rounds=6)
    assert len({answer["digest"] for answer in answers}) == 1


def test_rounds_cross_the_link_of_each_host_once_each_way(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    members = members_on(hosts, TWO_AND_TWO)
    count, rounds = 300_001, 8
    all_do(members, "join_training", count=count, members=len(members))
    all_do(members, "train", rounds=1)  # snapshots and the like are over
    before = [hosts.bytes_received(host) for host in range(2)]
    answers = all_do(members, "train", rounds=rounds)
    assert len({answer["digest"] for answer in answers}) == 1
    expected = np.zeros(8)
    for times in answers[0]["contributions"]:
        of_all = [n * elements(name, count, "float32")[:8] for name, n in times.items()]
        expected += np.sum(of_all, axis=0) / sum(times.values())
    np.testing.assert_allclose(answers[0]["head"], expected, rtol=1e-4, atol=1e-5)
    for host in range(2):
        received = hosts.bytes_received(host) - before[host]
        # Members that sent to members would need twice the bytes of the bucket.
        assert received < 1.4 * rounds * 4 * count


def test_an_operation_whose_hosts_are_parted_is_tried_again_by_those_who_are_left(
    make_hosts: MakeHosts,
) -> None:
    hosts = make_hosts(2, rate="50mbit")
    members = members_on(hosts, TWO_AND_TWO)
    near, far = members[:2], members[2:]
    count = 4_000_000
    for member in members:
        member.begin("reduce", name="x", count=count)
    until(lambda: hosts.bytes_received(1) > 1 << 20, "the first elements")
    hosts.cut(1)
    answers = [member.end() for member in near]
    assert answers[0]["digest"] == answers[1]["digest"]
    expected = elements("a", count, "float32")[:8] + elements("b", count, "float32")[:8]
    np.testing.assert_allclose(answers[0]["head"], expected, rtol=1e-6)
    hosts.mend(1)
    all_do(near, "formed", members=list(TWO_AND_TWO))
    for member in near:
        member.begin("reduce", name="x", count=count, in_common=False)
    answers = [member.end() for member in (*near, *far)]
    assert len({answer["digest"] for answer in answers}) == 1


def test_a_host_whose_link_is_cut_is_evicted_and_comes_back(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    members = members_on(hosts, TWO_AND_TWO)
    near = members[:2]
    hosts.cut(1)
    all_do(near, "formed", members=["a", "b"])
    answers = all_do(near, "reduce", name="without them", count=1000)
    assert answers[0]["digest"] == answers[1]["digest"]
    hosts.mend(1)
    all_do(members, "formed", members=list(TWO_AND_TWO))
    answers = all_do(members, "reduce", name="together again", count=100_000)
    assert len({answer["digest"] for answer in answers}) == 1


def test_three_hosts(make_hosts: MakeHosts) -> None:
    members = members_on(make_hosts(3), {"a": 0, "b": 1, "c": 2, "d": 2})
    answers = all_do(members, "reduce", name="sum", count=100_000)
    assert len({answer["digest"] for answer in answers}) == 1


def test_nothing_is_left_behind(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    pids = [namespace.pid for namespace in hosts._namespaces]
    process = hosts.start(1, "http.server", "80", stderr=subprocess.DEVNULL)
    hosts.close()
    assert process.poll() is not None
    assert not any(Path(f"/proc/{pid}/ns/net").exists() for pid in pids)
    assert os.listdir("/sys/class/net"), "this machine's own interfaces are as they were"
