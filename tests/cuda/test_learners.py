"""Data of a learner on its way to a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest


def test_the_host_does_not_wait_for_copies_to_the_device(torch: Any) -> None:
    common = pytest.importorskip("examples.torch.common", reason="the extra `examples`")
    unroll = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    part = unroll[:, 3:7]  # some environments of an unroll
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy = common.to_device(part, "cuda")
        unroll.zero_()  # the next steps of the environments
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = torch.arange(60, dtype=torch.float32).reshape(5, 12)[:, 3:7]
    assert torch.equal(copy.cpu(), wanted)
