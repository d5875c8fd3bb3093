"""moolink.jax.all_reduce inside of compiled functions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import moolink
from tests.interop.conftest import Join, all_see, together
from tests.waiting import PROCESS_LIMIT, until

jax = pytest.importorskip("jax")
jnp = jax.numpy
mj = pytest.importorskip("moolink.jax")

Groups = tuple[moolink.Group, moolink.Group]


def reducer(group: moolink.Group, name: str = "x", **options: Any) -> Any:
    """A compiled function that reduces its argument, and waits for it."""
    compiled = jax.jit(lambda tree: mj.all_reduce(group, name, tree, **options))
    return lambda tree: jax.block_until_ready(compiled(tree))


def of_both(groups: Groups, make: Any) -> list[Any]:
    """What ``make(group, rank)`` returns at each of both members."""
    return together(*(lambda g=g, i=i: make(g, i) for i, g in enumerate(groups)))


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("size", [1, 500, 5000, 300_000])
def test_ops_and_sizes(groups: Groups, op: str, size: int) -> None:
    inputs = [np.random.default_rng(i).standard_normal(size, np.float32) for i in range(2)]
    x, y = of_both(groups, lambda g, i: reducer(g, op=op)(jnp.asarray(inputs[i])))
    combine = {
        "sum": np.add,
        "mean": lambda a, b: (a + b) / 2,
        "min": np.minimum,
        "max": np.maximum,
        "prod": np.multiply,
    }[op]
    assert np.array_equal(x, combine(*inputs))
    assert np.array_equal(x, y)


def tree_of(rank: int, large: int) -> dict[str, Any]:
    return {
        "a": jnp.full((3, 4), rank + 1, jnp.float32),
        "b": [jnp.arange(large, dtype=jnp.float32), jnp.full(5, rank, jnp.int32)],
        "c": (jnp.ones((), jnp.bfloat16), jnp.zeros((0, 2)), jnp.full(3, 1 + 2j, jnp.complex64)),
    }


@pytest.mark.parametrize("large", [10, 100_000])
def test_a_tree_goes_in_one_call(groups: Groups, large: int) -> None:
    x, y = of_both(groups, lambda g, i: reducer(g)(tree_of(i, large)))
    assert jax.tree.structure(x) == jax.tree.structure(tree_of(0, large))
    expected = jax.tree.map(jnp.add, tree_of(0, large), tree_of(1, large))
    for result in (x, y):
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, result)
        assert dtypes == jax.tree.map(lambda leaf: leaf.dtype, expected)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16"])
def test_bits(groups: Groups, dtype: str) -> None:
    x, _ = of_both(groups, lambda g, i: reducer(g, op="xor")(jnp.full(9, i, dtype)))
    assert np.array_equal(x, np.ones(9, dtype))


@pytest.mark.parametrize("size", [100, 100_000])
def test_it_meets_the_groups_own(groups: Groups, size: int) -> None:
    a, b = groups
    inputs = [np.random.default_rng(i).standard_normal(size, np.float32) for i in range(2)]
    x, y = together(
        lambda: reducer(a)({"w": inputs[0], "v": [inputs[1]]}),
        lambda: b.all_reduce("x", {"w": inputs[1], "v": [inputs[0]]}).result(),
    )
    assert np.array_equal(x["w"], y["w"])
    assert np.array_equal(x["v"][0], y["v"][0])
    assert np.array_equal(x["w"], inputs[0] + inputs[1])


def test_without_jit(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        with jax.disable_jit():
            return jax.grad(lambda x: mj.all_reduce(group, "x", x) ** 2)(1.0 + rank)

    assert of_both(groups, run) == [12.0, 12.0]


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import moolink, moolink.jax as mj

mesh = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
sharded = jax.device_put(jnp.arange(8.0), mesh)
with moolink.Broker(first=True) as broker, moolink.Rpc("alone") as rpc:
    rpc.connect(broker.listen("127.0.0.1:0")[0])
    with moolink.Group(rpc, "group") as group:
        while not group.members():
            group.update()
        try:
            jax.jit(lambda x: mj.all_reduce(group, "x", x))(sharded)
        except NotImplementedError as error:
            print(error)
        try:
            mj.all_reduce(group, "y", sharded)
        except NotImplementedError as error:
            print(error)
        print(mj.all_reduce(group, "z", jax.device_put(sharded, jax.devices()[1])).sum())
        print(mj.all_gather(group, "g", sharded).shape)
"""


def test_programs_of_several_devices_are_refused() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    in_jit, eager, *others = done.stdout.splitlines()
    for line, name in ((in_jit, "x"), (eager, "y")):
        assert line.startswith(f"all_reduce '{name}': the program runs on 2 devices")
    assert others == ["28.0", "(1, 8)"]


def test_a_program_runs_again_and_again(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> list[float]:
        reduce = reducer(group)
        return [float(reduce(jnp.full(10, i + rank, jnp.float32))[0]) for i in range(200)]

    x, y = of_both(groups, run)
    assert x == y == [2.0 * i + 1 for i in range(200)]


def test_scan_cond_and_vmap(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        @jax.jit
        def program(x: Any) -> Any:
            def step(carry: Any, i: Any) -> Any:
                total = mj.all_reduce(group, "step", carry + i)
                return total / 2, total.sum()

            carry, sums = jax.lax.scan(step, x, jnp.arange(5.0))
            chosen = jax.lax.cond(
                sums[0] > -1e9, lambda: mj.all_reduce(group, "branch", x), lambda: x
            )
            rows = jax.vmap(lambda row: mj.all_reduce(group, "rows", {"r": row, "one": x})["r"])(
                jnp.arange(6.0).reshape(2, 3)
            )
            return carry, sums, chosen, rows

        return jax.block_until_ready(program(jnp.full(3, rank, jnp.float32)))

    for carry, sums, chosen, rows in of_both(groups, run):
        assert sums.shape == (5,)
        assert np.allclose(carry, 0.5 + 10)
        assert np.array_equal(chosen, np.ones(3))
        assert np.array_equal(rows, 2 * np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradients(groups: Groups, op: str) -> None:
    """The loss of all is the sum of the members' losses: weights w of the reduced vector."""
    weights = np.random.default_rng(5).standard_normal((2, 8)).astype(np.float32)

    def run(group: moolink.Group, rank: int) -> Any:
        def loss(x: Any, unused: Any) -> Any:
            tree = {"x": x, "n": jnp.int32(3)} if op == "sum" else {"x": x}
            reduced = mj.all_reduce(group, "x", tree, op=op)
            return (reduced["x"] ** 2 * weights[rank]).sum() + 0 * unused

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return jax.block_until_ready(gradient(jnp.full(8, rank + 1.0), 1.0))

    x, y = of_both(groups, run)
    reduced = 3.0 if op == "sum" else 1.5
    expected = 2 * reduced * weights.sum(0) / (1 if op == "sum" else 2)
    for _, (gradient, _) in (x, y):
        assert np.allclose(gradient, expected, rtol=1e-5)


def test_second_derivatives(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        def loss(x: Any) -> Any:
            return mj.all_reduce(group, "x", x) ** 3

        return float(jax.jit(jax.grad(jax.grad(loss)))(1.0))

    # d/dx (sum of both members' 3 s^2) with s = x0 + x1, summed over both: 2 * 2 * 6 s
    assert of_both(groups, run) == [48.0, 48.0]


def test_ops_without_a_gradient_say_so(groups: Groups) -> None:
    with pytest.raises(TypeError, match="max has no gradient"):
        jax.grad(lambda x: mj.all_reduce(groups[0], "x", x, op="max"))(1.0)


def test_a_token_gives_calls_an_order(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        @jax.jit
        def program(x: Any, token: Any) -> Any:
            def loss(x: Any) -> Any:
                first, after = mj.all_reduce(group, "first", x, token=token)
                second, _ = mj.all_reduce(group, "second", x, token=after)
                return (first * second).sum()

            return jax.value_and_grad(loss)(x)

        return jax.block_until_ready(program(jnp.full(2, 2.0), mj.token(group)))

    for value, gradient in of_both(groups, run):
        assert value == 32
        assert np.array_equal(gradient, [16, 16])


@pytest.mark.parametrize("size", [3, 100_000])
def test_another_order_is_an_error_that_names_both(groups: Groups, size: int) -> None:
    for group in groups:
        group.set_timeout(1)

    def run(group: moolink.Group, rank: int) -> Any:
        names = ["left", "right"] if rank == 0 else ["right", "left"]

        @jax.jit
        def program(x: Any, token: Any) -> Any:
            one, token = mj.all_reduce(group, names[0], x, token=token)
            two, token = mj.all_reduce(group, names[1], x + 1, token=token)
            return one + two

        with mj.translate_errors():
            return jax.block_until_ready(program(jnp.ones(size), mj.token(group)))

    for error in of_both(groups, run):
        assert isinstance(error, moolink.TimeoutError), error
        for word in ("'left'", "'right'", " a", " b", "in the same order"):
            assert word in str(error), (word, error)


@pytest.mark.parametrize("size", [3, 300_000])
def test_members_that_leave(groups: Groups, size: int) -> None:
    a, b = groups
    results = together(
        lambda: reducer(a, on_change="retry")(jnp.ones(size)),
        lambda: leave_when_awaited(a, b),
    )
    assert np.array_equal(results[0], np.ones(size)), "alone in the newest view"


def leave_when_awaited(a: moolink.Group, b: moolink.Group) -> None:
    until(lambda: "waits for: 'b'" in moolink.dump(), "a to wait for b")
    b.close()


def test_members_that_leave_without_retry(groups: Groups) -> None:
    a, b = groups

    def reduce() -> Any:
        with mj.translate_errors():
            return reducer(a)(jnp.ones(100_000))

    error, _ = together(reduce, lambda: leave_when_awaited(a, b))
    assert isinstance(error, moolink.GroupChanged), error
    assert "'x'" in str(error)


def test_errors_of_a_program_that_has_run_before(groups: Groups) -> None:
    """JAX then calls it another way, which raises ValueError whatever went wrong."""
    a, b = groups
    reduce, other = reducer(a), reducer(b)
    together(lambda: reduce(jnp.ones(3)), lambda: other(jnp.ones(3)))

    def again() -> Any:
        with mj.translate_errors():
            return reduce(jnp.ones(3))

    error, _ = together(again, lambda: leave_when_awaited(a, b))
    assert isinstance(error, moolink.GroupChanged), error


def test_a_token_holds_the_program_to_its_epoch(groups: Groups, join: Join) -> None:
    a, b = groups
    program = jax.jit(lambda x, token: mj.all_reduce(a, "x", x, token=token))
    early = mj.token(a)
    c = join("c")
    all_see([a, b, c], 3)
    with pytest.raises(moolink.GroupChanged, match="make a new token"), mj.translate_errors():
        jax.block_until_ready(program(jnp.ones(3), early))


def test_donated_operands(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        program = jax.jit(lambda x: mj.all_reduce(group, "x", x, donate=True), donate_argnums=0)
        x = jnp.ones(200_000) * (rank + 1)
        address = x.unsafe_buffer_pointer()
        result = jax.block_until_ready(program(x))
        assert x.is_deleted()
        return np.asarray(result), result.unsafe_buffer_pointer() == address

    for result, in_place in of_both(groups, run):
        assert np.array_equal(result, np.full(200_000, 3))
        assert in_place
    with pytest.raises(ValueError, match="donated operands"):
        mj.all_reduce(groups[0], "x", jnp.ones(3), donate=True, on_change="retry")


def test_outside_of_a_group(broker_address: str, join: Join) -> None:
    with moolink.Rpc("alone") as rpc:
        group = moolink.Group(rpc, "alone")
        with pytest.raises(moolink.Closed, match="in no view of it yet"), mj.translate_errors():
            reducer(group)(jnp.ones(3))
        with pytest.raises(moolink.Closed, match="update"):
            mj.token(group)
        reduce = reducer(group)
        with pytest.raises(jax.errors.JaxRuntimeError):
            reduce(jnp.ones(3))
        group.close()
        with (
            pytest.raises(moolink.Closed, match="there is no group 'alone'"),
            mj.translate_errors(),
        ):
            reduce(jnp.ones(3))
        with pytest.raises(moolink.Closed, match="was closed"):
            reducer(group)(jnp.ones(3))


@pytest.mark.parametrize(
    ("leaf", "options", "kind", "reason"),
    [
        (np.ones(3), {}, TypeError, "x64"),
        (np.ones(3, np.int64), {}, TypeError, "x64"),
        ("text", {}, TypeError, "is a str"),
        (jnp.ones(3), {"op": "xor"}, ValueError, "xor of float32"),
        (jnp.ones(3), {"on_change": "ignore"}, ValueError, "raise or retry"),
        (
            [jnp.ones(3), jnp.ones(3, jnp.int32)],
            {"on_change": "retry"},
            ValueError,
            "one operation",
        ),
    ],
    ids=["wide", "wide integers", "text", "op", "on_change", "dtypes"],
)
def test_what_is_refused_when_traced(
    groups: Groups, leaf: Any, options: Any, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        mj.all_reduce(groups[0], "x", leaf, **options)


def test_cuda_programs_call_the_handler(groups: Groups) -> None:
    """No device is needed to compile for one."""
    traced = jax.jit(lambda x: mj.all_reduce(groups[0], "x", x)).trace(jnp.ones(3))
    for platforms in (("cuda",), ("cpu", "cuda")):
        assert "moolink_all_reduce" in traced.lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_other_platforms_are_refused_when_compiled(groups: Groups, platform: str) -> None:
    traced = jax.jit(lambda x: mj.all_reduce(groups[0], "x", x)).trace(jnp.ones(3))
    for platforms in ((platform,), ("cpu", platform)):
        with pytest.raises(NotImplementedError, match="outside of jit") as caught:
            traced.lower(lowering_platforms=platforms)
        assert f"is for {platform};" in str(caught.value)


def test_keys_are_refused(groups: Groups) -> None:
    with pytest.raises((TypeError, ValueError), match="key"):
        mj.all_reduce(groups[0], "x", jax.random.key(0))


def test_trees_that_differ(groups: Groups) -> None:
    def run(group: moolink.Group, rank: int) -> Any:
        with mj.translate_errors():
            return reducer(group)({"w": jnp.ones(3 + rank)})

    for error in of_both(groups, run):
        assert isinstance(error, moolink.Error)
        assert "data['w']" in str(error)


def test_other_python_threads_run_meanwhile(groups: Groups) -> None:
    a, b = groups
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()

    def late() -> Any:
        until(lambda: "waits for: 'b'" in moolink.dump(), "a to wait for b")
        before = ticks
        until(lambda: ticks > before + 10_000, "other threads to run")
        return reducer(b)(jnp.ones(3))

    x, y = together(lambda: reducer(a)(jnp.ones(3)), late)
    stop.set()
    ticker.join()
    assert np.array_equal(x, y)


def test_other_programs_run_meanwhile(groups: Groups) -> None:
    a, b = groups
    other = jax.jit(lambda x: (x @ x).sum())
    matrix = jnp.ones((200, 200))

    def late() -> Any:
        until(lambda: "waits for: 'b'" in moolink.dump(), "a to wait for b")
        values = {float(other(matrix)) for _ in range(10)}
        return values, reducer(b)(jnp.ones(3))

    x, (values, y) = together(lambda: reducer(a)(jnp.ones(3)), late)
    assert values == {200.0**3}
    assert np.array_equal(x, y)


def test_groups_of_one_name_are_told_apart(broker_address: str, join: Join) -> None:
    """Each program uses the group that it was traced with, though both have the same name."""
    with moolink.Broker(first=True) as other_broker:
        address = other_broker.listen("127.0.0.1:0")[0]
        here = join("here")
        with moolink.Rpc("there") as rpc:
            rpc.connect(address)
            there = moolink.Group(rpc, "group")
            all_see([here], 1)
            all_see([there], 1)
            x, y = together(
                lambda: reducer(here)(jnp.ones(2)), lambda: reducer(there)(jnp.full(2, 5.0))
            )
            assert np.array_equal(x, [1, 1])
            assert np.array_equal(y, [5, 5])
            there.close()
