"""moolink for JAX."""

from moolink.jax.programs import Token, all_reduce, token, translate_errors

__all__ = ["Token", "all_reduce", "token", "translate_errors"]
