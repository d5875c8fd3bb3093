"""Environments on a CUDA device: no observation, action or rollout passes through the host."""

from __future__ import annotations

from typing import Any

import pytest

import moolink
from moolink import _core


@pytest.fixture
def on_device(torch: Any) -> Any:
    """The learner."""
    return pytest.importorskip("examples.torch.on_device", reason="the extra `examples`")


def test_only_gradients_reach_the_host(torch: Any, on_device: Any, broker_address: str) -> None:
    from examples.common.options import defaults
    from tests.learning.stays_there import StaysThere

    o = defaults(on_device.OnDeviceOptions, {}, num_peers=1, device="cuda")
    o.num_envs, o.rollout_length, o.hidden_size = 1024, 8, 32
    envs, net = on_device.make(o, o.num_envs, None)
    optimizer = torch.optim.Adam(net.parameters(), lr=o.learning_rate)
    batches = on_device.minibatches(on_device.Player(envs, net, o, torch.device("cuda")), o)
    size = 4 * sum(p.numel() for p in net.parameters())
    with (
        moolink.Rpc("peer") as rpc,
        moolink.Group(rpc, "on device") as group,
        moolink.Accumulator(
            "model", net.parameters(), group=group, checksum_every=0
        ) as accumulator,
    ):
        rpc.connect(broker_address)
        accumulator.set_virtual_batch_size(o.round_size)
        steps = accumulator.steps(optimizer, until=lambda totals: totals["turns"] >= 40)
        next(steps)  # the model of the first view is there
        before = _core.cuda_info()
        turns = 0
        for step in steps:
            turns += 1
            # An operation that waits for the device, as each copy to the host does, raises.
            torch.cuda.set_sync_debug_mode("error")
            try:
                with StaysThere("cuda") as guard:
                    rows, _ = next(batches)
                    on_device.ppo_loss(net, rows, o)[0].backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert rows["observation"].is_cuda
            step.reduce(len(rows["advantage"]), {"turns": 1})
        after = _core.cuda_info()
        assert turns == 40
        assert guard.seen > 0
        assert set(rpc.stats()["copies"].values()) == {0}
        for counter in ("bytes_to_host", "bytes_to_device"):
            assert after[counter] - before[counter] == turns * size


def test_the_guards_notice_reads(torch: Any) -> None:
    x = torch.rand(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for read in (lambda: x.cpu(), lambda: x.sum().item(), lambda: x[x > 0]):
            with pytest.raises(RuntimeError, match="synchroniz"):
                read()
    finally:
        torch.cuda.set_sync_debug_mode("default")
