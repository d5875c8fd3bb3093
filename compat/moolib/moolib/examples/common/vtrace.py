"""V-trace targets of IMPALA (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

T is the length of an unroll, B the number of unrolls, A the number of actions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTraceReturns(NamedTuple):
    """Targets of the values, and advantages of the policy gradient: [T, B]."""

    vs: Tensor
    pg_advantages: Tensor


class VTraceFromLogitsReturns(NamedTuple):
    """VTraceReturns, and the logarithms that they were computed from: [T, B]."""

    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities of the actions [T, B] under softmax policies [T, B, A]."""
    log_policy = torch.log_softmax(policy_logits, dim=-1)
    return log_policy.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> VTraceFromLogitsReturns:
    """Targets for softmax policies: the one that acted, and the one that learns.

    Args:
        behavior_policy_logits, target_policy_logits: [T, B, A].
        actions, discounts, rewards, values: [T, B].
        bootstrap_value: the value after the last step, [B].
        clip_rho_threshold, clip_pg_rho_threshold: the most that an importance weight counts in
            targets and in advantages; None: no limit.
    """
    target = action_log_probs(target_policy_logits, actions)
    behavior = action_log_probs(behavior_policy_logits, actions)
    log_rhos = target - behavior
    returns = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold,
        clip_pg_rho_threshold,
    )
    return VTraceFromLogitsReturns(*returns, log_rhos, behavior, target)


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> VTraceReturns:
    """Targets from logarithms of importance weights; arguments as for :func:`from_logits`."""
    rhos = log_rhos.exp()
    following = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = _clipped(rhos, clip_rho_threshold) * (rewards + discounts * following - values)
    carried = discounts * rhos.clamp(max=1.0)
    corrections = torch.empty_like(deltas)
    correction = torch.zeros_like(bootstrap_value)
    for t in reversed(range(len(deltas))):
        correction = deltas[t] + carried[t] * correction
        corrections[t] = correction
    vs = values + corrections
    following_vs = torch.cat([vs[1:], bootstrap_value.expand_as(vs[:1])])
    weights = _clipped(rhos, clip_pg_rho_threshold)
    return VTraceReturns(vs, weights * (rewards + discounts * following_vs - values))


def _clipped(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
