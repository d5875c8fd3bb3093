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


def hashed(arrays: list[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def gradients_of(accumulator: Any) -> list[Any]:
    """In the order of the parameters."""
    if accumulator.framework == "torch":
        return [p.grad.numpy() for p in accumulator._parameters]
    import jax

    return jax.tree.leaves(accumulator.gradients())


def parameters_of(accumulator: Any) -> list[Any]:
    """In the same order."""
    if accumulator.framework == "torch":
        return [p.detach().numpy() for p in accumulator._parameters]
    import jax

    return jax.tree.leaves(accumulator.parameters())


def logged(kind: Any, log: TextIO) -> Any:
    """An accumulator that writes a line once the parameters of a round are final."""

    class Logged(kind):  # type: ignore[misc]
        due: tuple[int, str, str] | None = None

        def zero_gradients(self) -> None:
            if self.has_gradients():
                names = ",".join(sorted(set(self.get_gradient_stats()["contributors"])))
                self.due = self.model_version(), hashed(gradients_of(self)), names
            super().zero_gradients()

        def _update_all_but_rounds(self) -> None:
            super()._update_all_but_rounds()
            if self.has_new_state():  # the parameters are of a later version
                self.due = None
            if self.due is None or self.awaits_parameters():
                return
            version, gradients, contributors = self.due
            parameters = hashed(parameters_of(self)) if self.in_step() else "-"
            print(version, gradients, parameters, contributors, time.monotonic(), file=log)
            self.due = None

    return Logged


def main() -> int:
    framework, path = sys.argv[1:3]
    adapter = importlib.import_module(f"moolink.{framework}")
    example = importlib.import_module(f"examples.{framework}.impala")
    sys.argv[1:3] = []
    with open(path, "a", buffering=1) as log:
        adapter.Accumulator = logged(adapter.Accumulator, log)
        return int(example.main(example.ImpalaOptions, example.train, example.evaluate))


if __name__ == "__main__":
    sys.exit(main())
