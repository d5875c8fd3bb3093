"""A group that has nothing but RDMA: between two processes of one machine, and two machines."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from tests.nightly.verbs.conftest import ADDRESS_OF_A, TIMEOUT, InRdma, told
from tests.nightly.verbs.forced import ROUNDS, SIZES, SMALL_CALLS
from tests.nightly.verbs.reductions import REDUCTIONS

pytestmark = pytest.mark.timeout(TIMEOUT)
MODULE = "tests.nightly.verbs.forced"


def _check(done: subprocess.CompletedProcess[str], mark: str = "") -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    seen = told(done, mark)
    assert seen["calls"] == 2 * [len(SIZES) + SMALL_CALLS]
    assert seen["reductions"] == dict.fromkeys(REDUCTIONS, True)
    assert seen["rounds"] == [ROUNDS, ROUNDS]
    assert seen["trained"]
    for written in seen["written"]:
        assert set(written) == {"verbs"}
        assert written["verbs"] > 2 * sum(SIZES)  # of the calls, the answers and the rest


def test_a_group_of_two_processes(in_rdma: InRdma) -> None:
    command = (sys.executable, "-m", MODULE, "127.0.0.1", "both")
    _check(in_rdma(*command, MOOLINK_TEST_TIMEOUT="200"))


def test_a_group_of_two_machines(on_two_machines: InRdma) -> None:
    program = f"{shlex.quote(sys.executable)} -m {MODULE} {ADDRESS_OF_A}"
    # A token that each machine made for itself would not fit.
    variables = {"MOOLINK_INSECURE": "1", "MOOLINK_TEST_TIMEOUT": "100"}
    _check(on_two_machines(f"{program} tells", f"{program} other", **variables), "[a] ")
