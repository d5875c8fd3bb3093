"""V-trace, which corrects for actions of an older policy: for the IMPALA learners."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class VTrace(NamedTuple):
    """Targets of the baseline and weights of the policy gradient, both [T, B]."""

    vs: jax.Array
    pg_advantages: jax.Array


def vtrace(
    log_rho_t: jax.Array,
    discount_t: jax.Array,
    reward_t: jax.Array,
    value_t: jax.Array,
    bootstrap_value: jax.Array,
    *,
    lambda_: float,
    clip_rho: float,
    clip_c: float,
) -> VTrace:
    """V-trace, from remark 2 and section 4.2 of the IMPALA paper (arXiv 1802.01561).

    With rho_t = min(clip_rho, pi(a_t | x_t) / mu(a_t | x_t)) and c_t = lambda min(clip_c, ...):

        vs_t = V_t + rho_t (r_t + gamma_t V_{t+1} - V_t) + gamma_t c_t (vs_{t+1} - V_{t+1})
        pg_advantage_t = rho_t (r_t + gamma_t vs_{t+1} - V_t)

    Args:
        log_rho_t: log(pi / mu) of the actions taken [T, B], float.
        discount_t: gamma, or 0 where the return ended with the step [T, B].
        reward_t: [T, B].
        value_t: the baseline V at the observations before the steps [T, B].
        bootstrap_value: V at the observation after the last step [B].
    """
    ratio_t = jnp.exp(log_rho_t)
    rho_t = jnp.minimum(ratio_t, clip_rho)
    discounted_c_t = discount_t * jnp.minimum(ratio_t, clip_c) * lambda_
    value_tp1 = jnp.concatenate([value_t[1:], bootstrap_value[None]])
    delta_t = rho_t * (reward_t + discount_t * value_tp1 - value_t)

    def before(correction: jax.Array, at_t: Any) -> tuple[jax.Array, jax.Array]:
        delta, discounted_c = at_t
        correction = delta + discounted_c * correction  # vs_t - V_t
        return correction, correction

    start = jnp.zeros_like(bootstrap_value)
    _, corrections = lax.scan(before, start, (delta_t, discounted_c_t), reverse=True)
    vs = value_t + corrections
    vs_tp1 = jnp.concatenate([vs[1:], bootstrap_value[None]])
    return VTrace(vs, rho_t * (reward_t + discount_t * vs_tp1 - value_t))
