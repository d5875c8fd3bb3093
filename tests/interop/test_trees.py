"""Trees with None, empty containers, named tuples, dataclasses and registered pytrees: all walks
take them apart in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import moolink
import moolink.jax
from moolink.data import skeletons, trees
from moolink.torch.optimizers import plain_tree, tree_like
from tests.waiting import formed

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Record:
    image: Any
    hidden: Any


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    """Like an Equinox module: its name is no leaf."""

    def __init__(self, weight: Any, name: str) -> None:
        self.weight, self.name = weight, name

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Any) -> Registered:
        return cls(children[0], name)


moolink.register(Pair)
moolink.register(Record)


def tree() -> dict[str, Any]:
    ones = np.ones(2, np.float32)
    return {
        "none": None,
        "empty": {},
        "empties": ([], ()),
        "pair": Pair(ones, None),
        "record": Record(ones * 2, {"h": None, "c": [ones * 3]}),
        "own": Registered(ones * 4, "layer"),
    }


def check(result: Any, shown: Callable[[Any], Any] = np.asarray) -> None:
    assert result["none"] is None
    assert result["empty"] == {}
    assert result["empties"] == ([], ())
    assert type(result["pair"]) is Pair
    assert result["pair"].second is None
    assert type(result["record"]) is Record
    assert result["record"].hidden["h"] is None
    found = [result["pair"].first, result["record"].image, result["record"].hidden["c"][0]]
    if "own" in result:
        assert type(result["own"]) is Registered
        assert result["own"].name == "layer"
        found.append(result["own"].weight)
    for number, array in enumerate(found, 1):
        assert shown(array).tolist() == [number, number]


@pytest.fixture(scope="module")
def group() -> Iterator[moolink.Group]:
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(moolink.Broker(first=True))
        rpc = stack.enter_context(moolink.Rpc("peer"))
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        made = stack.enter_context(moolink.Group(rpc, "trees"))
        formed([made], 1)
        yield made


def test_skeletons() -> None:
    leaves, skeleton = skeletons.flatten(tree())
    assert skeletons.paths(skeleton) == [
        *("pair.first", "record.image", "record.hidden.c[0]", "own.weight")
    ]
    check(skeletons.unflatten(skeleton, leaves))
    again = skeletons.leaves_like(tree(), skeleton)
    assert again is not None
    assert [a.tolist() for a in again] == [a.tolist() for a in leaves]
    for key, other in (
        ("none", np.ones(2)),
        ("pair", Pair(None, None)),
        ("own", Registered(np.ones(2), "another")),
        ("record", Pair(1, 2)),
    ):
        assert skeletons.leaves_like(tree() | {key: other}, skeleton) is None


class Scaled(Pair):
    """Has a __new__ of its own."""

    def __new__(cls, scale: float) -> Scaled:
        return super().__new__(cls, np.full(2, scale), np.full(3, scale))


@dataclasses.dataclass
class Unset:
    given: Any
    later: Any = dataclasses.field(init=False)


def test_types_that_make_their_own_parts() -> None:
    value = {"scaled": Scaled(2.0)}
    leaves, skeleton = skeletons.flatten(value)
    again = skeletons.unflatten(skeleton, leaves)["scaled"]
    assert type(again) is Scaled
    assert [part.tolist() for part in again] == [[2, 2], [2, 2, 2]]
    batcher = moolink.Batcher(2)
    for _ in range(2):
        batcher.stack(value)
    batch = batcher.get()["scaled"]
    assert type(batch) is Scaled
    assert batch.second.shape == (2, 3)


def test_a_dataclass_with_an_unset_field_is_a_leaf() -> None:
    unset = Unset(np.ones(2))
    assert skeletons.flatten({"x": unset}) == ([unset], {"x": 0})
    with pytest.raises(TypeError, match=r"data\['x'\] is a Unset"):
        trees.flatten({"x": unset})
    unset.later = np.ones(3)
    assert skeletons.paths(skeletons.flatten({"x": unset})[1]) == ["x.given", "x.later"]


def test_collectives(group: moolink.Group) -> None:
    check(group.all_reduce("x", tree()).result(30))
    leaves, structure = trees.flatten(tree())
    check(trees.unflatten(structure, [leaf.array for leaf in leaves]))
    given = tree()
    del given["record"]  # no pytree for JAX
    result = moolink.jax.broadcast(group, "j", given, timeout=30)
    check(result | {"record": tree()["record"]})
    with pytest.raises(TypeError, match=r"tree\['record'\] is a Record.*register"):
        moolink.jax.broadcast(group, "j", tree(), timeout=30)


def test_weights(group: moolink.Group) -> None:
    given = tree()
    del given["own"]
    with (
        moolink.Rpc("publisher") as there,
        moolink.Publisher(there, "w") as publisher,
        moolink.Rpc("subscriber") as here,
    ):
        here.connect(there.listen("127.0.0.1:0")[0])
        publisher.publish(given)
        with moolink.Subscriber(here, "w", "publisher") as subscriber:
            check(subscriber.wait(timeout=30).tree)


def test_a_batcher() -> None:
    given = tree()
    del given["none"]  # a value: the batch has that of each row
    batcher = moolink.Batcher(2)
    given["pair"] = Pair(np.ones(2), 7)
    given["record"] = Record(np.ones(2), {"c": np.ones(3)})
    for _ in range(2):
        batcher.stack(given)
    batch = batcher.get()
    assert batch["pair"].second == [7, 7]
    assert batch["record"].image.shape == (2, 2)
    assert batch["record"].hidden["c"].shape == (2, 3)
    assert batch["own"].weight.shape == (2, 2)
    with pytest.raises(ValueError, match="record: expected a Record, got a Pair"):
        batcher.stack(given | {"record": Pair(1, 2)})


def test_a_replay() -> None:
    with moolink.Replay(moolink.replay.Table("t", 9)) as replay:
        replay.insert(tree())
        replay.insert(tree())
        check(replay.sample(1).data, lambda array: np.asarray(array)[0])
        with pytest.raises(ValueError, match=r"with none"):
            replay.insert(tree() | {"none": np.ones(2)})


def test_states_of_optimizers() -> None:
    plain = plain_tree(tree())
    assert plain["record"]["hidden"]["h"] is None
    assert plain["pair"]["first"].tolist() == [1, 1]
    check(tree_like(tree(), plain))
    check(moolink.jax.tree_like(tree(), moolink.jax.plain_tree(tree())))


def loss(parameters: Any) -> Any:
    return sum(leaf.sum() for leaf in jax.tree.leaves(parameters))


@pytest.mark.parametrize(
    "parameters",
    [
        {"w": jnp.ones(3), "activation": None},
        Registered({"w": jnp.ones(3), "mask": optax.MaskedNode(), "rest": ()}, "model"),
        Pair(jnp.ones(3), [None, {}]),
    ],
    ids=["none", "masked", "named"],
)
def test_jax_parameters_with_holes_train(group: moolink.Group, parameters: Any) -> None:
    with moolink.jax.Accumulator("m", parameters, group=group) as accumulator:
        accumulator.set_virtual_batch_size(2)
        steps = accumulator.steps(optax.sgd(0.1), until=lambda totals: totals["n"] >= 1)
        for step in steps:
            step.reduce(jax.grad(loss)(step.parameters), batch_size=2, counters={"n": 1})
        result = accumulator.parameters()
    assert jax.tree.structure(result) == jax.tree.structure(parameters)
    for leaf in jax.tree.leaves(result):
        assert jnp.allclose(leaf, 0.9)


def test_torch_gradients_that_are_replaced_meanwhile(
    group: moolink.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread takes gradients away, and their memory is used again, while they are summed. It does
    not do so while Python reads `.grad`: torch 2.13 allows no replacement then."""
    import threading

    parameters = [torch.ones(1 << 18, requires_grad=True) for _ in range(4)]
    stop, python_reads = threading.Event(), threading.RLock()

    def take_away() -> None:
        while not stop.wait(0):
            for parameter in parameters:
                with python_reads:
                    parameter.grad = None
                    parameter.grad = torch.full((1 << 18,), 2.0)

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with python_reads:
                return method(*arguments)

        return call

    thread = threading.Thread(target=take_away)
    with moolink.Accumulator("torch", parameters, group=group) as accumulator:
        for name in ("_gradients", "_ends_gradients", "_show", "_clear"):
            monkeypatch.setattr(accumulator, name, guarded(getattr(accumulator, name)))
        accumulator.set_virtual_batch_size(1)
        thread.start()
        try:
            rounds = 0
            while rounds < 5:
                accumulator.update()
                if accumulator.has_gradients():
                    rounds += 1
                    accumulator.zero_gradients()
                elif accumulator.wants_gradients():
                    accumulator.reduce_gradients(1)
                else:
                    accumulator.wait(1)
        finally:
            stop.set()
            thread.join()


def test_torch_parameters_and_gradients_of_other_kinds(group: moolink.Group) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    parameter = torch.nn.Parameter(torch.ones(3))
    with moolink.Accumulator("kinds", [parameter], group=group) as accumulator:
        accumulator.set_virtual_batch_size(1)
        while not accumulator.wants_gradients():
            accumulator.update()
            accumulator.wait(1)
        parameter.grad = TwoTensor(torch.ones(3), torch.ones(3))
        with pytest.raises(TypeError, match=r"gradient of parameters\[0\].*TwoTensor"):
            accumulator.reduce_gradients(1)
        parameter.grad = None
        torch.utils.swap_tensors(
            parameter, torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
        )
        with pytest.raises(TypeError, match=r"parameters\[0\].*TwoTensor"):
            accumulator.reduce_gradients(1)
