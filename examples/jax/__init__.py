"""Learners written in JAX."""

from moolink.internal.extras import needed_by

with needed_by("examples.jax", "jax"):
    import optax  # noqa: F401 - and with it JAX
