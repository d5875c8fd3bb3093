"""Calls by RDMA alone, between two processes of one machine; and which peers use RDMA at all."""

from __future__ import annotations

import json
import sys

import pytest

from tests.verbs.conftest import PATIENCE, InRdma

# Which peers announce an address for RDMA, by the value of MOOLINK_VERBS.
_ANNOUNCED = """
import json, os, moolink

def announced(**options):
    with moolink.Rpc(**options) as rpc:
        rpc.listen(":0")
        return any(address.startswith("verbs://") for address in rpc.addresses())

made = {"token": {}, "named": {"transports": ["verbs", "tcp"]}, "insecure": {"insecure": True}}
seen = {}
for wish in ("", "0", "1"):
    os.environ["MOOLINK_VERBS"] = wish
    seen[wish] = [name for name, options in made.items() if announced(**options)]
print(json.dumps(seen))
"""

pytestmark = pytest.mark.timeout(PATIENCE)


def test_calls_of_every_size_and_the_death_of_their_peer(in_rdma: InRdma) -> None:
    done = in_rdma(sys.executable, "-m", "tests.verbs.calls", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["path"] == "verbs"
    assert seen["ran"] == "maybe"
    # The arrays went as they are, once each.
    assert 2 * (8 << 20) < seen["written"]["verbs"] < 2.2 * (8 << 20) + (2 << 20)


def test_a_peer_with_a_token_uses_rdma_only_if_it_is_told_to(in_rdma: InRdma) -> None:
    done = in_rdma(sys.executable, "-c", _ANNOUNCED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "": ["named", "insecure"],
        "0": ["named"],
        "1": ["token", "named", "insecure"],
    }
