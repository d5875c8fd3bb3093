"""Allreduces in place on moolink.empty(), which the others of a host read where it is."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

import moolink
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
    assert lent_mappings() == begun


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
