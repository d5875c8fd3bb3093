"""Adam and RMSProp of optax, and their states as every framework understands them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.common.config import LearnerConfig


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """The configured optimiser, for a learning rate of -1: it returns what is to be subtracted."""
    if config.optimizer == "adam":
        return optax.scale_by_adam(0.9, 0.999, config.adam_eps)
    # Torch adds epsilon to the root, and so must who learns with torch in one group.
    return optax.scale_by_rms(config.rmsprop_decay, config.rmsprop_eps, eps_in_sqrt=False)


def to_neutral(state: Any) -> dict[str, Any]:
    """The state as in checkpoints: a count, and lists of arrays in the order of the parameters."""
    if isinstance(state, optax.ScaleByAdamState):
        return {
            "count": int(state.count),
            "mean": jax.tree.leaves(state.mu),
            "mean_of_squares": jax.tree.leaves(state.nu),
        }
    return {"mean_of_squares": jax.tree.leaves(state.nu)}


def from_neutral(like: Any, neutral: dict[str, Any]) -> Any:
    """The inverse of `to_neutral`, for an optimiser with a state like `like`."""

    def tree(name: str) -> Any:
        structure = jax.tree.structure(like.nu)
        return jax.tree.unflatten(structure, [jnp.array(x) for x in neutral[name]])

    if isinstance(like, optax.ScaleByAdamState):
        count = jnp.int32(neutral["count"])
        return optax.ScaleByAdamState(count, tree("mean"), tree("mean_of_squares"))
    return like._replace(nu=tree("mean_of_squares"))
