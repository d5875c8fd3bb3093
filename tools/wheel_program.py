"""The program with which check_wheel.py tests a wheel: tools/wheel_program.py [torch] [jax].

It tests calls and an all-reduce of numpy arrays. For each framework in its arguments, two processes
reduce the framework's arrays and train with its accumulator, over shared memory.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np

import moolink

LIMIT = 120  # seconds
TARGET = 3.0  # the parameters are trained to this value


def main(frameworks: list[str]) -> None:
    """Raises AssertionError or an error of moolink if a test fails."""
    with moolink.Broker(first=True) as broker, moolink.Rpc("a") as a, moolink.Rpc("b") as b:
        address = broker.listen("127.0.0.1:0")[0]
        a.define("double", lambda x: 2 * x)
        for peer in (a, b):
            peer.connect(address)
        x = np.arange(100_000, dtype=np.float32)
        assert np.array_equal(b.sync("a", "double", x), 2 * x)
        print("called", flush=True)
        with moolink.Group(a, "g") as first, moolink.Group(b, "g") as second:
            for group in (first, second):
                group.wait_for_members(2, LIMIT)
            sums = [group.all_reduce("s", np.ones(3)) for group in (first, second)]
            assert all(np.array_equal(one.result(LIMIT), 2 * np.ones(3)) for one in sums)
        for framework in frameworks:
            command = [sys.executable, __file__, framework, address]
            with subprocess.Popen([*command, "peer-1"]) as other:
                member(framework, address, "peer-0")
                assert other.wait(LIMIT) == 0
            print(f"trained with {framework}", flush=True)


def member(framework: str, address: str, name: str) -> None:
    """One of two peers that train."""
    with moolink.Rpc(name) as rpc:
        rpc.connect(address)
        with moolink.Group(rpc, framework) as group:
            group.wait_for_members(2, LIMIT)
            (other,) = set(group.members()) - {name}
            deadline = time.monotonic() + LIMIT
            while rpc.explain(other)["path"] != "shm":
                assert time.monotonic() < deadline, rpc.explain(other)
                time.sleep(0.01)
            trained = (in_torch if framework == "torch" else in_jax)(group, int(name[-1]))
            assert np.abs(trained - TARGET).max() < 0.1, trained
            largest = group.all_reduce("largest", trained, op="max").result(LIMIT)
            assert np.array_equal(largest, trained), "the members' parameters differ"


def in_torch(group: moolink.Group, rank: int) -> Any:
    """Returns the parameters after 50 rounds."""
    import torch

    total = group.all_reduce("sum", torch.full((1000,), rank + 1.0)).result(LIMIT)
    assert isinstance(total, torch.Tensor)
    assert torch.equal(total, torch.full((1000,), 3.0))
    parameters = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameters], lr=0.1)
    with moolink.torch.Accumulator("model", [parameters], group=group) as accumulator:
        accumulator.set_virtual_batch_size(2)
        for step in accumulator.steps(optimizer, until=lambda totals: totals["rounds"] >= 50):
            loss = (parameters - TARGET).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            step.reduce(batch_size=1, counters={"rounds": 1 - rank})
    return parameters.detach().numpy()


def in_jax(group: moolink.Group, rank: int) -> Any:
    """Returns the parameters after 50 rounds."""
    import jax
    import jax.numpy as jnp
    import optax

    import moolink.jax

    x = jnp.full(1000, rank + 1.0)
    total = group.all_reduce("sum", x).result(LIMIT)
    assert isinstance(total, jax.Array)
    assert (total == 3).all()
    compiled = jax.jit(lambda x: moolink.jax.all_reduce(group, "compiled", x))
    assert (compiled(x) == 3).all()
    gradients_of = jax.jit(jax.grad(lambda parameters: jnp.square(parameters - TARGET).sum()))
    with moolink.jax.Accumulator("model", jnp.zeros(1000), group=group) as accumulator:
        accumulator.set_virtual_batch_size(2)
        for step in accumulator.steps(optax.sgd(0.1), until=lambda totals: totals["rounds"] >= 50):
            gradients = gradients_of(step.parameters)
            step.reduce(gradients, batch_size=1, counters={"rounds": 1 - rank})
        return np.asarray(accumulator.parameters())


if __name__ == "__main__":
    if len(sys.argv) == 4:
        member(*sys.argv[1:])
    else:
        main(sys.argv[1:])
