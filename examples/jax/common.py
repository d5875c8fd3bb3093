"""Helpers of the JAX learners: JAX's settings, and the checkpoint of an accumulator."""

from __future__ import annotations

import os
from typing import Any

import jax

import moolink.jax
from examples.common.options import Options


def configure(o: Options) -> None:
    """Chooses device and threads; called before JAX computes anything."""
    if o.device != "auto":
        jax.config.update("jax_platforms", o.device)
    if o.cores == 1:  # XLA's threads would only wake each other up
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {flags}"


def snapshot(accumulator: moolink.jax.Accumulator) -> dict[str, Any]:
    """The model for a checkpoint, with parameters and buffers by torch's names."""
    return {
        "parameters": {**accumulator.parameters(), **accumulator.buffers()},
        "optimizer": moolink.jax.optimizer_state(accumulator.optimizer_state()),
    }
