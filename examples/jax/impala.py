"""IMPALA in JAX: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.jax.impala                        two peers and a broker
    python -m examples.jax.impala --connect HOST:PORT --group G    one more peer
    python -m examples.jax.impala --mode evaluate                  play from the checkpoint

The same as `examples.torch.impala`, in pure functions: peers of both may learn in one group, and go
on from each other's checkpoints.

Time is the first axis of all arrays, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.typing import NDArray

import moolink.jax
from examples.common import learner
from examples.common.config import Config, LearnerConfig
from examples.common.environments import VectorEnv
from examples.common.unrolls import Batch
from examples.jax import net as nets
from examples.jax.net import ActingPolicy, Net
from examples.jax.optimizers import from_neutral, make_optimizer, to_neutral


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


class Steps(NamedTuple):
    """A batch's arrays, as in `examples.common.unrolls.Batch`."""

    observation: Any
    action: Any
    log_prob: Any
    reward: Any
    done: Any


def impala_loss(
    config: LearnerConfig, net: Net, pixel_mean: jax.Array, steps: Steps
) -> tuple[jax.Array, jax.Array]:
    """The loss of one contribution, and the mean entropy of the policy in nats.

    `mean`: over time and batch. `sum`: summed over time and averaged over the batch, so that the
    round's weighted mean times its batch size is the paper's sum over everything.
    """
    logits, baseline = nets.forward(
        config.net, config.precision, net, pixel_mean, steps.observation
    )
    log_pi = jax.nn.log_softmax(logits[:-1])
    log_pi_a = jnp.take_along_axis(log_pi, steps.action[..., None], -1).squeeze(-1)
    targets = vtrace(
        lax.stop_gradient(log_pi_a) - steps.log_prob,
        config.discount * ~steps.done,
        jnp.sign(steps.reward) if config.clip_reward else steps.reward,
        lax.stop_gradient(baseline[:-1]),
        lax.stop_gradient(baseline[-1]),
        lambda_=config.vtrace_lambda,
        clip_rho=config.clip_rho,
        clip_c=config.clip_c,
    )
    entropy = -(jnp.exp(log_pi) * log_pi).sum(-1)
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + config.baseline_cost * 0.5 * jnp.square(targets.vs - baseline[:-1])
        - config.entropy_cost * entropy
    )
    total = loss_t.mean() if config.loss == "mean" else loss_t.sum(0).mean()
    return total, entropy.mean()


def apply_gradients(
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    net: Net,
    state: Any,
    gradients: Net,
    learning_rate: float,
    factor: float,
) -> tuple[Net, Any, jax.Array]:
    """Clips the gradients times `factor` and steps the optimiser; also returns the norm before
    clipping."""
    gradients = jax.tree.map(lambda g: g * factor, gradients)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(max_grad_norm / (norm + 1e-6), 1.0)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    updates, state = optimizer.update(gradients, state, net)
    return jax.tree.map(lambda p, u: p - learning_rate * u, net, updates), state, norm


class Impala:
    """What `examples.common.learner` needs of JAX."""

    def __init__(
        self, config: Config, env: VectorEnv, parameters: dict[str, NDArray[Any]] | None
    ) -> None:
        self.kind = config.learner.net
        self.pixel_mean = jnp.array(learner.pixel_mean(config, env, parameters))
        self.net = nets.init(self.kind, env.observation_shape, env.num_actions, config.job.seed)
        if parameters is not None:
            self.net = nets.from_arrays(self.kind, self.net, parameters)
        optimizer = make_optimizer(config.learner)
        self.optimizer_state = optimizer.init(self.net)
        precision = config.learner.precision
        self.policy = ActingPolicy(
            self.kind, precision, self.net, self.pixel_mean, config.actor_seed
        )
        self._forward = jax.jit(partial(nets.forward, self.kind, precision))
        loss = partial(impala_loss, config.learner)
        self._learn = jax.jit(jax.value_and_grad(loss, has_aux=True))
        self._apply = jax.jit(partial(apply_gradients, optimizer, config.learner.max_grad_norm))

    def join(self, group: moolink.Group) -> moolink.jax.Accumulator:
        self.accumulator = moolink.jax.Accumulator("impala", self.net, self.pixel_mean, group=group)
        return self.accumulator

    def contribute(
        self, batch: Batch, release: Callable[[], None], **reduce: Any
    ) -> learner.Losses:
        steps = Steps(*(getattr(batch, name) for name in Steps._fields))
        net = self.accumulator.parameters()
        (total, entropy), gradients = self._learn(net, self.pixel_mean, steps)
        losses = learner.Losses(float(total), float(entropy))
        jax.block_until_ready(gradients)
        release()  # what was read without a copy may be written from now on
        self.accumulator.reduce_gradients(gradients, **reduce)
        return losses

    def apply_round(self, learning_rate: float, factor: float) -> float:
        net, state, norm = self._apply(
            self.accumulator.parameters(),
            self.optimizer_state,
            self.accumulator.gradients(),
            learning_rate,
            factor,
        )
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradients is {norm}")
        self.optimizer_state = state
        self.accumulator.set_parameters(net)
        self.accumulator.zero_gradients()
        self.policy.update(net, self.pixel_mean)
        return float(norm)

    def state(self) -> dict[str, Any]:
        return to_neutral(self.optimizer_state)

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer_state = from_neutral(self.optimizer_state, state)
        self.pixel_mean = self.accumulator.buffers()
        self.policy.update(self.accumulator.parameters(), self.pixel_mean)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return nets.to_arrays(self.kind, self.accumulator.parameters(), self.pixel_mean)

    def best_actions(self, observation: NDArray[np.uint8]) -> NDArray[np.int64]:
        logits, _ = self._forward(self.net, self.pixel_mean, observation[None])
        return np.asarray(logits[0].argmax(-1)).astype(np.int64)


def prepare(config: Config) -> None:
    """Peers of one core each would only wake each other up with XLA's threads."""
    if config.group.cores == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {flags}"


def main() -> int:
    return learner.run(Impala, prepare)


if __name__ == "__main__":
    sys.exit(main())
