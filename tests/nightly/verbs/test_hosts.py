"""Members on two hosts by RDMA, and what they do when it is lost."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.network.hosts import why_not
from tests.nightly.verbs.conftest import TIMEOUT, InRdma, has_device

pytestmark = pytest.mark.timeout(TIMEOUT)


def _seen(in_rdma: InRdma, module: str, *arguments: str) -> dict[str, Any]:
    if has_device() and (reason := why_not()):  # in the virtual machine all is allowed
        pytest.skip(reason)
    command = (sys.executable, "-m", module, *arguments)
    done = in_rdma(*command, MOOLINK_VERBS="1", MOOLINK_TEST_TIMEOUT="200")
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_reductions_cross_between_hosts_by_rdma(in_rdma: InRdma) -> None:
    seen = _seen(in_rdma, "tests.nightly.verbs.members", "reduce")
    assert all(seen["right"].values()), seen
    assert seen["written"]["verbs"] > 1_000_000 > 10 * seen["written"]["tcp"]


def test_rounds_cross_between_hosts_by_rdma_once_each_way(in_rdma: InRdma) -> None:
    seen = _seen(in_rdma, "tests.nightly.verbs.members", "train")
    assert seen["digests"] == 1
    crossed = 2 * seen["rounds"] * seen["bucket"]
    assert 0.9 * crossed < seen["written"]["verbs"] < 1.5 * crossed
    assert seen["written"]["tcp"] < 0.1 * crossed


@pytest.mark.skipif(has_device(), reason="takes down the link of the device")
def test_a_link_that_is_cut_loses_nothing_and_runs_nothing_twice(in_rdma: InRdma) -> None:
    seen = _seen(in_rdma, "tests.nightly.verbs.faults", "3")
    assert seen["failed"] == []
    assert seen["ran"] == seen["calls"]
    assert seen["most_often"] == 1
    assert seen["reductions"][0] == seen["reductions"][1] > 0
    assert seen["same_epoch"]
    assert seen["written"]["verbs"] > 0
