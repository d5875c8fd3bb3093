"""Groups as moolib's programs use them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Iterator

import moolib
import pytest
import torch

import moolink
from tests.waiting import TIMEOUT, until


@pytest.fixture
def group() -> Iterator[moolib.Group]:
    """A group of one."""
    with (
        moolib.Broker() as broker,
        moolib.Rpc("member", timeout=20) as rpc,
        moolib.Group(rpc, "group") as made,
    ):
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        made.set_timeout(0.1)  # taken as 1 s
        until(lambda: made.update() or made.active(), "the group")
        yield made


@pytest.mark.parametrize("kind", [moolink.Group, moolib.Group])
def test_op_is_the_third_argument(kind: type[moolink.Group]) -> None:
    parameters = list(inspect.signature(kind.all_reduce).parameters.values())
    assert [p.name for p in parameters[1:4]] == ["name", "data", "op"]
    assert parameters[3].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_reductions(group: moolib.Group) -> None:
    reduction = group.all_reduce("a", {"x": 2}, lambda a, b: a)
    assert isinstance(reduction, moolib.AllReduce)
    assert reduction.result() == {"x": 2}
    assert group.all_reduce("b", torch.ones(2)).result().tolist() == [1, 1]
    assert group.all_reduce("c", torch.ones(2), op="max").result().tolist() == [1, 1]


def test_a_loop_that_tries_again_at_once_gives_others_a_turn(group: moolib.Group) -> None:
    with moolib.Rpc("alone") as rpc, moolib.Group(rpc, "nobody") as nobody:
        failed = nobody.all_reduce("a", torch.ones(2))  # moolib's error is the future's
    assert failed.done()
    assert failed.wait(0)
    assert isinstance(failed.exception(), moolink.Error)
    with pytest.raises(moolink.Closed):
        failed.result()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> None:
        task = asyncio.ensure_future(others())
        reduction = group.all_reduce("a", torch.ones(2))
        assert reduction.wait(TIMEOUT)
        for _ in range(100):
            assert (await reduction).tolist() == [1, 1]
            with pytest.raises(moolink.Closed):
                await failed
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    assert turns >= 190


def test_a_reduction_that_fails_keeps_nobody_alive() -> None:
    class Trainer:
        """It keeps the future, as moolib's statistics do."""

        def __init__(self) -> None:
            self.rpc = moolib.Rpc("trainer")
            self.group = moolib.Group(self.rpc, "group")

        def reduce(self) -> None:
            """There is no broker, so it fails."""
            self.future = self.group.all_reduce("a", torch.ones(2))
            try:
                self.future.result()
            except moolink.Closed:
                return
            pytest.fail("it has a result")

    gc.disable()
    try:
        trainer = Trainer()
        trainer.reduce()
        gone = weakref.ref(trainer.rpc)
        del trainer
        until(lambda: gone() is None, "the end of the peer")
    finally:
        gc.enable()
