"""Calls by RDMA alone, between two processes of one machine; and which peers use RDMA at all."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cuda.fake_driver import FAKE_ARRAY
from tests.nightly.verbs.conftest import TIMEOUT, InRdma

# Which peers announce an address for RDMA, by the value of MOOLINK_VERBS.
_ANNOUNCED = """
import json, os, moolink

def announced(**options):
    with moolink.Rpc(**options) as rpc:
        rpc.listen(":0")
        return any(address.startswith("verbs://") for address in rpc.addresses())

made = {"token": {}, "named": {"transports": ["verbs", "tcp"]}, "insecure": {"insecure": True}}
seen = {}
for setting in ("", "0", "1"):
    os.environ["MOOLINK_VERBS"] = setting
    seen[setting] = [name for name, options in made.items() if announced(**options)]
print(json.dumps(seen))
"""

# Calls with arrays on a fake CUDA device, by RDMA alone.
_FROM_DEVICE = """
    import json
    with (
        moolink.Rpc("near", transports=["verbs"], timeout=60) as near,
        moolink.Rpc("far", transports=["verbs"]) as far,
    ):
        far.define("echo", lambda value: value)
        near.connect(far.listen("verbs://:0")[0])
        for size in (10, 100_000, 1_000_000, 50_000, 1_000_000):
            array = np.arange(size, dtype=np.float32)
            received = near.sync("far", "echo", DeviceArray(array))
            assert (received == array).all(), size
        print(json.dumps(near.stats()["cuda"]))
    """

pytestmark = pytest.mark.timeout(TIMEOUT)


def test_calls_of_every_size_and_the_death_of_their_peer(in_rdma: InRdma) -> None:
    done = in_rdma(sys.executable, "-m", "tests.nightly.verbs.calls", "8")
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


@pytest.mark.parametrize("gpudirect", ["", "1"])
def test_arrays_of_a_device_that_rdma_cannot_read_go_through_the_host(
    in_rdma: InRdma, transport_tests: Path, gpudirect: str
) -> None:
    program = "".join(map(textwrap.dedent, (FAKE_ARRAY, _FROM_DEVICE)))
    fake_driver = transport_tests.parent / "fake_cuda"
    done = in_rdma(
        sys.executable,
        "-c",
        program,
        LD_LIBRARY_PATH=str(fake_driver),
        MOOLINK_VERBS_GPUDIRECT=gpudirect,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # The first one that is large enough was captured on the device: soft-RoCE knows no dmabuf, and
    # from then on they are captured in the host's memory.
    assert seen["bytes_within_device"] == (4_000_000 if gpudirect else 0)
    assert seen["bytes_to_host"] == 4 * (10 + 100_000 + 1_000_000 + 50_000 + 1_000_000)
