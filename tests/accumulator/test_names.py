"""Names of groups and accumulators that look alike when they are put side by side."""

from __future__ import annotations

import contextlib

import pytest
import torch

import moolink
from tests.accumulator.loops import connect, parameters, reduce_round


@pytest.mark.parametrize(
    "names",
    [
        [("a/b", "c"), ("a", "b/c")],
        [("a", "b"), ("segments:a", "b")],
        [("a", "b"), ("segments", "a/b"), ("rounds", "a/b"), ("rounds:a", "b")],
    ],
    ids=str,
)
def test_names_with_separators_do_not_collide(
    broker_address: str, names: list[tuple[str, str]]
) -> None:
    with contextlib.ExitStack() as stack:
        rpcs = [stack.enter_context(moolink.Rpc(f"peer-{i}")) for i in range(2)]
        for number, (group, name) in enumerate(names):
            models = [parameters(), parameters()]
            peers = [
                stack.enter_context(
                    moolink.Accumulator(
                        name, model, group=stack.enter_context(moolink.Group(rpc, group))
                    )
                )
                for rpc, model in zip(rpcs, models, strict=True)
            ]
            for rpc in rpcs if number == 0 else []:
                rpc.connect(broker_address)
            for peer in peers:
                peer.set_virtual_batch_size(2)
            connect(peers)
            for model in models:
                for p in model:
                    p.grad = torch.full_like(p, number + 1.0)
            reduce_round(peers, [(model, 1) for model in models])
            for model in models:
                assert all(torch.equal(p.grad, torch.full_like(p, number + 1.0)) for p in model)


def test_one_accumulator_twice_is_refused_by_its_name() -> None:
    with (
        moolink.Rpc("peer") as rpc,
        moolink.Group(rpc, "g") as group,
        moolink.Accumulator("a", parameters(), group=group),
        pytest.raises(ValueError, match="already has a group or accumulator called 'g/a'"),
    ):
        moolink.Accumulator("a", parameters(), group=group)
