"""A peer of the examples that also writes a line for each version of its model.

    python -m tests.learning.logged_peer {torch|jax} LOG [the example's own options]

The lines are those of `tests.round_log`.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from typing import Any, TextIO

import numpy as np

from examples.common.learner import model_checksum


def hashed(arrays: list[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gradients_of(model: Any, framework: str) -> list[Any]:
    """In the order of the parameters, before anything is done to them."""
    if framework == "torch":
        return [p.grad.numpy() for p in model.net.parameters()]
    import jax

    return jax.tree.leaves(model.accumulator.gradients())


def logged(kind: Any, framework: str, log: TextIO) -> Any:
    """The example's model, which writes a line once the parameters of a round are final."""

    class Logged(kind):  # type: ignore[misc]
        due: tuple[int, str, str] | None = None

        def join(self, group: Any) -> Any:
            accumulator = super().join(group)
            update = accumulator.update

            def update_and_log() -> None:
                update()
                self.log()

            accumulator.update = update_and_log
            return accumulator

        def apply_round(self, learning_rate: float, factor: float) -> float:
            accumulator = self.accumulator
            names = ",".join(sorted(set(accumulator.get_gradient_stats()["contributors"])))
            version = accumulator.model_version()
            self.due = version, hashed(gradients_of(self, framework)), names
            norm: float = super().apply_round(learning_rate, factor)
            return norm

        def log(self) -> None:
            if self.accumulator.has_new_state():  # the parameters are of a later version
                self.due = None
            if self.due is None or self.accumulator.awaits_parameters():
                return
            version, gradients, contributors = self.due
            parameters = model_checksum(self) if self.accumulator.in_step() else "-"
            print(version, gradients, parameters, contributors, time.monotonic(), file=log)
            self.due = None

    return Logged


def main() -> int:
    framework, path = sys.argv[1:3]
    example = importlib.import_module(f"examples.{framework}.impala")
    sys.argv[1:3] = []
    with open(path, "a", buffering=1) as log:
        example.Impala = logged(example.Impala, framework, log)
        status: int = example.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
