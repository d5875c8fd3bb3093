"""V-trace, which corrects for actions of an older policy: for the IMPALA learners."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Targets of the baseline and weights of the policy gradient, both [T, B]."""

    vs: Tensor
    pg_advantages: Tensor


def vtrace(
    log_rho_t: Tensor,
    discount_t: Tensor,
    reward_t: Tensor,
    value_t: Tensor,
    bootstrap_value: Tensor,
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
    ratio_t = log_rho_t.exp()
    rho_t = ratio_t.clamp(max=clip_rho)
    discounted_c_t = discount_t * ratio_t.clamp(max=clip_c) * lambda_
    value_tp1 = torch.cat([value_t[1:], bootstrap_value[None]])
    delta_t = rho_t * (reward_t + discount_t * value_tp1 - value_t)
    corrections = torch.empty_like(delta_t)  # vs_t - V_t
    correction = torch.zeros_like(bootstrap_value)
    steps = [*zip(delta_t, discounted_c_t, corrections, strict=True)]
    for delta, discounted_c, out in reversed(steps):
        correction = torch.addcmul(delta, discounted_c, correction, out=out)
    vs = value_t + corrections
    vs_tp1 = torch.cat([vs[1:], bootstrap_value[None]])
    return VTrace(vs, rho_t * (reward_t + discount_t * vs_tp1 - value_t))
