"""IMPALA in JAX with separate actors: one process learns, the others act for it.

    moolink run -n 3 -m examples.jax.actor_learner                         a learner and two actors
    moolink run -n 3 --restart 9 -m examples.jax.actor_learner             also when some are killed
    python -m examples.jax.actor_learner --connect HOST:PORT --group G --peer-index 3     an actor
    python -m examples.jax.actor_learner --mode evaluate                   play from the checkpoint

The twin of `examples/torch/actor_learner.py`. Peer 0 is the learner (`learn`), every other one an
actor (`act`). Weights go to the actors by `moolink.Publisher` and `Subscriber`, unrolls come back
by `moolink.TrajectoryWriter` and `TrajectoryQueue`, which drops those that were begun more than
`--max-lag` versions ago. V-trace corrects for the lag that is left. All processes find one another
by name: an actor that is killed costs its unroll, and a learner that is started again goes on from
its checkpoint. What is computed are pure functions, compiled once: `step` and `update`.

Time is the first axis of all arrays, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments of an actor, B that
of an update.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces
from jax import lax

import moolink.jax
from examples.common import checkpoint
from examples.common.environments import make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.options import OptionError
from examples.common.roles import LearnerRun, RoleOptions, connected, follower, spaces_of
from examples.common.run import main
from examples.jax import common
from examples.jax.common import dense
from examples.jax.vtrace import vtrace

Parameters = dict[str, Any]  # by name; "mean", of random play, is not learned


@dataclass
class ActorLearnerOptions(RoleOptions):
    """IMPALA with actors in processes of their own."""

    num_envs: int = 8
    """E, environments of each actor."""
    unroll_length: int = 20
    """T, the number of steps of an unroll."""
    batch_size: int = 8
    """B, environments in an update; a multiple of --num-envs."""
    queue_size: int = 4
    """Unrolls that may wait for the learner; actors with more wait."""
    max_lag: int = 8
    """Updates of the weights since an unroll was begun, at most."""
    reward_scale: float = 1.0
    """The learner multiplies rewards by this."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""
    vtrace_lambda: float = 0.95
    """Mixes n-step returns in V-trace's traces; 1 is the paper's."""
    clip_rho: float = 1.0
    """Clips the importance weights of the temporal differences and of the policy gradient."""
    clip_c: float = 1.0
    """Clips the importance weights of the traces."""

    def preset(self) -> None:
        if self.is_atari:
            self.total_steps, self.hidden_size = 2_000_000, 256
            self.entropy_cost, self.clip_reward, self.episodic_life = 0.005, True, True
            self.greedy = False  # the likeliest action may never serve the ball
        elif self.env_id.startswith("CartPole"):
            self.total_steps, self.reward_scale = 400_000, 0.03
            self.max_grad_norm, self.entropy_cost = 40.0, 0.003

    def validate(self) -> None:
        super().validate()
        if self.batch_size % self.num_envs:
            raise OptionError(
                f"--batch-size {self.batch_size} must be a multiple of --num-envs {self.num_envs}"
            )


class Net:
    """Convolutions of images [C, H, W], else a dense layer; then a dense layer and two heads: pure
    functions of the parameters."""

    def __init__(self, space: spaces.Box, num_actions: int, width: int) -> None:
        self.shape, self.num_actions, self.width = space.shape, num_actions, width
        self.is_uint8, self.is_image = space.dtype == np.uint8, len(space.shape) == 3
        large = self.is_image and space.shape[1] >= 64
        self.convolutions = ((8, 4), (4, 2)) if large else ((6, 3), (3, 2))  # kernels and strides

    def init(self, seed: int, mean: np.ndarray | None) -> Parameters:
        """New parameters, uniform within 1 / sqrt(inputs of the layer). `mean`, of random play,
        standardises uint8 input."""
        random = np.random.default_rng(seed)
        p: Parameters = {"mean": jnp.zeros(self.shape) if mean is None else jnp.array(mean)}

        def layer(name: str, *shape: int) -> None:
            bound = np.prod(shape[1:]) ** -0.5
            p[name + ".weight"] = jnp.float32(random.uniform(-bound, bound, shape))
            p[name + ".bias"] = jnp.float32(random.uniform(-bound, bound, shape[0]))

        size = self.width
        if self.is_image:
            (first, stride), (second, stride_2) = self.convolutions
            layer("conv_1", 16, self.shape[0], first, first)
            layer("conv_2", 32, 16, second, second)
            sides = ((np.array(self.shape[1:]) - first) // stride + 1 - second) // stride_2 + 1
            size = 32 * int(sides.prod())
        else:
            layer("dense", self.width, int(np.prod(self.shape)))
        layer("hidden", self.width, size)
        layer("policy", self.num_actions, self.width)
        layer("baseline", 1, self.width)
        return p

    def __call__(self, p: Parameters, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Observations [T, B, ...] -> logits of the policy [T, B, actions], baseline [T, B]."""
        lead = observation.shape[:2]
        x = observation.reshape(-1, *self.shape).astype(jnp.float32)
        x = jnp.clip((x - lax.stop_gradient(p["mean"])) / 32, -4, 4) if self.is_uint8 else x
        if self.is_image:
            for name, (_, stride) in zip(("conv_1", "conv_2"), self.convolutions, strict=True):
                x = lax.conv_general_dilated(x, p[name + ".weight"], (stride, stride), "VALID")
                x = jax.nn.relu(x + p[name + ".bias"][:, None, None])
            x = x.reshape(len(x), -1)
        else:
            x = jnp.tanh(dense(p, "dense", x.reshape(len(x), -1)))
        x = jax.nn.relu(dense(p, "hidden", x))
        return dense(p, "policy", x).reshape(*lead, -1), dense(p, "baseline", x).reshape(lead)


# Acting


def act(o: ActorLearnerOptions) -> None:
    """Plays with the newest weights and sends unrolls, until the learner ends the job."""
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    net = Net(space, num_actions, o.hidden_size)

    @jax.jit
    def step(p: Parameters, key: jax.Array, x_t: jax.Array) -> tuple[jax.Array, ...]:
        """Observations [E, ...] -> actions, the logarithms of their probabilities, values, all [E],
        and the next key."""
        key, own = jax.random.split(key)
        logits, value = net(p, x_t[None])
        log_pi = jax.nn.log_softmax(logits[0])
        action = jax.random.categorical(own, log_pi)
        log_prob = jnp.take_along_axis(log_pi, action[:, None], -1)[:, 0]
        return action, log_prob, value[0], key

    T, E, key = o.unroll_length, o.num_envs, jax.random.key(o.acting_seed)
    unroll = {
        "observation": np.empty((T + 1, E, *space.shape), space.dtype),
        "action": np.empty((T, E), np.int32),
        "log_prob": np.empty((T, E), np.float32),  # of the action, under the policy that took it
        "reward": np.empty((T, E), np.float32),
        "discount": np.empty((T, E), np.float32),  # 0 where the step ended an episode
        "bootstrap": np.empty((T, E), np.float32),  # the value after a step that was cut off
        "episode_return": np.empty((T, E), np.float32),  # where an episode ended, else NaN
    }
    with (
        follower(o) as (rpc, job),
        moolink.Subscriber(rpc, "policy", o.learner) as policy,
        moolink.TrajectoryWriter(rpc, "unrolls", o.learner) as writer,
    ):
        observation = envs.reset(o.acting_seed if o.seed_envs else None)["obs"]
        returns = np.zeros(E)
        while not job.is_over():
            weights = policy.wait(timeout=o.timeout)
            for t in range(T):
                unroll["observation"][t] = observation
                action, unroll["log_prob"][t], _, key = step(weights.tree, key, observation)
                unroll["action"][t] = action
                envs.send(np.asarray(action)[:, None])
                parts, unroll["reward"][t], terminated, truncated, over, last = envs.recv()
                observation = parts["obs"]
                returns += unroll["reward"][t]
                unroll["episode_return"][t] = np.where(over, returns, np.nan)
                returns[over] = 0.0
                unroll["discount"][t] = np.where(terminated | truncated, 0.0, o.discount)
                unroll["bootstrap"][t] = 0.0
                if last is not None:
                    value = np.asarray(step(weights.tree, key, last["obs"])[2])
                    unroll["bootstrap"][t, truncated] = value[truncated]
            unroll["observation"][T] = observation
            try:
                writer.put(unroll, begin=weights.version)
            except moolink.RemoteError:
                if not job.is_over():  # else the learner has closed its queue
                    raise
    envs.close()


# Learning


def impala_loss(
    p: Parameters, net: Net, unrolls: dict[str, jax.Array], o: ActorLearnerOptions
) -> tuple[jax.Array, jax.Array]:
    """The loss of B unrolls, and the mean entropy of the policy in nats."""
    logits, baseline = net(p, unrolls["observation"])
    log_pi = jax.nn.log_softmax(logits[:-1])
    log_pi_a = jnp.take_along_axis(log_pi, unrolls["action"][..., None], -1)[..., 0]
    reward = jnp.sign(unrolls["reward"]) if o.clip_reward else unrolls["reward"] * o.reward_scale
    targets = vtrace(
        lax.stop_gradient(log_pi_a) - unrolls["log_prob"],
        unrolls["discount"],
        reward + o.discount * unrolls["bootstrap"],
        lax.stop_gradient(baseline[:-1]),
        lax.stop_gradient(baseline[-1]),
        lambda_=o.vtrace_lambda,
        clip_rho=o.clip_rho,
        clip_c=o.clip_c,
    )
    entropy = -(jnp.exp(log_pi) * log_pi).sum(-1)
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + o.baseline_cost * 0.5 * jnp.square(targets.vs - baseline[:-1])
        - o.entropy_cost * entropy
    )
    return loss_t.mean(), entropy.mean()


def learn(o: ActorLearnerOptions) -> None:
    """Learns from the actors' unrolls, until the job's steps or seconds are over."""
    run = LearnerRun(o)
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    net = Net(space, num_actions, o.hidden_size)
    p = net.init(o.seed, random_means(envs, o.seed).get("obs"))
    envs.close()
    optimizer = optax.chain(
        optax.clip_by_global_norm(o.max_grad_norm), optax.scale_by_adam(eps=o.adam_eps)
    )
    state = optimizer.init(p)
    if run.saved is not None:
        found = checkpoint.parameters(o, run.saved, p)
        p = {name: jnp.array(found[name]) for name in p}
        state = moolink.jax.load_optimizer_state(state, run.saved["optimizer"])

    @jax.jit
    def update(p: Parameters, state: Any, unrolls: Any, rate: float) -> tuple[Any, ...]:
        loss_of = jax.value_and_grad(impala_loss, has_aux=True)
        (loss, entropy), gradient = loss_of(p, net, unrolls, o)
        change, state = optimizer.update(gradient, state)
        p = jax.tree.map(lambda x, dx: x - rate * dx, p, change)
        return p, state, loss, entropy, optax.global_norm(gradient)

    def snapshot() -> dict[str, Any]:
        return {"parameters": p, "optimizer": moolink.jax.optimizer_state(state)}

    with (
        connected(o, o.learner) as rpc,
        moolink.TrajectoryQueue(rpc, "unrolls", max_size=o.queue_size, dim=1) as queue,
        moolink.Publisher(rpc, "policy") as publisher,
        run.joined(rpc, snapshot),
    ):
        queue.version = publisher.publish(p, run.version + 1)
        while not run.is_over():
            try:
                batch = queue.get(o.batch_size // o.num_envs, max_lag=o.max_lag, timeout=1.0)
            except moolink.TimeoutError as late:
                run.waits(late)
                continue
            # The queue has made [T, unrolls, E, ...] of the actors' [T, E, ...].
            unrolls = {name: x.reshape(len(x), -1, *x.shape[3:]) for name, x in batch.data.items()}
            returns = unrolls.pop("episode_return")
            p, state, loss, entropy, norm = update(p, state, unrolls, o.rate(run.totals))
            # Above all versions before, also those of a learner that was killed.
            queue.version = publisher.publish(p)
            run.learned(
                queue.version,
                unrolls["reward"].size,
                returns[~np.isnan(returns)],
                batch_size=o.batch_size,
                gradient_norm=float(norm),
                loss=loss,
                entropy=entropy,
            )


def train(o: ActorLearnerOptions) -> None:
    """Runs the peer's role."""
    common.configure(o)
    (learn if o.is_learner else act)(o)


def evaluate(o: ActorLearnerOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    with evaluated(o) as evaluation:
        net = Net(*spaces_of(evaluation.envs), o.hidden_size)
        p = checkpoint.parameters(o, evaluation.saved, net.init(o.seed, None))

        @jax.jit
        def act(x: jax.Array, key: jax.Array) -> jax.Array:
            logits = net(p, x[None])[0][0]
            return logits.argmax(-1) if o.greedy else jax.random.categorical(key, logits)

        key = jax.random.key(o.seed)
        while not evaluation.is_over():
            key, now = jax.random.split(key)
            evaluation.step(np.asarray(act(evaluation.observation["obs"], now))[:, None])


if __name__ == "__main__":
    sys.exit(main(ActorLearnerOptions, train, evaluate))
