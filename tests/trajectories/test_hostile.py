"""Calls of a trajectory queue with arguments that no writer sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moolink
from moolink.trajectories import names
from tests.hostile import HUGE, refused, values
from tests.property import examples

LONG = 20.0
PUT = names.PUT.format("unrolls")
ITEM = {"obs": np.ones((3, 2), np.float32), "reward": np.ones(3)}


class Served:
    """A queue, and a peer that puts wrong items."""

    def __init__(self) -> None:
        self.learner, self.rpc = moolink.Rpc("learner"), moolink.Rpc("caller")
        self.rpc.connect(self.learner.listen("127.0.0.1:0")[0])
        self.queue = moolink.TrajectoryQueue(self.learner, "unrolls", max_size=8)
        self.writer = moolink.TrajectoryWriter(self.rpc, "unrolls", "learner")
        self.works()

    def works(self) -> None:
        self.writer.put(ITEM, begin=0)
        batch = self.queue.get(1, timeout=LONG)
        assert batch.data["obs"].shape == (1, 3, 2)
        assert (batch.data["obs"] == 1).all()

    def close(self) -> None:
        for thing in (self.writer, self.queue, self.rpc, self.learner):
            thing.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("begin must be an integer, got None", (ITEM, None, 0)),
    ("begin must be an integer, got 'first'", (ITEM, "first", 0)),
    ("begin must be an integer, got 0.5", (ITEM, 0.5, 1)),
    ("begin must be an integer, got nan", (ITEM, float("nan"), 1)),
    ("begin must be an integer, got array", (ITEM, np.zeros(2), 1)),
    ("end must be an integer, got [1]", (ITEM, 0, [1])),
    ("end must be at most 2**62", (ITEM, 0, 1 << 63)),
    ("begin must be at least", (ITEM, -(1 << 63), 0)),
    ("end, 1, is below begin, 2", (ITEM, 2, 1)),
    ("missing 1 required positional argument: 'end'", (ITEM, 0)),
    ("missing 3 required positional arguments", ()),
    ("positional arguments but", (ITEM, 0, 0, 0)),
    ("the item: expected a dict, got NoneType", (None, 0, 0)),
    ("the item: expected a dict, got list", ([ITEM], 0, 0)),
    ("missing keys ['reward']", ({"obs": ITEM["obs"]}, 0, 0)),
    ("unexpected keys ['more']", ({**ITEM, "more": 1}, 0, 0)),
    ("obs: expected (3, 2) float32", ({**ITEM, "obs": np.ones((4, 2), np.float32)}, 0, 0)),
    ("obs: expected (3, 2) float32", ({**ITEM, "obs": np.ones((3, 2))}, 0, 0)),
    ("obs: expected (3, 2) float32", ({**ITEM, "obs": "text"}, 0, 0)),
    ("obs: expected (3, 2) float32", ({**ITEM, "obs": np.ones((HUGE, 0), np.float32)}, 0, 0)),
    ("reward: expected (3,) float64", ({**ITEM, "reward": {"deep": 1}}, 0, 0)),
]


@pytest.mark.parametrize(("says", "arguments"), WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(
    served: Served, says: str, arguments: tuple[Any, ...]
) -> None:
    stats = served.queue.stats()
    refused(served.rpc, "learner", PUT, says, *arguments)
    assert served.queue.stats() == stats
    served.works()


WRONG_FIRST: list[tuple[str, Any]] = [
    ("reward: dim 1 is out of range", {"reward": np.float32(1)}),
    ("an item must have an array", {"text": "only"}),
    ("an item must have an array", None),
    ("an item must have an array", []),
]


@pytest.mark.parametrize(("says", "tree"), WRONG_FIRST)
def test_a_first_item_that_cannot_be_batched_fixes_nothing(
    served: Served, says: str, tree: Any
) -> None:
    with moolink.TrajectoryQueue(served.learner, "new", dim=1) as queue:
        refused(served.rpc, "learner", names.PUT.format("new"), says, tree, 0, 0)
        with moolink.TrajectoryWriter(served.rpc, "new", "learner") as writer:
            writer.put(ITEM, begin=0)
            assert queue.get(1, timeout=LONG).data["obs"].shape == (3, 1, 2)


def test_a_first_item_without_elements_costs_the_learner_no_memory(served: Served) -> None:
    with moolink.TrajectoryQueue(served.learner, "new") as queue:
        empty = np.ones((HUGE, 0), np.float32)
        served.rpc.sync("learner", names.PUT.format("new"), {"obs": empty}, 0, 0)
        assert queue.get(1, timeout=LONG).data["obs"].shape == (1, HUGE, 0)


def test_a_closed_queue_is_an_error(served: Served) -> None:
    queue = moolink.TrajectoryQueue(served.learner, "closed")
    queue.close()
    with pytest.raises(moolink.NoSuchFunction):
        served.rpc.sync("learner", names.PUT.format("closed"), ITEM, 0, 0)


VALUES = values([ITEM["obs"], ITEM["reward"], np.zeros((0, 2)), ITEM])


@examples(100)
@given(st.lists(VALUES, max_size=4))
def test_whatever_is_put_the_queue_goes_on(served: Served, arguments: list[Any]) -> None:
    call = served.rpc.async_("learner", PUT, *arguments)
    with contextlib.suppress(moolink.RemoteError, OverflowError):
        call.result(LONG)
        served.queue.get(1, timeout=LONG)
    served.works()
