"""Collectives on pytrees of JAX arrays, beside members that have numpy arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import moolink
from tests.waiting import formed

jax = pytest.importorskip("jax")
jnp = jax.numpy

Groups = list[moolink.Group]


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Node:
    value: Any


@pytest.fixture
def two(join: Callable[..., moolink.Group]) -> Groups:
    groups = [join("a", sort=1), join("b", sort=2)]
    formed(groups)
    return groups


def both(groups: Groups, call: Callable[[moolink.Group, int], Any]) -> list[Any]:
    """What both members get; each blocks in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        return [f.result() for f in [pool.submit(call, g, r) for r, g in enumerate(groups)]]


def tree(rank: int) -> Any:
    return {
        "pair": Pair(jnp.full((2, 3), rank + 1.0), jnp.arange(4) + rank),
        "node": Node([jnp.float32(rank), None]),
        "half": jnp.full(3, rank + 0.5, jnp.bfloat16),
    }


def test_all_reduce_and_broadcast_of_any_pytree(two: Groups) -> None:
    for result in both(two, lambda g, r: moolink.jax.all_reduce(g, "x", tree(r))):
        assert jax.tree.structure(result) == jax.tree.structure(tree(0))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
        assert result["pair"].first.tolist() == [[3.0] * 3] * 2
        assert result["pair"].second.tolist() == [1, 3, 5, 7]
        assert result["node"].value[0] == 1.0
        assert result["half"].dtype == jnp.bfloat16
        assert result["half"].tolist() == [2.0] * 3
    for result in both(two, lambda g, r: moolink.jax.broadcast(g, "y", tree(r), root="b")):
        assert result["pair"].second.tolist() == [1, 2, 3, 4]


def test_the_others(two: Groups) -> None:
    rows = {"x": jnp.arange(4.0)}
    for rank, result in enumerate(both(two, lambda g, r: moolink.jax.reduce_scatter(g, "r", rows))):
        assert result["x"].tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
    for result in both(two, lambda g, r: moolink.jax.all_gather(g, "a", Pair(jnp.full(2, r), 5))):
        assert result.first.tolist() == [[0, 0], [1, 1]]
        assert result.second.tolist() == [5, 5]
    at_root, elsewhere = both(two, lambda g, r: moolink.jax.gather(g, "g", [jnp.float32(r)]))
    assert at_root[0].tolist() == [0.0, 1.0]
    assert elsewhere is None
    given = [jnp.arange(6.0).reshape(2, 3), jnp.zeros(3)]
    for rank, result in enumerate(both(two, lambda g, r: moolink.jax.scatter(g, "s", given[r]))):
        assert result.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][rank]


def test_a_member_without_jax_takes_part(two: Groups) -> None:
    def call(group: moolink.Group, rank: int) -> Any:
        if rank == 0:
            return moolink.jax.all_reduce(group, "x", {"a": jnp.ones(3), "b": [jnp.arange(2.0)]})
        return group.all_reduce(
            "x", {"a": np.ones(3, np.float32), "b": [np.arange(2, dtype=np.float32)]}
        ).result()

    in_jax, in_numpy = both(two, call)
    assert isinstance(in_jax["a"], jax.Array)
    assert isinstance(in_numpy["a"], np.ndarray)
    assert in_jax["b"][0].tolist() == in_numpy["b"][0].tolist() == [0.0, 2.0]


def test_traced_leaves_are_refused(two: Groups) -> None:
    with pytest.raises(TypeError, match=r"tree\['x'\].* is a traced"):
        jax.jit(lambda x: moolink.jax.broadcast(two[0], "x", {"x": x}))(jnp.ones(3))


def test_an_ordered_dict_keeps_what_belongs_to_its_keys(two: Groups) -> None:
    def call(group: moolink.Group, rank: int) -> Any:
        tree = OrderedDict(b=jnp.ones(3), a=jnp.zeros((2, 2)))
        if rank == 1:
            return group.broadcast("x", {"a": np.ones((2, 2), "f4"), "b": np.ones(3, "f4")})
        return moolink.jax.broadcast(group, "x", tree)

    in_jax, _ = both(two, call)
    assert isinstance(in_jax, OrderedDict)
    assert in_jax["b"].tolist() == [1.0] * 3
    assert not in_jax["a"].any()


@pytest.mark.parametrize("leaf", [np.int64(2**40), np.full(2, 1e300), torch.ones(2).double()])
def test_wide_numbers_are_refused_not_halved(two: Groups, leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"tree\['x'\] is (int|float)64.*enable_x64"):
        moolink.jax.all_gather(two[0], "x", {"x": leaf})


def test_numbers_are_those_of_jax(two: Groups) -> None:
    numbers = {"n": 640, "x": 1.5, "is": True}
    for result in both(two, lambda g, r: moolink.jax.all_gather(g, "x", numbers)):
        assert {key: str(value.dtype) for key, value in result.items()} == {
            "n": "int32",
            "x": "float32",
            "is": "bool",
        }
    with pytest.raises(OverflowError, match="int32"):
        moolink.jax.all_gather(two[0], "y", 2**33)
