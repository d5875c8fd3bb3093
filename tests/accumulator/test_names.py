"""Names of groups and accumulators that look alike when they are put side by side."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

import moolink
import moolink.accumulate.accumulator
from tests.accumulator.loops import connect, parameters, reduce_round


@pytest.mark.parametrize(
    "names",
    [
        [("a/b", "c"), ("a", "b/c")],
        [("a:b", "c"), ("a", "b:c")],
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


@pytest.mark.parametrize("units", [None, 2])
def test_others_may_ask_a_member_as_soon_as_it_is_one(
    broker_address: str, monkeypatch: pytest.MonkeyPatch, units: int | None
) -> None:
    """A leader at its end takes a peer without the function for one without an accumulator."""
    made = []
    with moolink.Rpc("asking") as asking, moolink.Rpc("peer") as rpc:
        asking.connect(broker_address)
        rpc.connect(broker_address)

        def make_core(kind: type, *arguments: object) -> object:
            made.append(asking.sync("peer", "moolink.parting:'g':'a'", "asking", -1))
            made.append(asking.sync("peer", "moolink.parameters:'g':'a'", "asking", None))
            return kind(*arguments)

        for kind in ("AccumulatorCore", "OrderedCore"):
            real = getattr(moolink.accumulate.accumulator, kind)
            monkeypatch.setattr(
                moolink.accumulate.accumulator, kind, functools.partial(make_core, real)
            )
        with (
            moolink.Group(rpc, "g") as group,
            moolink.Accumulator("a", parameters(), group=group, units=units),
        ):
            ended, (_, framework, _) = made
            assert ended is True
            assert framework == "torch"


def test_an_accumulator_that_cannot_be_made_leaves_its_name_free(broker_address: str) -> None:
    with moolink.Rpc("peer") as rpc, moolink.Group(rpc, "g") as group:
        with pytest.raises(ValueError, match="units"):
            moolink.Accumulator("a", parameters(), group=group, units=0)
        moolink.Accumulator("a", parameters(), group=group).close()
        moolink.Accumulator("a", parameters(), group=group).close()
