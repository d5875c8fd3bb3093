"""Helpers of the JAX learners: JAX's settings, a layer, networks and checkpoints."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moolink.jax
from examples.common import checkpoint
from examples.common.environments import Environments, random_means
from examples.common.options import Options

Parameters = OrderedDict[str, Any]  # by torch's names, in torch's order


def configure(o: Options, one_thread: bool = False) -> None:
    """Chooses device and threads; called before JAX computes anything. With `one_thread`, an
    operation has the same bits for any number of cores."""
    if o.device != "auto":
        jax.config.update("jax_platforms", o.device)
    if o.cores == 1 or one_thread:  # XLA's threads would only wake each other up
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {flags}"


def dense(p: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    return x @ p[name + ".weight"].T + p[name + ".bias"]


def parameters_of(
    net: Any, envs: Environments, o: Options, saved: dict[str, Any] | None
) -> tuple[Parameters, Parameters]:
    """A network's parameters and buffers: of a checkpoint, or new and equal at all peers."""
    p = net.init(o.seed)
    if saved is None:
        seed_envs = getattr(o, "deterministic", False)
        return p, net.buffers(random_means(envs, o.seed, seed_envs=seed_envs))
    spaces = envs.observation_spaces.items()
    zeros = {k: np.zeros(s.shape, np.float32) for k, s in spaces if s.dtype == np.uint8}
    buffers = net.buffers(zeros)
    found = checkpoint.parameters(o, saved, {**p, **buffers})
    return arrays(found, p), arrays(found, buffers)


def snapshot(accumulator: moolink.jax.Accumulator) -> dict[str, Any]:
    """The model for a checkpoint, with parameters and buffers by torch's names."""
    return {
        "parameters": {**accumulator.parameters(), **accumulator.buffers()},
        "optimizer": moolink.jax.optimizer_state(accumulator.optimizer_state()),
    }


def arrays(found: Mapping[str, Any], names: Iterable[str]) -> Parameters:
    """Those parameters or buffers of a checkpoint, in this order."""
    return OrderedDict((name, jnp.array(found[name])) for name in names)
