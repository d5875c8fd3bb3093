"""Weights to subscribers on several hosts: traffic on the publisher's link."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.weights import OnHosts
from tests.network.hosts import Hosts


def test_the_publisher_s_link_carries_each_version_once(make_hosts: Callable[..., Hosts]) -> None:
    published = OnHosts(make_hosts(5), megabytes=8)
    published.publish()
    for host in (1, 1, 2, 3):
        published.subscribe(host)
    for _ in range(3):
        before = published.sent()
        published.publish()
        assert 1 < published.sent() - before < 1.1
    for host in (1, 4):  # late, on a host that has the version and on one that does not
        before = published.sent()
        published.subscribe(host)
        assert published.sent() - before < 0.05
