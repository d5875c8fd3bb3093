"""IMPALA in JAX: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.jax.impala                              two peers and a broker
    moolink run -n 2 -m examples.jax.impala --env-id CartPole-v1         any Gymnasium environment
    python -m examples.jax.impala --connect HOST:PORT --group G          one more peer
    moolink run -n 2 -m examples.jax.impala --deterministic              the same bits each time
    python -m examples.jax.impala --mode evaluate                        play from the checkpoint

The twin of `examples/torch/impala.py`: the same options, files, numbers and checkpoints, and peers
of both may learn one model in one group. What is computed are pure functions, compiled once: `act`,
the gradients of `impala_loss`, and the optimizer's step in `accumulator.steps()`.

Time is the first axis of all arrays, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments that step together,
B that of a contribution, N the number of parts of an action.
"""

from __future__ import annotations

import itertools
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
from examples.common import acting, checkpoint
from examples.common.environments import Environments, make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.job import Left
from examples.common.observations import ILLEGAL, MASK
from examples.common.options import ImpalaOptions
from examples.common.run import Run, main, make_group
from examples.jax import common
from examples.jax.common import Parameters, dense
from examples.jax.vtrace import vtrace

State = tuple[Any, Any]  # h and c of the LSTM, each [E, H]

# The network and its policy


class Choices:
    """The policy in Discrete and MultiDiscrete spaces: N independent choices, actions [..., N]."""

    def __init__(self, logits: jax.Array, sizes: tuple[int, ...]) -> None:
        parts = jnp.split(logits, np.cumsum(sizes)[:-1], axis=-1)
        self.log_pis = [jax.nn.log_softmax(x) for x in parts]

    def sample(self, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(self.log_pis))
        drawn = map(jax.random.categorical, keys, self.log_pis)
        return jnp.stack(list(drawn), -1).astype(jnp.int32)

    def mode(self) -> jax.Array:
        return jnp.stack([x.argmax(-1) for x in self.log_pis], -1)

    def log_prob(self, action: jax.Array) -> jax.Array:
        taken = zip(self.log_pis, jnp.split(action, action.shape[-1], axis=-1), strict=True)
        return sum(jnp.take_along_axis(x, a, -1).squeeze(-1) for x, a in taken)

    def entropy(self) -> jax.Array:
        return sum(-(jnp.exp(x) * x).sum(-1) for x in self.log_pis)


class Gaussian:
    """The policy in Box spaces: actions [..., N], of which the environments see -1 ... 1."""

    def __init__(self, mean: jax.Array, log_std: jax.Array) -> None:
        self.mean, self.log_std = mean, log_std

    def sample(self, key: jax.Array) -> jax.Array:
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action: jax.Array) -> jax.Array:
        x = (action - self.mean) * jnp.exp(-self.log_std)
        return -(0.5 * x**2 + self.log_std + 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self) -> jax.Array:
        entropy = (self.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
        return jnp.broadcast_to(entropy, self.mean.shape[:-1])


def convolutions(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(channels, kernel, stride) for images [C, H, W]; none where they are too small."""
    if len(shape) != 3 or min(shape[1:]) < 32:
        return []
    return [(16, 8, 4), (32, 4, 2)] if min(shape[1:]) >= 64 else [(16, 6, 3), (32, 3, 2)]


class Encoder:
    """Features of one part of the observation: by convolutions of images, else by a dense layer."""

    def __init__(self, name: str, space: Any, width: int) -> None:
        self.name, self.is_uint8 = f"encoders.{name}", space.dtype == np.uint8
        # Gymnasium's images have their channels last, ALE's stacks of frames have them first.
        shape = space.shape
        self.channels_last = len(shape) == 3 and shape[2] < shape[0]
        if self.channels_last:
            shape = (shape[2], *shape[:2])
        self.shape, self.convolutions, self.width = shape, convolutions(shape), width
        self.size = width
        if self.convolutions:
            size = np.array(shape[1:])
            for _, kernel, stride in self.convolutions:
                size = (size - kernel) // stride + 1
            self.size = self.convolutions[-1][0] * int(size.prod())

    def init(self, layer: Any) -> None:
        """Makes the parameters, by `layer(name, shape of the weight)`."""
        channels = self.shape[0]
        for i, (out_channels, kernel, _) in enumerate(self.convolutions):
            layer(f"{self.name}.layers.{2 * i}", out_channels, channels, kernel, kernel)
            channels = out_channels
        if not self.convolutions:
            layer(f"{self.name}.layers.1", self.width, int(np.prod(self.shape)))

    def mean(self, means: Mapping[str, np.ndarray]) -> jax.Array:
        """The buffer that standardises uint8 input: of random play, [C, H, W]."""
        mean = means.get(self.name.removeprefix("encoders."), np.zeros((), np.float32))
        return jnp.array(np.moveaxis(mean, 2, 0) if self.channels_last and mean.ndim else mean)

    def __call__(self, p: Parameters, mean: jax.Array, x: jax.Array, dtype: str) -> jax.Array:
        """[T, B, ...] -> [T * B, size]."""
        x = jnp.moveaxis(x, -1, 2) if self.channels_last else x
        x = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
        x = (jnp.clip((x - mean) * (1 / 32), -4, 4) if self.is_uint8 else x).astype(dtype)
        for i, (_, _, stride) in enumerate(self.convolutions):
            name = f"{self.name}.layers.{2 * i}"
            x = lax.conv_general_dilated(x, p[name + ".weight"], (stride, stride), "VALID")
            x = jax.nn.relu(x + p[name + ".bias"][:, None, None])
        x = x.reshape(len(x), -1)
        return x if self.convolutions else jnp.tanh(dense(p, f"{self.name}.layers.1", x))


class Net:
    """An encoder for each part of the observation, a dense layer, perhaps an LSTM, two heads: pure
    functions of parameters and buffers."""

    def __init__(self, envs: Environments, o: ImpalaOptions) -> None:
        self.width, self.lstm, self.precision = o.hidden_size, o.lstm, o.precision
        self.choices, self.num_actions = envs.actions.choices, envs.actions.size
        self.initial_std = o.initial_std
        spaces = [(k, s) for k, s in envs.observation_spaces.items() if k != MASK]
        self.encoders = {key: Encoder(key, space, self.width) for key, space in spaces}

    def init(self, seed: int) -> Parameters:
        """New parameters, uniform within 1 / sqrt(inputs of the layer), as torch makes them."""
        random, p = np.random.default_rng(seed), OrderedDict()

        def uniform(bound: float, *shape: int) -> jax.Array:
            return jnp.float32(random.uniform(-bound, bound, shape))

        def layer(name: str, *shape: int) -> None:
            bound = np.prod(shape[1:]) ** -0.5
            p[name + ".weight"] = uniform(bound, *shape)
            p[name + ".bias"] = uniform(bound, shape[0])

        if not self.choices:
            p["log_std"] = jnp.full(self.num_actions, np.log(self.initial_std), jnp.float32)
        for encoder in self.encoders.values():
            encoder.init(layer)
        layer("hidden", self.width, sum(encoder.size for encoder in self.encoders.values()))
        if self.lstm:
            for name, shape in (("weight", (self.width,)), ("bias", ())):
                for source in ("ih", "hh"):
                    p[f"lstm.{name}_{source}"] = uniform(self.width**-0.5, 4 * self.width, *shape)
            forget = slice(self.width, 2 * self.width)  # remembers at first
            p["lstm.bias_ih"] = p["lstm.bias_ih"].at[forget].set(1.0)
        layer("policy", sum(self.choices) or self.num_actions, self.width)
        layer("baseline", 1, self.width)
        return p

    def buffers(self, means: Mapping[str, np.ndarray]) -> Parameters:
        """The buffers, by torch's names."""
        encoders = self.encoders.values()
        return OrderedDict((encoder.name + ".mean", encoder.mean(means)) for encoder in encoders)

    def __call__(
        self, p: Parameters, buffers: Parameters, observation: Any, first: jax.Array, state: State
    ) -> tuple[jax.Array, jax.Array, State]:
        """Observations [T, B, ...], whether each is the first of an episode [T, B], and the memory
        [B, H] before them -> what `pi` takes, the baseline [T, B], and the memory after them."""
        p = jax.tree.map(lambda x: x.astype(self.precision), p)
        features = [
            encoder(p, buffers[encoder.name + ".mean"], observation[key], self.precision)
            for key, encoder in self.encoders.items()
        ]
        x = jax.nn.relu(dense(p, "hidden", jnp.concatenate(features, -1)))
        if self.lstm:
            state, x = lax.scan(partial(self._lstm, p), state, (x.reshape(*first.shape, -1), first))
            x = x.reshape(-1, self.width).astype(self.precision)
        policy, baseline = (dense(p, k, x).astype(jnp.float32) for k in ("policy", "baseline"))
        policy = policy.reshape(*first.shape, -1)
        if MASK in observation:  # illegal actions have no probability
            policy = jnp.where(observation[MASK] == 0, ILLEGAL, policy)
        return policy, baseline.reshape(first.shape), state

    def _lstm(self, p: Parameters, state: State, at_t: Any) -> tuple[State, jax.Array]:
        x_t, first_t = at_t
        h, c = (jnp.where(first_t[:, None], 0.0, s) for s in state)
        gates = x_t @ p["lstm.weight_ih"].T + p["lstm.bias_ih"]
        gates = gates + h.astype(x_t.dtype) @ p["lstm.weight_hh"].T + p["lstm.bias_hh"]
        i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def pi(self, p: Parameters, policy: jax.Array) -> Choices | Gaussian:
        """The distribution of actions."""
        return Choices(policy, self.choices) if self.choices else Gaussian(policy, p["log_std"])

    def no_memory(self, num_envs: int) -> State:
        """The state of the LSTM before an episode."""
        zeros = jnp.zeros((num_envs, self.width if self.lstm else 0))
        return zeros, zeros


# Acting


class Steps(NamedTuple):
    """Training data: B environments of an unroll, as views of its arrays.

    Entry t of `action` ... `bootstrap` belongs to the step from observation t to t + 1. Where it
    ended an episode the discount is 0. Where a limit cut the episode off, `bootstrap` is the value
    of what would have followed, else 0.
    """

    observation: dict[str, Any]  # [T + 1, B, ...]
    first: Any  # [T + 1, B]: whether observation t is the first of an episode
    action: Any  # [T, B, N]
    log_prob: Any  # [T, B]: of the action, under the policy that took it
    reward: Any  # [T, B]
    discount: Any  # [T, B]
    bootstrap: Any  # [T, B]
    state: State  # [B, H]: the memory before observation 0, stored as in R2D2


class Unroll(acting.Unroll):
    def __init__(self, envs: Environments, o: ImpalaOptions) -> None:
        super().__init__(envs, o, np.int32 if envs.actions.choices else np.float32)

    def batches(self, size: int) -> list[tuple[Unroll, Steps]]:
        """The unroll in batches of some of its environments."""
        return [(self, self._steps(part)) for part in self.parts(size)]

    def _steps(self, b: slice) -> Steps:
        observation = {key: x[:, b] for key, x in self.observation.items()}
        arrays = [getattr(self, name)[:, b] for name in Steps._fields[1:-1]]
        h, c = self.state
        return Steps(observation, *arrays, (h[b], c[b]))


def act(
    net: Net, p: Parameters, buffers: Parameters, key: jax.Array, count: Any, *inputs: Any
) -> tuple[jax.Array, jax.Array, jax.Array, State]:
    """One step of E environments: actions, logarithms of their probabilities, values, memory."""
    observation, first, state = inputs
    observation = {name: x[None] for name, x in observation.items()}
    policy, value, state = net(p, buffers, observation, first[None], state)
    pi = net.pi(p, policy)
    action = pi.sample(jax.random.fold_in(key, count))
    return action[0], pi.log_prob(action)[0], value[0], state


class Actor(acting.ActingThread[tuple[Unroll, Steps]]):
    """Arrays are immutable: new parameters take the place of the old ones."""

    def __init__(self, o: ImpalaOptions, envs: Environments, net: Net, run: Run) -> None:
        super().__init__(o, envs, run)
        self.parameters: tuple[Parameters, Parameters]  # and buffers
        self.net, self.act = net, jax.jit(partial(act, net))

    def play(self, envs: Environments, group: int) -> Iterator[bool]:
        o, E, (normalizer, episodes) = self.o, envs.num_envs, self.statistics(group)
        returns, rewards = episodes.column(E), normalizer.column()
        seed = o.group_seed(group)
        random, count = jax.random.key(seed), np.uint32(0)  # of the actions
        observation = normalizer.observe(envs.reset(seed if o.seeds_envs else None))
        first, state = np.ones(E, np.bool_), self.net.no_memory(E)
        for unroll in itertools.cycle(self.unrolls(Unroll, envs)):
            while unroll.unread:
                yield False
            unroll.state = state
            for t in range(o.unroll_length + 1):
                for key, x in observation.items():
                    unroll.observation[key][t] = x
                unroll.first[t] = first
                if t == o.unroll_length:
                    break
                count += np.uint32(1)
                inputs = random, count, observation, first, state
                action, log_prob, _, state = self.act(*self.parameters, *inputs)
                unroll.action[t], unroll.log_prob[t] = action, log_prob
                envs.send(unroll.action[t].astype(envs.actions.dtype))
                yield True
                received, reward, terminated, truncated, first, last = envs.recv()
                observation = normalizer.observe(received)
                returns.add(reward, first)
                unroll.reward[t] = rewards.scaled(reward, first)
                unroll.discount[t] = np.where(terminated | truncated, 0.0, o.discount)
                unroll.bootstrap[t] = 0.0
                if last is not None:
                    inputs = random, count, normalizer(last), np.zeros_like(first), state
                    _, _, value, _ = self.act(*self.parameters, *inputs)
                    unroll.bootstrap[t, truncated] = np.asarray(value)[truncated]
            self.finish(group, unroll)

    def use(self, parameters: tuple[Parameters, Parameters]) -> None:
        self.parameters = parameters

    def __exit__(self, kind: type[BaseException] | None = None, *more: object) -> None:
        self.stopped = True
        if kind is not Left:  # else the process ends now, also if the thread is still compiling
            super().__exit__(kind, *more)


# Learning


def impala_loss(
    net: Net, o: ImpalaOptions, p: Parameters, buffers: Parameters, steps: Steps
) -> tuple[jax.Array, jax.Array]:
    """The loss of one contribution, and the mean entropy of the policy in nats.

    `mean`: over time and batch. `sum`: over time and the whole round, as in the paper; a round's
    gradient is the mean of its contributions, hence the factor.
    """
    policy, baseline, _ = net(p, buffers, steps.observation, steps.first, steps.state)
    pi = net.pi(p, policy[:-1])
    log_pi_a = pi.log_prob(steps.action)
    reward = jnp.sign(steps.reward) if o.clip_reward else steps.reward
    targets = vtrace(
        lax.stop_gradient(log_pi_a) - steps.log_prob,
        steps.discount,
        reward + o.discount * steps.bootstrap,
        lax.stop_gradient(baseline[:-1]),
        lax.stop_gradient(baseline[-1]),
        lambda_=o.vtrace_lambda,
        clip_rho=o.clip_rho,
        clip_c=o.clip_c,
    )
    entropy = pi.entropy()
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + o.baseline_cost * 0.5 * jnp.square(targets.vs - baseline[:-1])
        - o.entropy_cost * entropy
    )
    total = loss_t.mean() if o.loss == "mean" else loss_t.sum(0).mean() * o.round_size
    return total, entropy.mean()


def make_net(
    envs: Environments, o: ImpalaOptions, saved: dict[str, Any] | None
) -> tuple[Net, Parameters, Parameters]:
    """The network, with parameters and buffers of a checkpoint, or new and equal at all peers."""
    net = Net(envs, o)
    p = net.init(o.seed)
    if saved is None:
        return net, p, net.buffers(random_means(envs, o.seed, seed_envs=o.deterministic))
    spaces = envs.observation_spaces.items()
    buffers = net.buffers(
        {k: np.zeros(s.shape, np.float32) for k, s in spaces if s.dtype == np.uint8}
    )
    found = checkpoint.parameters(o, saved, {**p, **buffers})
    return net, common.arrays(found, p), common.arrays(found, buffers)


def make_optimizer(o: ImpalaOptions) -> optax.GradientTransformation:
    """With a rate of 1: `accumulator.steps()` multiplies by the schedule's."""
    if o.optimizer == "adam":
        return optax.adam(1.0, eps=o.adam_eps)
    return optax.rmsprop(1.0, decay=o.rmsprop_decay, eps=o.rmsprop_eps, eps_in_sqrt=False)


def train(o: ImpalaOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    common.configure(o, one_thread=o.deterministic)
    envs = make_envs(o, o.envs_per_group)
    run = Run(o, envs)
    net, p, buffers = make_net(envs, o, run.saved)
    optimizer = make_optimizer(o)
    optimizer_state = optimizer.init(p)
    if run.saved is not None:
        optimizer_state = moolink.jax.load_optimizer_state(optimizer_state, run.saved["optimizer"])
    gradients_of = jax.jit(jax.value_and_grad(partial(impala_loss, net, o), has_aux=True))

    with (
        make_group(o) as (group, connect),
        moolink.jax.Accumulator(
            "impala",
            p,
            buffers,
            group=group,
            max_grad_norm=o.max_grad_norm,
            on_nonfinite="raise",
            units=o.job_units,
        ) as accumulator,
        Actor(o, envs, net, run) as actor,
        run.joined(group, accumulator, partial(common.snapshot, accumulator)),
    ):
        if not o.deterministic:
            accumulator.set_virtual_batch_size(o.round_size)
        accumulator.set_parallel_gradients(o.parallel_gradients)
        accumulator.set_model_version(run.version)
        connect()
        for step in accumulator.steps(
            optimizer,
            optimizer_state=optimizer_state,
            learning_rate=o.rate,
            until=run.is_over,
            totals=run.totals,
            state=run.state,
            load_state=run.load_state,
            idle=run.idle,
        ):
            if not run.turn(step):
                continue
            p, buffers = step.parameters, accumulator.buffers()
            actor.take_parameters((p, buffers), step.version, accumulator.own_units)
            if actor.ident is None:  # not before: a newcomer's parameters come from the leader
                actor.start()
            batch = actor.next_batch(0.01, step.unit)
            if batch is None:
                continue
            unroll, steps = batch
            T, B = steps.reward.shape
            (loss, entropy), gradients = gradients_of(p, buffers, steps)
            jax.block_until_ready(gradients)  # arrays are read without a copy
            actor.release(unroll)
            step.reduce(gradients, batch_size=B, counters={"steps": T * B, **run.counters()})
            run.metrics = {"loss": loss, "entropy": entropy}


def evaluate(o: ImpalaOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    common.configure(o)
    with evaluated(o) as evaluation:
        net, p, buffers = make_net(evaluation.envs, o, evaluation.saved)
        state = net.no_memory(evaluation.envs.num_envs)

        @jax.jit
        def act(
            observation: Any, first: jax.Array, state: State, key: jax.Array
        ) -> tuple[jax.Array, State]:
            observation = {name: x[None] for name, x in observation.items()}
            policy, _, state = net(p, buffers, observation, first[None], state)
            pi = net.pi(p, policy)
            return (pi.mode() if o.greedy else pi.sample(key))[0], state

        key = jax.random.key(o.seed)
        while not evaluation.is_over():
            key, now = jax.random.split(key)
            action, state = act(evaluation.observation, evaluation.first, state, now)
            evaluation.step(np.asarray(action).astype(evaluation.envs.actions.dtype))


if __name__ == "__main__":
    sys.exit(main(ImpalaOptions, train, evaluate))
