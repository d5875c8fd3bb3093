"""Networks of the JAX learners and their policies: distributions of actions.

Time is the first axis of observations, the batch the second: [T, B, ...]. N is the number of parts
of an action, H the width of the network.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.common.environments import Environments
from examples.common.observations import ILLEGAL, MASK
from examples.common.options import ImpalaOptions
from examples.jax.common import Parameters, dense

State = tuple[Any, Any]  # h and c of the LSTM, each [B, H]

# Policies


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


# The network of IMPALA


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
        """The buffer that standardizes uint8 input: of random play, [C, H, W]."""
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


class PolicyNet:
    """The part of a network with a policy that IMPALA and PPO share: its memory and its actions."""

    encoders: Mapping[str, Any]
    choices: tuple[int, ...]  # sizes of Discrete spaces; empty in Box spaces
    width: int
    lstm: bool

    def buffers(self, means: Mapping[str, np.ndarray]) -> Parameters:
        """The buffers, by torch's names."""
        encoders = self.encoders.values()
        return OrderedDict((encoder.name + ".mean", encoder.mean(means)) for encoder in encoders)

    def remember(
        self, p: Parameters, x: jax.Array, first: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Features [T, B, ...], whether each is of the first step of an episode [T, B], and the
        memory [B, H] before them -> the LSTM's outputs [T, B, H], if there is one, and the memory
        after them."""
        if not self.lstm:
            return x, state
        state, outputs = lax.scan(partial(lstm, p), state, (x, first))
        return outputs, state

    def legal(self, policy: jax.Array, observation: Any) -> jax.Array:
        """The input of `pi`, in which illegal actions have no probability."""
        if MASK not in observation:
            return policy
        return jnp.where(observation[MASK] == 0, ILLEGAL, policy)

    def pi(self, p: Parameters, policy: jax.Array) -> Choices | Gaussian:
        """The distribution of actions."""
        return Choices(policy, self.choices) if self.choices else Gaussian(policy, p["log_std"])

    def no_memory(self, num_envs: int) -> State:
        """The state of the LSTM before an episode."""
        zeros = jnp.zeros((num_envs, self.width if self.lstm else 0))
        return zeros, zeros


class Net(PolicyNet):
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

    def __call__(
        self, p: Parameters, buffers: Parameters, observation: Any, first: jax.Array, state: State
    ) -> tuple[jax.Array, jax.Array, State]:
        """Observations [T, B, ...], whether each is the first of an episode [T, B], and the memory
        [B, H] before them -> the input of `pi`, the baseline [T, B], and the memory after them."""
        x, state = self.features(p, buffers, observation, first, state)
        return *self.heads(p, x, observation), state

    def features(
        self, p: Parameters, buffers: Parameters, observation: Any, first: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """The input of the heads [T, B, H], and the memory after it."""
        p = jax.tree.map(lambda x: x.astype(self.precision), p)
        features = [
            encoder(p, buffers[encoder.name + ".mean"], observation[key], self.precision)
            for key, encoder in self.encoders.items()
        ]
        x = jax.nn.relu(dense(p, "hidden", jnp.concatenate(features, -1)))
        x = x.reshape(*first.shape, -1)
        x, state = self.remember(p, x, first, state)
        return x.astype(self.precision), state

    def heads(self, p: Parameters, x: jax.Array, observation: Any) -> tuple[jax.Array, jax.Array]:
        """The input of `pi` and the baseline, from features [T, B, H]."""
        p = jax.tree.map(lambda x: x.astype(self.precision), p)
        policy, baseline = (dense(p, k, x).astype(jnp.float32) for k in ("policy", "baseline"))
        return self.legal(policy, observation), baseline.squeeze(-1)


def lstm(p: Parameters, state: State, at_t: Any) -> tuple[State, jax.Array]:
    """One step of an LSTM, for `lax.scan`: the memory [B, H] and the input [B, ...], with whether
    it is the first of an episode [B] -> the memory after it, and the output [B, H]."""
    x_t, first_t = at_t
    h, c = (jnp.where(first_t[:, None], 0.0, s) for s in state)
    gates = x_t @ p["lstm.weight_ih"].T + p["lstm.bias_ih"]
    gates = gates + h.astype(x_t.dtype) @ p["lstm.weight_hh"].T + p["lstm.bias_hh"]
    i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h
