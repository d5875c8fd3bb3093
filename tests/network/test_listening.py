"""Listening on a host that has IPv4 addresses alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from tests.network.hosts import ROOT, Hosts

LISTEN = """
import moolink
with moolink.Rpc("peer") as rpc:
    try:
        print(rpc.listen("[::]:0"))
    except moolink.Error as error:
        print(error)
"""


def test_listening_on_every_ipv6_address_of_a_host_without_one_says_so(
    make_hosts: Callable[..., Hosts],
) -> None:
    hosts = make_hosts(1)
    command = f"ip -6 address flush dev lo && exec {sys.executable} -c '{LISTEN}'"
    done = subprocess.run(
        hosts.command(0, ["sh", "-c", command]),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "cannot listen on tcp://[::]:0: no interface of this host" in done.stdout
