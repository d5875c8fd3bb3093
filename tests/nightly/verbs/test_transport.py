"""The transport verbs on an RDMA device: conformance, grants, refusals and faults."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.nightly.verbs.conftest import ADDRESS_OF_A, TIMEOUT, InRdma

pytestmark = pytest.mark.timeout(TIMEOUT)
# Without a device the program has none of the tests that need one, and passes.
AT_LEAST = 40
APART = 7  # tests of two processes


def _half(transport_tests: Path, role: str) -> str:
    variables = f"MOOLINK_TEST_TIMEOUT=100 MOOLINK_TEST_APART={shlex.quote(role)}"
    return f"{variables} {shlex.quote(str(transport_tests))} 'verbs apart: '"


def test_the_transport_keeps_to_what_every_transport_must_do(
    in_rdma: InRdma, transport_tests: Path
) -> None:
    done = in_rdma(transport_tests, "verbs: ", MOOLINK_TEST_TIMEOUT="300")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(r"(\d+) passed, 0 failed", done.stdout)
    assert counts is not None, done.stdout + done.stderr
    assert int(counts[1]) >= AT_LEAST, done.stdout


def test_the_transport_between_two_processes(in_rdma: InRdma, transport_tests: Path) -> None:
    listens, dials = (_half(transport_tests, f"{role} 127.0.0.1") for role in ("listen", "dial"))
    done = in_rdma("bash", "-c", f"{listens} & {dials}; dialled=$?; wait $! && exit $dialled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{APART} passed, 0 failed") == 2, done.stdout + done.stderr


def test_the_transport_between_two_machines(on_two_machines: InRdma, transport_tests: Path) -> None:
    roles = [_half(transport_tests, f"{role} {ADDRESS_OF_A}") for role in ("listen", "dial")]
    done = on_two_machines(*roles)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{APART} passed, 0 failed") == 2, done.stdout + done.stderr


def test_peers_outlive_the_failures_of_their_device(in_rdma: InRdma, peer_tests: Path) -> None:
    done = in_rdma(peer_tests, "verbs: ", MOOLINK_VERBS_GPUDIRECT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b3 passed, 0 failed", done.stdout), done.stdout + done.stderr


def test_doctor_names_the_device(in_rdma: InRdma) -> None:
    done = in_rdma(sys.executable, "-m", "moolink", "doctor", "--json")
    found = {item["topic"]: item for item in json.loads(done.stdout)}["RDMA"]
    assert found["state"] == "ok", done.stdout + done.stderr
    assert re.search(r"port \d+, (RoCE v2, GID|InfiniBand, LID) \d+", found["text"])
    assert "not encrypted; MOOLINK_VERBS=1 enables it" in found["text"]
