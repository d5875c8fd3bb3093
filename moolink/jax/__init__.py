"""moolink for JAX: the accumulator on pytrees, and collectives, also in compiled functions."""

from moolink.internal.extras import needed_by

with needed_by("moolink.jax", "jax"):
    from moolink.jax.accumulator import Accumulator, TrainingStep
    from moolink.jax.collectives import all_gather, broadcast, gather, reduce_scatter, scatter
    from moolink.jax.optimizers import load_optimizer_state, optimizer_state
    from moolink.jax.programs import Token, all_reduce, token, translate_errors
    from moolink.jax.states import plain_tree, tree_like

__all__ = [
    "Accumulator",
    "Token",
    "TrainingStep",
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "load_optimizer_state",
    "optimizer_state",
    "plain_tree",
    "reduce_scatter",
    "scatter",
    "token",
    "translate_errors",
    "tree_like",
]
