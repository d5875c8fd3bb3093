"""What a group promises of memory, membership and errors at the edges."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from tests.waiting import formed, until

Join = Callable[..., moolink.Group]

LARGE = 250_000  # elements: lent, and through shared memory


def members(join: Join, count: int) -> list[moolink.Group]:
    groups = [join(f"p{i}", sort=i + 1) for i in range(count)]
    formed(groups)
    return groups


def test_an_input_is_released_when_the_operation_has_ended(join: Join) -> None:
    groups = members(join, 2)
    data = [np.ones(LARGE, np.float32) for _ in groups]
    watched = [weakref.ref(array) for array in data]
    futures = [g.all_reduce("x", array) for g, array in zip(groups, data, strict=True)]
    for future in futures:
        future.result(20)
    del futures, future, data
    gc.collect()
    until(lambda: all(array() is None for array in watched), "the inputs to be released")


@pytest.mark.parametrize("elements", [1, LARGE])
def test_what_update_has_not_shown_does_not_reduce(join: Join, elements: int) -> None:
    a, b = members(join, 2)
    waiting = a.all_gather("y", 1)
    b.close()
    with pytest.raises(moolink.GroupChanged):
        waiting.result(20)
    data = np.ones(elements)
    for call in (
        lambda: a.all_reduce("x", data),
        lambda: a.all_reduce("x", {"sum": data}),
        lambda: a.all_reduce("x", data, op=lambda x, y: x + y),
        lambda: a.barrier("x"),
    ):
        with pytest.raises(moolink.GroupChanged, match=r"update\(\)"):
            call()
    assert a.all_reduce("x", 1, on_change="retry").result(20) == 1
    assert a.members() == ["p0", "p1"]
    formed([a])
    assert a.all_reduce("x", 1).result(20) == 1


def test_before_update_nothing_is_shown(join: Join) -> None:
    group = join("lone")
    until(lambda: group.waiting_for() == "", "a view")
    for start in (group.all_reduce, group.reduce_scatter, group.scatter, group.all_gather):
        with pytest.raises(moolink.Closed, match=r"update\(\)"):
            start("x", np.ones(4))
    with pytest.raises(moolink.Closed, match=r"update\(\)"):
        group.barrier("x")


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather", "scatter"])
def test_closed_before_there_was_a_view(join: Join, kind: str) -> None:
    group = join("lone")
    group.close()
    with pytest.raises(moolink.Closed):
        getattr(group, kind)("x", np.ones(4))


def test_a_tree_of_several_dtypes_is_not_retried(join: Join) -> None:
    (group,) = members(join, 1)
    with pytest.raises(ValueError, match="one call for each dtype"):
        group.all_reduce("x", {"count": 1, "loss": 1.5}, on_change="retry")
    assert group.all_reduce("x", {"loss": 1.5}, on_change="retry").result(20) == {"loss": 1.5}


@pytest.mark.parametrize("wait", ["result", "wait", "await"])
def test_the_error_of_a_later_part_is_told_while_the_first_one_waits(join: Join, wait: str) -> None:
    import asyncio

    a, b = members(join, 2)
    future = a.all_reduce("x", [1, 2.0])
    b.all_reduce("x, part 2", np.ones(4))  # differs; the first part is never started

    async def awaited() -> Any:
        return await future

    if wait == "wait":
        assert future.wait(20)
    with pytest.raises(moolink.Error, match="does not fit"):
        if wait == "await":
            asyncio.run(asyncio.wait_for(awaited(), 20))
        else:
            future.result(20)


def test_memory_that_overlaps_otherwise_than_in_place_is_refused(join: Join) -> None:
    (group,) = members(join, 1)
    memory = np.arange(101.0)
    other = np.arange(100.0)
    for data, out in (
        (memory[:-1], memory[1:]),
        (memory[:-1], memory[:-1][::-1]),
        ([other, memory[:-1]], [memory[:-1], other]),
    ):
        with pytest.raises(ValueError, match="overlap in memory"):
            group.all_reduce("x", data, out=out)
    assert group.all_reduce("x", memory, out=memory).result(20) is memory
    halves = {"a": memory[:50], "b": memory[50:100]}
    result = group.all_reduce("x", halves, out={"a": other[:50], "b": other[50:]}).result(20)
    assert (result["b"] == memory[50:100]).all()


@pytest.mark.parametrize("array", ["contiguous", "strided"])
def test_done_means_that_the_result_is_in_its_place(join: Join, array: str) -> None:
    groups = members(join, 2)
    data = [torch.ones(100, 100) for _ in groups]
    if array == "strided":
        data = [whole[:, ::2] for whole in data]
    versions = [tensor._version for tensor in data]
    futures = [g.all_reduce("x", x, inplace=True) for g, x in zip(groups, data, strict=True)]
    until(lambda: all(future.done() for future in futures), "the end")
    for tensor, version in zip(data, versions, strict=True):
        assert (tensor == 2).all()
        assert tensor._version > version, "autograd knows"


@pytest.mark.parametrize(
    "option", [{"compress": "int4"}, {"compress": "none"}, {"on_change": "bogus"}, {"op": ""}]
)
def test_a_wrong_option_is_refused_whatever_the_dtype(join: Join, option: dict[str, Any]) -> None:
    (group,) = members(join, 1)
    for data in (1, np.ones(3), np.ones(3, np.float32)):
        with pytest.raises(ValueError, match=repr(next(iter(option.values())))):
            group.all_reduce("x", data, **option)
    with pytest.raises(TypeError, match="only arrays, tensors and numbers"):
        group.all_reduce("x", None)


def test_what_was_cancelled_does_not_fill_the_others_memory(join: Join) -> None:
    a, b = members(join, 2)
    data = np.ones(16_000, np.float32)
    for n in range(200):
        a.all_reduce(f"never {n}", data).cancel()
    # Messages come in order: after this result, b knows of all that a has cancelled.
    futures = [g.all_reduce("fresh", data) for g in (a, b)]
    assert all((future.result(20) == 2).all() for future in futures)
    with pytest.raises(moolink.CancelledError):
        b.all_reduce("never 7", data).result(20)


@pytest.mark.parametrize("elements", [1, LARGE])
def test_a_time_out_names_the_member_that_did_not_start(join: Join, elements: int) -> None:
    a, b, _ = members(join, 3)
    a.set_timeout(10.0)
    b.set_timeout(1.0)  # it waits for rank 0 only, and does not know of c
    futures = [g.all_reduce("x", np.ones(elements)) for g in (a, b)]
    for future in futures:
        with pytest.raises(moolink.TimeoutError, match="p0 waits for: p2"):
            future.result(9)


def test_a_time_out_names_rank_0_if_that_did_not_start(join: Join) -> None:
    _, b = members(join, 2)
    b.set_timeout(1.0)
    with pytest.raises(moolink.TimeoutError, match="p1 waits for: p0"):
        b.all_reduce("x", np.ones(LARGE)).result(9)


def test_all_callbacks_are_told_of_a_change(join: Join) -> None:
    group = join("lone")
    told: list[str] = []

    def fails(group: moolink.Group) -> None:
        told.append("first")
        raise KeyError("no such thing")

    group.on_change(fails)
    group.on_change(lambda group: told.append("second"))

    def updated() -> bool:
        try:
            return group.update()
        except KeyError:
            return True

    until(updated, "the first view")
    assert told == ["first", "second"]
