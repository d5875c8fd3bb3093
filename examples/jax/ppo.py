"""PPO in JAX over several peers.

    moolink run -n 2 -m examples.jax.ppo --env-id CartPole-v1
    moolink run -n 2 -m examples.jax.ppo --env-id HalfCheetah-v5 --normalize --normalize-reward
    python -m examples.jax.ppo --env-id CartPole-v1 --mode evaluate

The twin of `examples/torch/ppo.py`: the same options, files, numbers and checkpoints, and peers of
both may learn one model in one group. Each peer plays a rollout with the newest parameters and
learns from it in epochs of minibatches. A minibatch of each peer makes a round: the accumulator
averages their gradients, and every peer applies them with the same optimizer. The loop is that of
one process but for `step.reduce`. Each contribution normalises its own advantages, so the mean
gradient of two peers differs slightly from that of one peer with twice the environments.

Time is the first axis of all arrays, environments are the second. T is the length of a rollout, E
the number of environments, N the number of parts of an action.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import moolink.jax
from examples.common.environments import Environments, make_envs
from examples.common.evaluation import evaluated
from examples.common.normalizer import NormalizedEnvs
from examples.common.observations import MASK
from examples.common.options import PpoOptions
from examples.common.run import Run, main, make_group
from examples.jax import common
from examples.jax.common import Parameters, dense
from examples.jax.networks import Choices, Gaussian, PolicyNet, State

# The network


class Encoder:
    """One part of the observation as features: images by convolutions, all else as it is."""

    def __init__(self, name: str, space: Any) -> None:
        self.name, self.is_uint8 = f"encoders.{name}", space.dtype == np.uint8
        # Gymnasium's images have their channels last, ALE's stacks of frames have them first.
        shape = space.shape
        self.channels_last = len(shape) == 3 and shape[2] < shape[0]
        self.convolutions: list[tuple[int, int, int, int]] = []  # outputs, inputs, kernel, stride
        self.size = int(np.prod(shape))
        if len(shape) == 3 and sorted(shape)[1] >= 32:
            channels, size = min(shape), np.array(sorted(shape)[1:])
            for out_channels, kernel, stride in ((16, 8, 4), (32, 4, 2)):
                self.convolutions.append((out_channels, channels, kernel, stride))
                channels, size = out_channels, (size - kernel) // stride + 1
            self.size = channels * int(size.prod())

    def init(self, p: Parameters, random: np.random.Generator) -> None:
        """Makes the parameters, uniform within 1 / sqrt(inputs), as torch makes them."""
        for i, (outputs, inputs, kernel, _) in enumerate(self.convolutions):
            name, shape = f"{self.name}.layers.{2 * i}", (outputs, inputs, kernel, kernel)
            bound = (inputs * kernel**2) ** -0.5
            p[name + ".weight"] = jnp.float32(random.uniform(-bound, bound, shape))
            p[name + ".bias"] = jnp.float32(random.uniform(-bound, bound, outputs))

    def mean(self, means: Mapping[str, np.ndarray]) -> jax.Array:
        """The buffer that standardises uint8 input: of random play."""
        return jnp.array(means.get(self.name.removeprefix("encoders."), np.zeros((), np.float32)))

    def __call__(self, p: Parameters, mean: jax.Array, x: jax.Array) -> jax.Array:
        """[M, ...] -> [M, size]."""
        x = x.astype(jnp.float32)
        x = jnp.clip((x - mean) / 32, -4, 4) if self.is_uint8 else x
        x = jnp.moveaxis(x, -1, 1) if self.channels_last else x
        for i, (*_, stride) in enumerate(self.convolutions):
            name = f"{self.name}.layers.{2 * i}"
            x = lax.conv_general_dilated(x, p[name + ".weight"], (stride, stride), "VALID")
            x = jax.nn.relu(x + p[name + ".bias"][:, None, None])
        return x.reshape(len(x), -1)


class Net(PolicyNet):
    """Features, perhaps an LSTM, and a dense network each for the policy and the value: pure
    functions of parameters and buffers."""

    def __init__(self, envs: Environments, o: PpoOptions) -> None:
        self.width, self.lstm = o.hidden_size, o.lstm
        self.choices, self.num_actions = envs.actions.choices, envs.actions.size
        self.initial_std = o.initial_std
        spaces = [(k, s) for k, s in envs.observation_spaces.items() if k != MASK]
        self.encoders = {key: Encoder(key, space) for key, space in spaces}

    def init(self, seed: int) -> Parameters:
        """New parameters: orthogonal weights and no biases in the dense networks."""
        random, p = np.random.default_rng(seed), OrderedDict()
        if not self.choices:
            p["log_std"] = jnp.full(self.num_actions, np.log(self.initial_std), jnp.float32)
        for encoder in self.encoders.values():
            encoder.init(p, random)
        size = sum(encoder.size for encoder in self.encoders.values())
        if self.lstm:
            for name, inputs in (("weight", (size, self.width)), ("bias", (None, None))):
                for source, count in zip(("ih", "hh"), inputs, strict=True):
                    shape = (4 * self.width,) if count is None else (4 * self.width, count)
                    array = random.uniform(-(self.width**-0.5), self.width**-0.5, shape)
                    p[f"lstm.{name}_{source}"] = jnp.float32(array)
            forget = slice(self.width, 2 * self.width)  # remembers at first
            p["lstm.bias_ih"] = p["lstm.bias_ih"].at[forget].set(1.0)
            size = self.width
        key = jax.random.key(seed)
        outputs = {"policy": (sum(self.choices) or self.num_actions, 0.01), "value": (1, 1.0)}
        for number, (head, (last, last_gain)) in enumerate(outputs.items()):
            sizes, root2 = (size, self.width, self.width, last), 2**0.5
            for layer, gain in enumerate((root2, root2, last_gain)):
                name, shape = f"{head}.{2 * layer}", (sizes[layer + 1], sizes[layer])
                orthogonal = jax.nn.initializers.orthogonal(gain)
                weight = orthogonal(jax.random.fold_in(key, 3 * number + layer), shape)
                p[name + ".weight"], p[name + ".bias"] = weight, jnp.zeros(shape[0])
        return p

    def __call__(
        self, p: Parameters, buffers: Parameters, observation: Any, first: jax.Array, state: State
    ) -> tuple[Choices | Gaussian, jax.Array, State]:
        """Observations [T, E, ...], whether each is the first of an episode [T, E], and the memory
        [E, H] before them -> the policy, the value [T, E], and the memory after them."""
        flat = {key: x.reshape(-1, *x.shape[2:]) for key, x in observation.items()}
        parts = [
            encoder(p, buffers[encoder.name + ".mean"], flat[key])
            for key, encoder in self.encoders.items()
        ]
        x = jnp.concatenate(parts, -1).reshape(*first.shape, -1)
        x, state = self.remember(p, x, first, state)

        def network(head: str) -> jax.Array:
            hidden = jnp.tanh(dense(p, head + ".0", x))
            return dense(p, head + ".4", jnp.tanh(dense(p, head + ".2", hidden)))

        pi = self.pi(p, self.legal(network("policy"), observation))
        return pi, network("value").squeeze(-1), state


# Rollouts


class Batch(NamedTuple):
    """Steps that are learned from, [T, E, ...]: of a rollout, or a part of one."""

    observation: dict[str, Any]
    first: Any  # whether the observation is the first of an episode
    action: Any
    log_prob: Any  # of the action, when it was taken
    advantage: Any
    target: Any  # of the value
    state: State  # the memory before the first of them

    def columns(self, which: np.ndarray) -> Batch:
        """Some of the environments."""
        observation = {key: x[:, which] for key, x in self.observation.items()}
        h, c = self.state
        return Batch(observation, *(x[:, which] for x in self[1:-1]), (h[which], c[which]))

    def flat(self) -> Batch:
        """All steps as environments of one step each: for networks without a memory."""

        def flatten(x: np.ndarray) -> np.ndarray:
            return x.reshape(1, -1, *x.shape[2:])

        observation = {key: flatten(x) for key, x in self.observation.items()}
        h, c = (np.tile(s, (len(self.first), 1)) for s in self.state)
        return Batch(observation, *map(flatten, self[1:-1]), (h, c))


def advantages(
    reward: np.ndarray,
    discount: np.ndarray,
    value: np.ndarray,
    last_value: np.ndarray,
    lambda_: float,
) -> np.ndarray:
    """Generalised advantage estimation (arXiv 1506.02438):

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t = delta_t + gamma_t lambda A_{t+1}

    Args:
        reward, discount, value: [T, E]; the discount is 0 where an episode ended with the step.
        last_value: V of the observation after the last step [E].
    """
    value_tp1 = np.concatenate([value[1:], last_value[None]])
    delta = reward + discount * value_tp1 - value
    result, advantage = np.empty_like(delta), np.zeros_like(last_value)
    for t in reversed(range(len(delta))):
        result[t] = advantage = delta[t] + discount[t] * lambda_ * advantage
    return result


def act(
    net: Net, p: Parameters, buffers: Parameters, key: jax.Array, count: Any, *inputs: Any
) -> tuple[jax.Array, jax.Array, jax.Array, State]:
    """One step of E environments: actions, logarithms of their probabilities, values, memory."""
    observation, first, state = inputs
    observation = {name: x[None] for name, x in observation.items()}
    pi, value, state = net(p, buffers, observation, first[None], state)
    action = pi.sample(jax.random.fold_in(key, count))
    return action[0], pi.log_prob(action)[0], value[0], state


class Player:
    """Plays rollouts with the network, and goes on where the last one ended."""

    def __init__(self, envs: Environments, net: Net, run: Run, o: PpoOptions) -> None:
        self.envs, self.o = NormalizedEnvs(envs, run.normalizer, run.episodes), o
        self.parameters: tuple[Parameters, Parameters]  # and buffers; set by the loop
        self.act, self.count = jax.jit(partial(act, net)), 0
        self.key = jax.random.key(o.acting_seed)  # no two peers take the same actions
        seed = o.acting_seed if o.seed_envs else None
        self.observation = self.envs.reset(seed)
        self.first = np.ones(envs.num_envs, np.bool_)
        self.state = net.no_memory(envs.num_envs)

    def infer(self, observation: Mapping[str, np.ndarray], first: np.ndarray, state: State) -> Any:
        self.count += 1
        count = np.uint32(self.count)
        return self.act(*self.parameters, self.key, count, observation, first, state)

    def rollout(self) -> Batch:
        o, state = self.o, tuple(map(np.asarray, self.state))
        rows: list[tuple[Any, ...]] = []
        for _ in range(o.rollout_length):
            observation, first = self.observation, self.first
            *acted, self.state = self.infer(observation, first, self.state)
            action, log_prob, value = map(np.asarray, acted)
            self.envs.send(action)
            step = self.envs.recv()
            reward = np.sign(step.reward) if o.clip_reward else step.reward
            if step.last_observation is not None:  # cut off: what would have followed counts
                last = step.last_observation
                _, _, last_value, _ = self.infer(last, np.zeros_like(first), self.state)
                reward = reward + o.discount * np.where(step.truncated, last_value, 0.0)
            discount = np.where(step.terminated | step.truncated, 0.0, o.discount)
            rows.append((observation, first, action, log_prob, value, reward, discount))
            self.observation, self.first = step.observation, step.episode_over
        _, _, last_value, _ = self.infer(self.observation, self.first, self.state)
        observations, *columns = zip(*rows, strict=True)
        first, action, log_prob, value, reward, discount = map(np.stack, columns)
        last_value = np.asarray(last_value, np.float64)
        advantage = np.float32(advantages(reward, discount, value, last_value, o.gae_lambda))
        observation = {k: np.stack([x[k] for x in observations]) for k in self.observation}
        return Batch(observation, first, action, log_prob, advantage, advantage + value, state)


def minibatches(player: Player, o: PpoOptions) -> Iterator[tuple[Batch, int]]:
    """Contributions without end, and the steps of the environments that are new in each."""
    random = np.random.default_rng(o.acting_seed)
    while True:
        rollout = player.rollout()
        new_steps = rollout.first.size
        if not o.lstm:
            rollout = rollout.flat()
        for _ in range(o.epochs):
            order = random.permutation(rollout.first.shape[1])
            for which in np.split(order, o.minibatches):
                yield rollout.columns(which), new_steps
                new_steps = 0


# Learning


def ppo_loss(
    net: Net, o: PpoOptions, p: Parameters, buffers: Parameters, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """The clipped loss (arXiv 1707.06347) of one contribution, and the mean entropy of the policy
    in nats."""
    pi, value, _ = net(p, buffers, batch.observation, batch.first, batch.state)
    ratio = jnp.exp(pi.log_prob(batch.action) - batch.log_prob)
    advantage = batch.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    clipped = jnp.clip(ratio, 1 - o.clip, 1 + o.clip)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * jnp.square(value - batch.target).mean()
    entropy = pi.entropy().mean()
    total = policy_loss + o.baseline_cost * value_loss - o.entropy_cost * entropy
    return total, entropy


def train(o: PpoOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    common.configure(o)
    envs = make_envs(o, o.num_envs)
    run = Run(o, envs)
    net = Net(envs, o)
    p, buffers = common.parameters_of(net, envs, o, run.saved)
    optimizer = optax.adam(1.0, eps=o.adam_eps)  # `accumulator.steps()` multiplies by the rate
    optimizer_state = optimizer.init(p)
    if run.saved is not None:
        optimizer_state = moolink.jax.load_optimizer_state(optimizer_state, run.saved["optimizer"])
    gradients_of = jax.jit(jax.value_and_grad(partial(ppo_loss, net, o), has_aux=True))
    player = Player(envs, net, run, o)
    batches = minibatches(player, o)

    with (
        make_group(o) as (group, connect),
        moolink.jax.Accumulator(
            "ppo",
            p,
            buffers,
            group=group,
            max_grad_norm=o.max_grad_norm,
            on_nonfinite="raise",
        ) as accumulator,
        run.joined(group, accumulator, partial(common.snapshot, accumulator)),
    ):
        run.begin(connect)
        for step in accumulator.steps(
            optimizer, optimizer_state=optimizer_state, learning_rate=o.rate, **run.callbacks()
        ):
            if not run.turn(step):
                continue
            player.parameters = p, buffers = step.parameters, accumulator.buffers()
            batch, new_steps = next(batches)
            (loss, entropy), gradients = gradients_of(p, buffers, batch)
            counters = {"steps": new_steps, **run.counters()}
            step.reduce(gradients, batch_size=batch.first.size, counters=counters)
            run.metrics = {"loss": loss, "entropy": entropy}
    envs.close()


def evaluate(o: PpoOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    common.configure(o)
    with evaluated(o) as evaluation:
        net = Net(evaluation.envs, o)
        p, buffers = common.parameters_of(net, evaluation.envs, o, evaluation.saved)
        state = net.no_memory(evaluation.envs.num_envs)

        @jax.jit
        def act(
            observation: Any, first: jax.Array, state: State, key: jax.Array
        ) -> tuple[jax.Array, State]:
            observation = {name: x[None] for name, x in observation.items()}
            pi, _, state = net(p, buffers, observation, first[None], state)
            return (pi.mode() if o.greedy else pi.sample(key))[0], state

        key = jax.random.key(o.seed)
        while not evaluation.is_over():
            key, now = jax.random.split(key)
            action, state = act(evaluation.observation, evaluation.first, state, now)
            evaluation.step(np.asarray(action).astype(evaluation.envs.actions.dtype))


if __name__ == "__main__":
    sys.exit(main(PpoOptions, train, evaluate))
