"""The collectives of a group: values, types, memory, errors."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from moolink.group import GroupFuture
from tests.waiting import formed, until

Join = Callable[..., moolink.Group]
Groups = list[moolink.Group]

SMALL, LARGE = 30, 90_000  # elements: over messages, and through shared memory


@pytest.fixture
def three(join: Join) -> Groups:
    """Three members, in the order of their ranks."""
    groups = [join("a", sort=1), join("b", sort=2), join("c", sort=3)]
    formed(groups)
    assert [g.rank() for g in groups] == [0, 1, 2]
    return groups


@pytest.fixture(params=[SMALL, LARGE], ids=["small", "large"])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def run(groups: Groups, begin: Callable[[moolink.Group, int], GroupFuture]) -> list[Any]:
    """The results of an operation that every member begins."""
    futures = [begin(group, rank) for rank, group in enumerate(groups)]
    return [future.result(20) for future in futures]


def given(count: int, rank: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return (np.arange(count) % 7 + rank + 1).astype(dtype)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("sum", "float32"),
        ("sum", "int64"),
        ("mean", "float64"),
        ("min", "int32"),
        ("max", "float16"),
        ("prod", "float32"),
        ("and", "uint8"),
        ("or", "int16"),
        ("xor", "uint64"),
        ("or", "bool"),
        ("sum", "complex64"),
    ],
)
def test_all_reduce(three: Groups, count: int, op: Any, dtype: str) -> None:
    inputs = [given(count, rank, dtype) for rank in range(3)]
    results = run(three, lambda g, rank: g.all_reduce("x", inputs[rank], op=op))
    combine = {
        "sum": np.add,
        "mean": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "prod": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    expected = combine(combine(inputs[0], inputs[1]), inputs[2])
    if op == "mean":
        expected = expected / 3
    for result in results:
        assert result.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(result, expected)
        result[...] = 0  # it is the user's own


def test_reduce_scatter(three: Groups, count: int) -> None:
    inputs = [given(6 * count, rank).reshape(3 * 2, count) for rank in range(3)]
    results = run(three, lambda g, rank: g.reduce_scatter("x", inputs[rank], op="max"))
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, inputs[2][2 * rank : 2 * rank + 2])


def test_all_gather(three: Groups, count: int) -> None:
    inputs = [given(count, rank).reshape(-1, 10) for rank in range(3)]
    for result in run(three, lambda g, rank: g.all_gather("x", inputs[rank])):
        np.testing.assert_array_equal(result, np.stack(inputs))


def test_all_gather_of_numbers(three: Groups) -> None:
    for result in run(three, lambda g, rank: g.all_gather("x", {"score": 1.5 * rank})):
        assert result["score"].tolist() == [0.0, 1.5, 3.0]


@pytest.mark.parametrize("root", [0, 2, "b"])
def test_broadcast(three: Groups, count: int, root: int | str) -> None:
    inputs = [given(count, rank) for rank in range(3)]
    source = 1 if root == "b" else int(root)
    for result in run(three, lambda g, rank: g.broadcast("x", inputs[rank], root=root)):
        np.testing.assert_array_equal(result, inputs[source])
    assert inputs[0][0] == 1, "inputs are untouched"


@pytest.mark.parametrize("root", [0, 1])
def test_gather(three: Groups, count: int, root: int) -> None:
    inputs = [given(count, rank) for rank in range(3)]
    results = run(three, lambda g, rank: g.gather("x", inputs[rank], root=root))
    for rank, result in enumerate(results):
        if rank == root:
            np.testing.assert_array_equal(result, np.stack(inputs))
        else:
            assert result is None


@pytest.mark.parametrize("root", [0, 2])
def test_scatter(three: Groups, count: int, root: int) -> None:
    everything = given(3 * count, 5).reshape(3, count)
    template = np.empty(count, np.float32)
    results = run(
        three,
        lambda g, rank: g.scatter("x", everything if rank == root else template, root=root),
    )
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, everything[rank])


def test_barrier(three: Groups) -> None:
    early = [g.barrier("start") for g in three[:2]]
    assert not early[0].done()
    assert not early[1].wait(0.05)
    late = three[2].barrier("start")
    assert [f.result(20) for f in (*early, late)] == [None, None, None]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "gather", "scatter"])
def test_trees_of_several_dtypes(three: Groups, kind: str) -> None:
    def leaf(rank: int, dtype: Any, *shape: int) -> torch.Tensor:
        stacked = (3, *shape) if kind == "scatter" and rank == 0 else shape
        return torch.full(stacked, rank + 1, dtype=dtype)

    def data(rank: int) -> dict[str, Any]:
        return {
            "half": leaf(rank, torch.bfloat16, 5),
            "pair": (leaf(rank, torch.float32, 2, 3), leaf(rank, torch.float32, 40_000)),
            "number": np.full(3, rank + 1.0) if kind == "scatter" and rank == 0 else rank + 1.0,
        }

    results = run(three, lambda g, rank: getattr(g, kind)("x", data(rank)))
    if kind == "gather":
        assert results[1:] == [None, None]
        results = results[:1]
    for result in results:
        half, (small, large) = result["half"], result["pair"]
        assert (half.dtype, small.dtype) == (torch.bfloat16, torch.float32)
        if kind in ("all_gather", "gather"):
            assert half.shape == (3, 5)
            assert small.shape == (3, 2, 3)
            assert large[:, 7].tolist() == [1.0, 2.0, 3.0]
            assert result["number"].tolist() == [1.0, 2.0, 3.0]
        else:
            value = 6.0 if kind == "all_reduce" else 1.0
            assert half.tolist() == [value] * 5
            assert small.shape == (2, 3)
            assert (large == value).all()
            assert result["number"] == value


@pytest.mark.parametrize("array", ["contiguous", "strided", "tree"])
def test_in_place(three: Groups, count: int, array: str) -> None:
    def make(rank: int) -> Any:
        if array == "tree":
            return [np.full(count, rank + 1.0), torch.full((3,), rank + 1.0, dtype=torch.float64)]
        whole = np.full((2, count), rank + 1.0)
        return whole[0] if array == "contiguous" else whole.T

    data = [make(rank) for rank in range(3)]
    futures = [g.all_reduce("x", data[rank], inplace=True) for rank, g in enumerate(three)]
    for future, tree in zip(futures, data, strict=True):
        assert future.wait(20)
        for leaf in tree if array == "tree" else [tree]:
            assert (leaf == 6.0).all()
        assert future.result() is tree


def test_out(three: Groups, count: int) -> None:
    outs = [{"x": torch.empty(3, count)} for _ in three]
    results = run(
        three, lambda g, rank: g.all_gather("x", {"x": torch.ones(count)}, out=outs[rank])
    )
    for out, result in zip(outs, results, strict=True):
        assert result is out
        assert (out["x"] == 1).all()


def test_in_place_and_retry(three: Groups, count: int) -> None:
    data = [np.ones(count) for _ in range(3)]
    futures = [
        g.all_reduce("x", data[rank], inplace=True, on_change="retry")
        for rank, g in enumerate(three[:2])
    ]
    three[2].close()
    for rank, future in enumerate(futures):
        assert future.result(20) is data[rank]
        assert (data[rank] == 2).all()


def test_results_use_memory_again(three: Groups) -> None:
    data = np.ones(LARGE, np.float32)
    gc.disable()  # nothing waits for a collection
    try:
        futures = [g.all_reduce("x", data) for g in three]
        results = [future.result(20) for future in futures]
        watched = [weakref.ref(result) for result in results]
        del futures, results
        assert [reference() for reference in watched] == [None] * 3
    finally:
        gc.enable()


def test_many_in_flight_started_in_different_orders(three: Groups) -> None:
    names = [f"op-{i}" for i in range(12)]
    futures: dict[tuple[int, str], GroupFuture] = {}
    for rank, group in enumerate(three):
        for i, name in enumerate(names[rank * 4 :] + names[: rank * 4]):
            size = LARGE if (names.index(name) % 2) else SMALL
            futures[rank, name] = group.all_reduce(name, np.full(size, float(i >= 0)))
    for future in futures.values():
        assert (future.result(20) == 3.0).all()


def test_a_callback_comes_once_with_the_outputs_written(three: Groups) -> None:
    ended: queue.Queue[tuple[GroupFuture, float]] = queue.Queue()
    outs = [{"a": np.zeros(3, "f4"), "b": np.zeros(2, "i8")} for _ in three]
    for group, out in zip(three, outs, strict=True):
        data = {"a": np.ones(3, "f4"), "b": np.full(2, 2)}
        future = group.all_reduce("called back", data, out=out)
        future.add_done_callback(lambda f, out=out: ended.put((f, float(out["a"].sum()))))
    for _ in three:
        future, total = ended.get(timeout=20)
        assert future.done()
        assert total == 9
        assert future.result()["b"].tolist() == [6, 6]
        assert future.cancel() is False
    three[0].all_reduce("empty", {}).add_done_callback(lambda f: ended.put((f, 0.0)))
    assert ended.get(timeout=20)[0].result() == {}
    assert ended.empty()
    waits = three[0].all_reduce("of one alone", np.ones(3))
    waits.add_done_callback(lambda f: ended.put((f, 0.0)))
    assert waits.cancel() is True
    assert isinstance(ended.get(timeout=20)[0].exception(), moolink.CancelledError)


def test_cancelled_in_the_middle_the_next_ones_are_right(three: Groups) -> None:
    for trial in range(10):
        data = [np.full(500_000, rank + 1.0, np.float32) for rank in range(3)]
        futures = [g.all_reduce("x", data[rank]) for rank, g in enumerate(three)]
        if trial % 2:
            futures[trial % 3].wait(0.0005 * trial)
        futures[trial % 3].cancel()
        data[trial % 3][:] = np.nan  # the user's again
        for future in futures:
            assert future.wait(20)
            if future.exception() is None:
                assert (future.result() == 6.0).all()
            else:
                assert isinstance(future.exception(), moolink.CancelledError)
        after = run(three, lambda g, rank: g.all_reduce("y", np.ones(LARGE, np.float32)))
        assert all((result == 3.0).all() for result in after)


def test_a_member_that_leaves_ends_what_waits_for_it(three: Groups) -> None:
    futures = [g.all_reduce("x", np.ones(LARGE)) for g in three[:2]]
    gathered = [g.all_gather("y", np.ones(3)) for g in three[:2]]
    three[2].close()
    for future in (*futures, *gathered):
        with pytest.raises(moolink.GroupChanged):
            future.result(20)
    with pytest.raises(moolink.GroupChanged):
        three[0].all_gather("z", np.ones(3))  # its memory would depend on members not seen yet
    formed(three[:2])
    results = run(three[:2], lambda g, rank: g.all_gather("z", np.full(3, rank)))
    assert results[0][:, 0].tolist() == [0, 1]


def test_several_groups_of_one_peer(join: Join, broker_address: str) -> None:
    with moolink.Rpc("a") as a, moolink.Rpc("b") as b:
        for rpc in (a, b):
            rpc.connect(broker_address)
        groups = [[moolink.Group(rpc, name) for rpc in (a, b)] for name in ("one", "two")]
        for pair in groups:
            formed(pair)
        futures = [g.all_reduce("x", np.ones(LARGE)) for pair in groups for g in pair]
        assert all((f.result(20) == 2).all() for f in futures)


def test_without_shared_memory(broker_address: str, count: int) -> None:
    with (
        moolink.Rpc("a", transports=["tcp"]) as a,
        moolink.Rpc("b", transports=["tcp"]) as b,
    ):
        groups = []
        for rpc in (a, b):
            rpc.connect(broker_address)
            groups.append(moolink.Group(rpc, "group"))
        formed(groups)
        for kind in ("all_reduce", "all_gather", "broadcast", "gather"):
            results = run(groups, lambda g, rank, kind=kind: getattr(g, kind)(kind, np.ones(count)))
            result = next(r for r in results if r is not None)  # gather's is at rank 0 alone
            assert result.sum() == count * (1 if kind == "broadcast" else 2)


def test_jax_arrays(three: Groups) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    results = run(three, lambda g, rank: g.all_reduce("x", jnp.full(3, rank, jnp.bfloat16)))
    for result in results:
        assert (result.dtype, result.tolist()) == (jnp.bfloat16, [3.0, 3.0, 3.0])


class Exporter:
    """An array that only speaks DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_any_dlpack_array(three: Groups) -> None:
    for result in run(three, lambda g, rank: g.all_reduce("x", Exporter(given(4, rank)))):
        assert result.tolist() == [6.0, 9.0, 12.0, 15.0]


def misuses(group: moolink.Group) -> Iterator[tuple[Callable[[], object], type, str]]:
    array = np.ones(4, np.float32)
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    yield lambda: group.all_reduce("x", array, op="xor"), ValueError, "xor of float32"
    yield lambda: group.all_reduce("x", array.astype(int), op="mean"), ValueError, "mean of int64"
    yield lambda: group.all_reduce("x", array, op="most"), ValueError, "'most' is not one of"  # type: ignore[arg-type]
    yield lambda: group.reduce_scatter("x", array), ValueError, "does not divide among 3"
    yield lambda: group.reduce_scatter("x", 1.0), ValueError, "does not divide"
    yield lambda: group.scatter("x", array), ValueError, "an entry for each of the 3 members"
    yield lambda: group.broadcast("x", array, root=3), ValueError, "root 3 is no rank below 3"
    yield lambda: group.gather("x", array, root=-1), ValueError, "root -1"
    yield lambda: group.gather("x", array, root="nobody"), ValueError, "none of a, b, c"
    yield lambda: group.all_reduce("x", array, out=np.ones(5)), ValueError, "the result is float32"
    yield lambda: group.all_reduce("x", [array], out=[]), ValueError, "out has 0 leaves"
    yield lambda: group.all_reduce("x", frozen, inplace=True), ValueError, "cannot be written"
    yield lambda: group.all_reduce("x", 1.0, inplace=True), ValueError, "cannot be written"
    yield lambda: group.all_reduce("x", array, inplace=True, out=array), ValueError, "exclude"
    yield lambda: group.all_reduce("x", 1, op=max, inplace=True), ValueError, "not for a callable"
    many = [np.ones(65)] * 65_535
    yield lambda: group.all_reduce("x", many, op=max), ValueError, "limit of 65534 arrays"
    yield lambda: group.all_reduce("x", np.array(["a"])), TypeError, "only numbers"
    yield lambda: group.all_gather("x", {"a": "text"}), TypeError, r"data\['a'\]"


def test_misuse_is_refused_before_anything_is_sent(three: Groups) -> None:
    for call, error, message in misuses(three[0]):
        with pytest.raises(error, match=message):
            call()
    # The number of the next start of "x" is the same everywhere.
    assert run(three, lambda g, rank: g.all_reduce("x", 1)) == [3, 3, 3]


def test_differing_roots_fail_everywhere(three: Groups) -> None:
    futures = [g.broadcast("x", np.ones(4), root=int(rank == 2)) for rank, g in enumerate(three)]
    for future in futures:
        with pytest.raises(moolink.Error, match=r"root 1.*root 0|root 0.*root 1"):
            future.result(20)
    assert run(three, lambda g, rank: g.all_reduce("y", 1)) == [3, 3, 3]


def test_a_group_that_was_closed_keeps_no_arrays(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)
    array = given(LARGE, 0)
    gone = weakref.ref(array)
    reduction = groups[0].all_reduce("x", array)
    del array
    groups[0].close()
    with pytest.raises(moolink.Closed):
        reduction.result(10)
    del reduction
    until(lambda: gone() is None, "the array to be let go")
