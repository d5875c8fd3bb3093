"""The accumulator for pytrees of JAX arrays."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest

import moolink
from tests.accumulator.loops import Make, connect, pump
from tests.waiting import PROCESS_LIMIT, until

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy


class Layer(NamedTuple):
    weight: jax.Array
    bias: jax.Array


def model(value: float = 0.0) -> dict[str, Layer]:
    return {"layer": Layer(jnp.full((2, 3), value), jnp.full(4, value))}


def full(tree: object, value: float) -> object:
    return jax.tree.map(lambda x: jnp.full_like(x, value), tree)


def equal(a: object, b: object) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def two(make: Make, **options: object) -> list:
    peers = [make(f"peer-{i}", model(), **options) for i in range(2)]
    for peer in peers:
        peer.set_virtual_batch_size(4)
    connect(peers)
    return peers


def delivered(peers: list) -> None:
    until(lambda: pump(peers) or all(p.has_gradients() for p in peers), "a round")


def test_mean_is_weighted_by_batch_size(make: Make) -> None:
    peers = two(make)
    for peer, value, batch in zip(peers, (1.0, 5.0), (1, 3), strict=True):
        peer.reduce_gradients(full(model(), value), batch, counters={"steps": batch})
    delivered(peers)
    for peer in peers:
        assert equal(peer.gradients(), model(4.0))  # (1 + 15) / 4
        assert jax.tree.structure(peer.gradients()) == jax.tree.structure(model())
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(peer.gradients()))
        assert peer.get_gradient_stats()["counters"] == {"steps": 4}
        assert peer.model_version() == 1
        peer.set_parameters(model(1.0))
        peer.zero_gradients()
        with pytest.raises(RuntimeError, match="has_gradients"):
            peer.gradients()


def test_a_result_is_kept_as_long_as_it_is_used(make: Make) -> None:
    peers = two(make)
    kept = []
    for round_ in range(1, 8):  # more rounds than a segment has places
        until(lambda: pump(peers) or all(p.wants_gradients() for p in peers), "the next turn")
        for peer in peers:
            peer.reduce_gradients(model(float(round_)), 2)
        delivered(peers)
        kept += [peer.gradients() for peer in peers]
        for peer in peers:
            peer.zero_gradients()
    assert all(equal(tree, model(1.0 + i // 2)) for i, tree in enumerate(kept))


def test_several_dtypes_and_missing_leaves(make: Make) -> None:
    parameters = OrderedDict(
        half=jnp.zeros(3, jnp.bfloat16), single=jnp.zeros((2, 2)), scalar=jnp.zeros(())
    )
    peer = make("alone", parameters)
    connect([peer])
    gradients = OrderedDict(half=jnp.full(3, 0.5, jnp.bfloat16), single=None, scalar=jnp.float32(3))
    peer.reduce_gradients(gradients, 2)
    delivered([peer])
    mean = peer.gradients()
    assert list(mean) == ["half", "single", "scalar"]
    assert mean["half"].dtype == jnp.bfloat16
    assert mean["half"].tolist() == [0.5] * 3
    assert not mean["single"].any()
    assert mean["scalar"] == 3


def test_a_newcomer_gets_model_buffers_and_the_optimisers_state(make: Make) -> None:
    optimizer = optax.adam(1e-2)
    state = optimizer.update(model(2.0), optimizer.init(model()))[1]
    veteran = make("veteran", model(7.0), {"mean": jnp.arange(3.0)})
    connect([veteran])
    newcomer = make("newcomer", model(), {"mean": jnp.zeros(3)})
    received = []

    def ready() -> bool:
        for peer in (veteran, newcomer):
            peer.update()
            if peer.wants_state():
                peer.set_state(state)
            if peer.has_new_state():
                received.append(peer.state(like=optimizer.init(model())))
        return newcomer.connected()

    until(ready, "the state")
    assert len(received) == 1
    assert jax.tree.structure(received[0]) == jax.tree.structure(state)
    assert equal(received[0], state)
    assert equal(newcomer.parameters(), model(7.0))
    assert newcomer.buffers()["mean"].tolist() == [0.0, 1.0, 2.0]


def test_training_steps_with_optax(make: Make) -> None:
    peer = make("alone", model())
    loss = jax.jit(jax.grad(lambda p: sum(((x - 3.0) ** 2).sum() for x in jax.tree.leaves(p))))
    turns = 0
    for step in peer.steps(optax.sgd(0.1), until=lambda totals: totals["turns"] == 40):
        step.reduce(loss(step.parameters), batch_size=1, counters={"turns": 1})
        turns += 1
    assert turns == 40
    np.testing.assert_allclose(peer.parameters()["layer"].bias, 3.0, atol=1e-2)


def test_a_second_reduce_of_a_turn_is_refused(make: Make) -> None:
    accumulator = make("alone", model())
    connect([accumulator])
    step = next(iter(accumulator.steps(optax.sgd(0.1))))
    step.reduce(model(1.0), 1)
    with pytest.raises(RuntimeError, match="has contributed before"):
        step.reduce(model(1.0), 1)


def test_divergence_is_noticed(make: Make) -> None:
    peers = two(make, checksum_every=1)
    for peer in peers:
        peer.reduce_gradients(model(1.0), 2)
    delivered(peers)
    for peer, value in zip(peers, (1.0, 2.0), strict=True):
        peer.set_parameters(model(value))
        peer.zero_gradients()
    with pytest.raises(moolink.Error, match="differ"):
        until(lambda: pump(peers), "the divergence")


def test_misuse(make: Make) -> None:
    peer = make("alone", model())
    with pytest.raises(RuntimeError, match="wants_gradients"):
        peer.reduce_gradients(model(), 1)
    connect([peer])
    with pytest.raises(ValueError, match="gradients are a tree of"):
        peer.reduce_gradients({"layer": jnp.zeros(3)}, 1)
    with pytest.raises(
        ValueError, match=r"\['layer'\]\.bias is float32\(5,\), and the parameter float32\(4,\)"
    ):
        peer.reduce_gradients({"layer": Layer(jnp.zeros((2, 3)), jnp.zeros(5))}, 1)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda tree: peer.reduce_gradients(tree, 1))(model())
    with pytest.raises(ValueError, match=r"\['layer'\]\.bias is float32\(5,\) now and was"):
        peer.set_parameters({"layer": Layer(jnp.zeros((2, 3)), jnp.zeros(5))})
    with pytest.raises(TypeError, match=r"parameters\['n'\] is int32\(3,\).*buffers"):
        moolink.jax.Accumulator("other", {"n": jnp.arange(3)})
    with pytest.raises(TypeError, match="not an array"):
        moolink.jax.Accumulator("other", {"n": "text"})
    with pytest.raises(ValueError, match="no parameters"):
        moolink.jax.Accumulator("other", {})
    assert peer.wants_gradients()


def test_arrays_that_would_become_others_are_refused() -> None:
    for parameters, buffers, what in (
        ({"w": np.zeros(3)}, (), r"parameters\['w'\] is float64.*enable_x64"),
        (model(), {"n": np.int64(2**40)}, r"buffers\['n'\] is int64.*enable_x64"),
        ({"key": jax.random.key(0)}, (), r"parameters\['key'\].*key_data.* of a typed random key"),
        (model(), {"key": jax.random.key(0)}, r"buffers\['key'\].*typed random key"),
    ):
        with pytest.raises(TypeError, match=what):
            moolink.jax.Accumulator("other", parameters, buffers)


def test_numpys_arrays_in_a_state_are_compared_too() -> None:
    template = {"counts": np.zeros(3, np.int32)}
    again = moolink.jax.tree_like(template, {"counts": np.arange(3, dtype=np.int32)})
    assert again["counts"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"\['counts'\] is int8\(5,\), and .* int32\(3,\)"):
        moolink.jax.tree_like(template, {"counts": np.zeros(5, np.int8)})


def test_states_of_optax_and_keys_travel_as_plain_trees() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = {"optax": optimizer.init(model(1.0)), "key": jax.random.key(3), "n": 5, "none": None}
    plain = moolink.jax.plain_tree(state)
    assert plain["optax"][1][0]["mu"]["layer"]["weight"].shape == (2, 3)
    again = moolink.jax.tree_like(state, plain)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert jax.random.uniform(again["key"]) == jax.random.uniform(state["key"])
    other = {**state, "optax": optimizer.init({"layer": jnp.zeros(3)})}
    with pytest.raises(ValueError, match=r"\['mu'\]\['layer'\] is a dict, and"):
        moolink.jax.tree_like(other, plain)


def test_a_second_loop_continues_the_optimizer(make: Make) -> None:
    peer = make("alone", {"w": jnp.ones(3)})
    optimizer = optax.adam(0.1)
    for end in (2, 4):
        for step in peer.steps(optimizer, until={"n": end}):
            step.reduce(step.parameters, 1, {"n": 1}, means={"w": jnp.float32(2.0)})
    assert int(peer.optimizer_state()[0].count) == 4
    assert step.totals.mean("w") == 2.0
    next(peer.steps(optax.adam(0.1)))
    assert int(peer.optimizer_state()[0].count) == 0, "another optimizer begins anew"


WITHOUT_THE_OTHER = """
import sys
sys.modules[{blocked!r}] = None
import moolink
assert "torch" not in sys.modules or sys.modules["torch"] is None
assert "jax" not in sys.modules or sys.modules["jax"] is None
{model}
with moolink.Broker() as broker, moolink.Rpc() as rpc:
    rpc.connect(broker.listen("127.0.0.1:0")[0])
    with moolink.Group(rpc, "g") as group, moolink.Accumulator("m", model, group=group) as a:
        for step in a.steps(optimizer, until=lambda totals: totals["turns"] == 3):
            {turn}
        print(a.model_version(), {blocked!r} in sys.modules and sys.modules[{blocked!r}])
"""
IN_JAX = (
    "import jax, jax.numpy as jnp, optax\nmodel = {'w': jnp.ones(3)}\noptimizer = optax.sgd(0.1)",
    "step.reduce(step.parameters, batch_size=1, counters={'turns': 1})",
)
IN_TORCH = (
    "import torch\nmodel = [torch.ones(3, requires_grad=True)]\n"
    "optimizer = torch.optim.SGD(model, lr=0.1)",
    "model[0].sum().backward(); step.reduce(batch_size=1, counters={'turns': 1})",
)


@pytest.mark.parametrize(("blocked", "code"), [("torch", IN_JAX), ("jax", IN_TORCH)])
def test_each_framework_works_without_the_other(blocked: str, code: tuple[str, str]) -> None:
    program = WITHOUT_THE_OTHER.format(blocked=blocked, model=code[0], turn=code[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 None\n"
