"""The networks as pure functions of their parameters, and the policy that the actor plays."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from examples.common.networks import NETS, parameter_names


class Layer(NamedTuple):
    """Weights, [out, in, height, width] of a convolution and [out, in] of a dense layer, and
    biases [out]."""

    weight: jax.Array
    bias: jax.Array


class Net(NamedTuple):
    """The parameters. Their leaves are in the order of `parameter_names`."""

    torso: tuple[Layer, ...]
    hidden: Layer
    policy: Layer
    baseline: Layer


def init(kind: str, observation_shape: tuple[int, int, int], num_actions: int, seed: int) -> Net:
    """New parameters, uniform within 1 / sqrt(inputs of the layer), as torch makes them."""
    random = np.random.default_rng(seed)

    def layer(*shape: int) -> Layer:
        bound = np.prod(shape[1:]) ** -0.5
        weight = random.uniform(-bound, bound, shape)
        return Layer(jnp.float32(weight), jnp.float32(random.uniform(-bound, bound, shape[0])))

    convolutions, width = NETS[kind]
    channels, *size = observation_shape
    torso = []
    for out_channels, kernel, stride in convolutions:
        torso.append(layer(out_channels, channels, kernel, kernel))
        channels, size = out_channels, [(n - kernel) // stride + 1 for n in size]
    return Net(
        tuple(torso),
        layer(width, channels * size[0] * size[1]),
        layer(num_actions, width),
        layer(1, width),
    )


def forward(
    kind: str, precision: str, net: Net, pixel_mean: jax.Array, observation: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """uint8 [T, B, C, H, W] -> logits [T, B, A] and baseline [T, B], float32."""
    net = jax.tree.map(lambda p: p.astype(precision), net)
    x = observation.reshape(-1, *observation.shape[2:]).astype(jnp.float32)
    x = jnp.clip((x - pixel_mean) * (1 / 32), -4, 4).astype(precision)
    for layer, (_, _, stride) in zip(net.torso, NETS[kind][0], strict=True):
        x = lax.conv_general_dilated(x, layer.weight, (stride, stride), "VALID")
        x = jax.nn.relu(x + layer.bias[:, None, None])
    x = jax.nn.relu(dense(net.hidden, x.reshape(len(x), -1)))
    shape = observation.shape[:2]
    logits = dense(net.policy, x).astype(jnp.float32).reshape(*shape, -1)
    return logits, dense(net.baseline, x).astype(jnp.float32).reshape(shape)


def dense(layer: Layer, x: jax.Array) -> jax.Array:
    return x @ layer.weight.T + layer.bias


def to_arrays(kind: str, net: Net, pixel_mean: jax.Array) -> dict[str, NDArray[Any]]:
    """By the names in checkpoints."""
    leaves = zip(parameter_names(kind), jax.tree.leaves(net), strict=True)
    return {"pixel_mean": np.asarray(pixel_mean), **{name: np.asarray(x) for name, x in leaves}}


def from_arrays(kind: str, like: Net, arrays: dict[str, NDArray[Any]]) -> Net:
    """The inverse of `to_arrays`, without the mean frame."""
    leaves = [jnp.array(arrays[name]) for name in parameter_names(kind)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class ActingPolicy:
    """The policy that the actor's thread plays. Arrays are immutable: new parameters take the place
    of the old ones between two steps."""

    def __init__(
        self, kind: str, precision: str, net: Net, pixel_mean: jax.Array, seed: int
    ) -> None:
        self._act = jax.jit(partial(_act, partial(forward, kind, precision)))
        self._parameters = (net, pixel_mean)
        self._key = jax.random.key(seed)
        self._count = 0

    def __call__(
        self, observation: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Samples actions: see `examples.common.actor.Policy`."""
        self._count += 1
        net, pixel_mean = self._parameters
        key, count = self._key, np.uint32(self._count)
        action, log_prob = self._act(net, pixel_mean, key, count, observation)
        return np.asarray(action).astype(np.int64), np.asarray(log_prob)

    def update(self, net: Net, pixel_mean: jax.Array) -> None:
        """Takes the parameters over."""
        self._parameters = (net, pixel_mean)


def _act(
    forward: Any,
    net: Net,
    pixel_mean: jax.Array,
    key: jax.Array,
    count: jax.Array,
    observation: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    logits, _ = forward(net, pixel_mean, observation[None])
    log_pi = jax.nn.log_softmax(logits[0])
    action = jax.random.categorical(jax.random.fold_in(key, count), log_pi)
    return action, jnp.take_along_axis(log_pi, action[:, None], -1)[:, 0]
