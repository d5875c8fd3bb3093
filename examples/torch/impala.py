"""IMPALA in PyTorch: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.torch.impala                        two peers and a broker
    python -m examples.torch.impala --connect HOST:PORT --group G    one more peer
    python -m examples.torch.impala --mode evaluate                  play from the checkpoint

In each peer one thread acts (`examples.common.actor`) and the main thread learns. Both spend most
of their time in code that has released the GIL. The parameters are equal on all peers because all
apply the same gradients in the same order; a newcomer gets them from the group's leader.

Time is the first axis of all tensors, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import moolink.torch
from examples.common import learner
from examples.common.config import Config, LearnerConfig
from examples.common.environments import VectorEnv
from examples.common.unrolls import Batch
from examples.torch.net import ActingPolicy, Net
from examples.torch.optimizers import Optimizer, make_optimizer


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
    for t in reversed(range(len(delta_t))):
        correction = torch.addcmul(delta_t[t], discounted_c_t[t], correction, out=corrections[t])
    vs = value_t + corrections
    vs_tp1 = torch.cat([vs[1:], bootstrap_value[None]])
    return VTrace(vs, rho_t * (reward_t + discount_t * vs_tp1 - value_t))


class Losses(NamedTuple):
    """Scalars. `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: Tensor
    entropy: Tensor


def impala_loss(net: Net, batch: Batch, config: LearnerConfig) -> Losses:
    """The loss of one contribution.

    `mean`: over time and batch. `sum`: summed over time and averaged over the batch, so that the
    round's weighted mean times its batch size is the paper's sum over everything.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits, baseline = net(torch.from_numpy(batch.observation))
    log_pi = F.log_softmax(logits[:-1], dim=-1)
    action_t = torch.from_numpy(batch.action)
    log_pi_a = log_pi.gather(-1, action_t[..., None]).squeeze(-1)
    reward_t = torch.from_numpy(batch.reward)
    with torch.no_grad():
        targets = vtrace(
            log_pi_a - torch.from_numpy(batch.log_prob),
            config.discount * torch.from_numpy(~batch.done),
            reward_t.sign() if config.clip_reward else reward_t,
            baseline[:-1],
            baseline[-1],
            lambda_=config.vtrace_lambda,
            clip_rho=config.clip_rho,
            clip_c=config.clip_c,
        )
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + config.baseline_cost * 0.5 * (targets.vs - baseline[:-1]).square()
        - config.entropy_cost * entropy
    )
    total = loss_t.mean() if config.loss == "mean" else loss_t.sum(0).mean()
    return Losses(total, entropy.detach().mean())


def apply_gradients(
    net: Net, optimizer: Optimizer, learning_rate: float, max_grad_norm: float
) -> float:
    """Clips the gradients, steps the optimiser and returns the norm before clipping.

    Raises FloatingPointError, changing nothing, if the norm is not finite.
    """
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError(f"the norm of the gradients is {norm.item()}")
    optimizer.step(learning_rate)
    return norm.item()


class Impala:
    """What `examples.common.learner` needs of torch."""

    def __init__(
        self, config: Config, env: VectorEnv, parameters: dict[str, NDArray[Any]] | None
    ) -> None:
        self.config = config.learner
        self.net = make_net(config, env, parameters)
        self.optimizer = make_optimizer(self.net.parameters(), config.learner)
        dtype = getattr(torch, config.learner.precision)
        self.policy = ActingPolicy(self.net, config.actor_seed, dtype)

    def join(self, group: moolink.Group) -> moolink.torch.Accumulator:
        self.accumulator = moolink.torch.Accumulator(
            "impala", self.net.parameters(), self.net.buffers(), group=group
        )
        return self.accumulator

    def contribute(
        self, batch: Batch, release: Callable[[], None], **reduce: Any
    ) -> learner.Losses:
        losses = impala_loss(self.net, batch, self.config)
        losses.total.backward()
        release()
        self.accumulator.reduce_gradients(**reduce)
        return learner.Losses(losses.total.item(), losses.entropy.item())

    def apply_round(self, learning_rate: float, factor: float) -> float:
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self.net.parameters()], factor)
        norm = apply_gradients(self.net, self.optimizer, learning_rate, self.config.max_grad_norm)
        self.accumulator.zero_gradients()
        self.policy.update(self.net)
        return norm

    def state(self) -> dict[str, Any]:
        return self.optimizer.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state(state)
        self.policy.update(self.net)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {name: x.numpy() for name, x in self.net.state_dict().items()}

    def best_actions(self, observation: NDArray[np.uint8]) -> NDArray[np.int64]:
        with torch.inference_mode():
            logits, _ = self.net(torch.from_numpy(observation)[None])
            return logits[0].argmax(-1).numpy()


def make_net(config: Config, env: VectorEnv, parameters: dict[str, NDArray[Any]] | None) -> Net:
    """The network: with the parameters of a checkpoint, or new and equal on all peers."""
    mean = learner.pixel_mean(config, env, parameters)
    torch.manual_seed(config.job.seed)
    net = Net(config.learner.net, env.observation_shape, env.num_actions, mean)
    if parameters is not None:
        net.load_state_dict({k: torch.from_numpy(x) for k, x in parameters.items()})
    return net


def main() -> int:
    return learner.run(Impala, lambda config: torch.set_num_threads(config.torch_threads))


if __name__ == "__main__":
    sys.exit(main())
