"""Allreduces in place on moolink.empty(), which the others of a host read where it is."""

from __future__ import annotations

import gc
import pathlib
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
import torch

import moolink
from tests.processes import killed_at_the_end, start_python
from tests.waiting import formed, until

Join = Callable[..., moolink.Group]

COUNT = 600_000  # float32: enough to be read in place


def lent_mappings() -> int:
    """Segments of lending pools that this process maps, its own and those of others."""
    return pathlib.Path("/proc/self/maps").read_text().count("moolink-lending")


def reduce_until(groups: list[moolink.Group], arrays: list[np.ndarray], mappings: int) -> None:
    """Sums in place until so many segments are mapped, and three times more; checks each sum."""
    more = 3
    for step in range(1000):
        for rank, array in enumerate(arrays):
            array[:] = np.arange(COUNT) % 5 + rank + step
        futures = [g.all_reduce("x", a, inplace=True) for g, a in zip(groups, arrays, strict=True)]
        expected = sum(np.arange(COUNT) % 5 + rank + step for rank in range(len(groups)))
        for future, array in zip(futures, arrays, strict=True):
            assert future.result(20) is array
            np.testing.assert_array_equal(array, expected)
            array[:] = np.nan  # it is the user's again
        more -= lent_mappings() >= mappings
        if more == 0:
            return
    raise AssertionError(f"{lent_mappings()} segments are mapped, not {mappings}")


@pytest.mark.parametrize("ordinary", [0, 1], ids=["all lent", "one ordinary"])
def test_others_read_it_where_it_is(join: Join, ordinary: int) -> None:
    groups = [join(name) for name in "abc"]
    formed(groups)
    groups.sort(key=lambda group: group.rank() or 0)
    arrays = [moolink.empty((COUNT,), "float32") for _ in groups]
    for rank in range(ordinary):
        arrays[rank] = np.empty(COUNT, np.float32)
    begun = lent_mappings()  # all three lie in one segment of this process
    reduce_until(groups, arrays, begun + 2 * (3 - ordinary))
    for group in groups:
        group.close()
        group.rpc.close()
    until(lambda: lent_mappings() == begun, "the ends of the connections")


def test_it_is_let_go_when_its_owner_has_freed_it(join: Join) -> None:
    groups = [join(name) for name in "ab"]
    formed(groups)
    begun = lent_mappings()
    large = [moolink.empty((1 << 28,), "float32") for _ in groups]  # never touched but for a part
    arrays = [array[:COUNT] for array in large]
    reduce_until(groups, arrays, begun + 4)
    del large, arrays
    gc.collect()
    small = [moolink.empty((COUNT,), "float32") for _ in groups]
    reduce_until(groups, small, begun + 1)
    # Each was let go on both sides: what is left are those of the small arrays.
    assert lent_mappings() <= begun + 3


def test_it_is_let_go_though_nothing_more_is_reduced(join: Join) -> None:
    groups = [join(name) for name in "ab"]
    formed(groups)
    begun = lent_mappings()
    large = [moolink.empty((1 << 28,), "float32") for _ in groups]
    arrays = [array[:COUNT] for array in large]
    reduce_until(groups, arrays, begun + 4)
    del large, arrays
    gc.collect()
    until(lambda: lent_mappings() == begun, "what was freed to be unmapped")


# A member that sums twenty times, perhaps with an address space limited after the first, and tells
# how many segments of others it maps then.
OTHER = """
    import pathlib, resource, sys
    import numpy as np, moolink
    with moolink.Rpc("b", timeout=20) as rpc, moolink.Group(rpc, "group") as group:
        rpc.connect(sys.argv[1])
        group.wait_for_members(2, 20)
        for turn in range(20):
            array = np.full(600_000, turn, np.float32)
            assert (group.all_reduce("x", array, inplace=True).result(20) == 3 * turn).all()
            if turn == 0 and sys.argv[2] == "refuses":
                pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + (1 << 30)
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            print("turn", flush=True)
        print(pathlib.Path("/proc/self/maps").read_text().count("moolink-lending"), flush=True)
        sys.stdin.read()
    """


@pytest.mark.parametrize("mapping", ["works", "refuses"])
def test_windows_serve_a_member_that_cannot_map_it(
    join: Join, broker_address: str, mapping: str
) -> None:
    group = join("a")
    with killed_at_the_end() as processes:
        other = start_python("-c", textwrap.dedent(OTHER), broker_address, mapping)
        processes.append(other)
        assert other.stdout is not None
        group.wait_for_members(2, 20)
        large = moolink.empty((1 << 30,), "float32")  # more than the limit leaves room for
        for turn in range(20):
            array = large[:COUNT] if turn > 0 else np.empty(COUNT, np.float32)
            array[:] = 2 * turn
            assert group.all_reduce("x", array, inplace=True).result(20) is array
            assert (array == 3 * turn).all()
            assert other.stdout.readline() == "turn\n"
        assert other.stdout.readline() == ("1\n" if mapping == "works" else "0\n")


def test_torch_and_dtypes(join: Join) -> None:
    groups = [join(name) for name in "ab"]
    formed(groups)
    for dtype, op, value in ((torch.bfloat16, "sum", 3), (torch.int32, "max", 2)):
        tensors = [torch.as_tensor(moolink.empty((COUNT * 2,), "int16")).view(dtype) for _ in "ab"]
        for _ in range(5):
            for i, tensor in enumerate(tensors):
                tensor.fill_(i + 1)
            versions = [tensor._version for tensor in tensors]
            futures = [
                g.all_reduce("x", t, op=op, inplace=True)
                for g, t in zip(groups, tensors, strict=True)
            ]
            for future, tensor, version in zip(futures, tensors, versions, strict=True):
                assert future.result(20) is tensor
                assert (tensor == value).all()
                assert tensor._version > version  # autograd knows
