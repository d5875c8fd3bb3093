"""A member in torch or in JAX, as a process: python -m tests.accumulator.mixed_member ...

Writes a line for each version of its model: those of `tests.round_log`.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import numpy as np

import moolink

SHAPES = ((256, 128), (256,), (3, 256))
RATE, DECAY, EPS = np.float32(1e-3), np.float32(0.9), np.float32(1e-3)


def hashed(arrays: list[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def initial() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


class InTorch:
    """RMSProp, and gradients of tanh(parameters) against noise."""

    def __init__(self, group: moolink.Group) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        self.model = [torch.from_numpy(x).requires_grad_() for x in initial()]
        self.squares = [torch.zeros_like(p) for p in self.model]
        self.accumulator = moolink.torch.Accumulator("m", self.model, group=group, checksum_every=1)

    def contribute(self, noise: list[np.ndarray[Any, Any]]) -> None:
        for p, x in zip(self.model, noise, strict=True):
            (self.torch.tanh(p) - self.torch.from_numpy(x)).square().mean().backward()
        self.accumulator.reduce_gradients(1)

    def gradients(self) -> list[Any]:
        return [p.grad.numpy() for p in self.model]

    def apply(self) -> None:
        with self.torch.no_grad():
            for p, square in zip(self.model, self.squares, strict=True):
                square.mul_(DECAY).addcmul_(p.grad, p.grad, value=1 - DECAY)
                p.addcdiv_(p.grad, square.sqrt().add_(EPS), value=-RATE)

    def parameters(self) -> list[Any]:
        return [p.detach().numpy() for p in self.model]

    def load(self, squares: list[Any]) -> None:
        for mine, theirs in zip(self.squares, squares, strict=True):
            mine.copy_(self.torch.as_tensor(theirs))


class InJax:
    """The same."""

    def __init__(self, group: moolink.Group) -> None:
        import jax
        import jax.numpy as jnp

        model = [jnp.array(x) for x in initial()]
        self.squares = [jnp.zeros_like(p) for p in model]
        self.accumulator = moolink.jax.Accumulator("m", model, group=group, checksum_every=1)

        def loss(model: Any, noise: Any) -> Any:
            return sum(((jnp.tanh(p) - x) ** 2).mean() for p, x in zip(model, noise, strict=True))

        def step(model: Any, squares: Any, gradients: Any) -> Any:
            squares = [
                DECAY * s + (1 - DECAY) * g * g for s, g in zip(squares, gradients, strict=True)
            ]
            updated = [
                p - RATE * g / (jnp.sqrt(s) + EPS)
                for p, s, g in zip(model, squares, gradients, strict=True)
            ]
            return updated, squares

        self.gradients_of, self.step = jax.jit(jax.grad(loss)), jax.jit(step)

    def contribute(self, noise: list[np.ndarray[Any, Any]]) -> None:
        self.accumulator.reduce_gradients(
            self.gradients_of(self.accumulator.parameters(), noise), 1
        )

    def gradients(self) -> list[Any]:
        return self.accumulator.gradients()

    def apply(self) -> None:
        model, self.squares = self.step(
            self.accumulator.parameters(), self.squares, self.accumulator.gradients()
        )
        self.accumulator.set_parameters(model)

    def parameters(self) -> list[Any]:
        return self.accumulator.parameters()

    def load(self, squares: list[Any]) -> None:
        import jax.numpy as jnp

        self.squares = [jnp.array(np.asarray(s)) for s in squares]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("framework", "address", "name", "log"):
        parser.add_argument(name)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each contribution")
    options = parser.parse_args()
    random = np.random.default_rng(abs(hash(options.name)) % 1000)
    with moolink.Rpc(options.name) as rpc, open(options.log, "a", buffering=1) as log:
        rpc.connect(options.address)
        group = moolink.Group(rpc, "mixed")
        member = (InTorch if options.framework == "torch" else InJax)(group)
        accumulator = member.accumulator
        accumulator.set_virtual_batch_size(2)
        due: tuple[int, str, str] | None = None
        while True:
            accumulator.update()
            if accumulator.has_new_state():  # the parameters are of a later version
                due = None
            if due is not None and not accumulator.awaits_parameters():
                version, gradients, contributors = due
                parameters = hashed(member.parameters()) if accumulator.in_step() else "-"
                print(version, gradients, parameters, contributors, time.monotonic(), file=log)
                due = None
            if accumulator.wants_state():
                accumulator.set_state(member.squares)
            if accumulator.has_new_state():
                member.load(accumulator.state())
            if accumulator.has_gradients():
                names = ",".join(sorted(set(accumulator.get_gradient_stats()["contributors"])))
                due = (accumulator.model_version(), hashed(member.gradients()), names)
                member.apply()
                accumulator.zero_gradients()
            elif accumulator.wants_gradients():
                time.sleep(options.pause)
                member.contribute([random.normal(size=s).astype(np.float32) for s in SHAPES])
            else:
                accumulator.wait(0.1)


if __name__ == "__main__":
    main()
