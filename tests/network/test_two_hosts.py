"""Groups over two hosts: network namespaces that are joined by a router, see hosts.py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.network.hosts import Hosts
from tests.network.member import elements
from tests.network.members import all_do, members_on

MakeHosts = Callable[..., Hosts]
TWO_AND_TWO = {"a": 0, "b": 0, "c": 1, "d": 1}


def test_peers_of_one_host_share_memory_and_those_of_two_do_not(make_hosts: MakeHosts) -> None:
    a, _, _, _ = members_on(make_hosts(2), TWO_AND_TWO)
    for peer in ("b", "c"):
        assert a.ask("echo", peer=peer, value=[1, "x"]) == [1, "x"]
    assert a.ask("path", peer="b") == "shm"
    assert a.ask("path", peer="c") == "tcp"


@pytest.mark.parametrize("count", [5, 300_001])
def test_all_reduce_gives_the_same_bits_on_two_hosts(make_hosts: MakeHosts, count: int) -> None:
    members = members_on(make_hosts(2), TWO_AND_TWO)
    expected = sum(elements(name, 8, "float32") for name in TWO_AND_TWO)
    for dtype in ("float32", "int32"):
        answers = all_do(members, "reduce", name="sum", count=count, dtype=dtype)
        assert len({answer["digest"] for answer in answers}) == 1
    answers = all_do(members, "reduce", name="head", count=5)
    expected = sum(elements(name, 5, "float32").astype(np.float64) for name in TWO_AND_TWO)
    np.testing.assert_allclose(answers[0]["head"], expected, rtol=1e-5)


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
