"""Networks of the torch learners and their policies: distributions of actions.

Time is the first axis of observations, the batch the second: [T, B, ...]. N is the number of parts
of an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from examples.common.environments import Environments
from examples.common.observations import ILLEGAL, MASK
from examples.common.options import ImpalaOptions

State = tuple[Tensor, Tensor]  # h and c of the LSTM, each [B, hidden]

# Policies


class Choices:
    """The policy in Discrete and MultiDiscrete spaces: N independent choices, actions [..., N]."""

    def __init__(self, logits: Tensor, sizes: tuple[int, ...]) -> None:
        self.log_pis = [F.log_softmax(x, dim=-1) for x in logits.split(sizes, dim=-1)]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        # The largest of log p_i - log e_i, with e_i exponential, is i with probability p_i.
        e = [torch.empty_like(x).exponential_(generator=generator) for x in self.log_pis]
        noisy = [x - e_x.log_() for x, e_x in zip(self.log_pis, e, strict=True)]
        return torch.stack([x.argmax(-1) for x in noisy], -1)

    def mode(self) -> Tensor:
        return torch.stack([x.argmax(-1) for x in self.log_pis], -1)

    def log_prob(self, action: Tensor) -> Tensor:
        parts = zip(self.log_pis, action.split(1, dim=-1), strict=True)
        return sum(x.gather(-1, a).squeeze(-1) for x, a in parts)

    def entropy(self) -> Tensor:
        return sum(-(x.exp() * x).sum(-1) for x in self.log_pis)


class Gaussian:
    """The policy in Box spaces: actions [..., N], of which the environments see -1 ... 1."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return torch.normal(self.normal.mean, self.normal.stddev, generator=generator)

    def mode(self) -> Tensor:
        return self.normal.mean

    def log_prob(self, action: Tensor) -> Tensor:
        return self.normal.log_prob(action).sum(-1)

    def entropy(self) -> Tensor:
        return self.normal.entropy().sum(-1)


# The network of IMPALA


class Encoder(nn.Module):
    """Features of one part of the observation: by convolutions of images, else by a dense layer."""

    mean: Tensor

    def __init__(self, shape: tuple[int, ...], mean: np.ndarray | None, width: int) -> None:
        """`mean`, of random play, standardizes uint8 input. It travels with the parameters."""
        super().__init__()
        # Gymnasium's images have their channels last, ALE's stacks of frames have them first.
        self.channels_last = len(shape) == 3 and shape[2] < shape[0]
        if self.channels_last:
            shape = (shape[2], *shape[:2])
            mean = None if mean is None else np.moveaxis(mean, 2, 0)
        self.is_uint8 = mean is not None
        self.register_buffer("mean", torch.zeros(()) if mean is None else torch.tensor(mean))
        layers: list[nn.Module] = []
        channels = shape[0]
        for out_channels, kernel, stride in convolutions(shape):
            layers += [nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU(inplace=True)]
            channels = out_channels
        layers.append(nn.Flatten())
        if not convolutions(shape):
            layers += [nn.Linear(int(np.prod(shape)), width), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.size = self.layers(torch.zeros(1, *shape)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, ...] -> [T * B, size]."""
        x = x.movedim(-1, 2) if self.channels_last else x
        x = flat_floats(x, self.mean if self.is_uint8 else None)
        return self.layers(x)


def flat_floats(x: Tensor, mean: Tensor | None) -> Tensor:
    """[T, B, ...] -> [T * B, ...] in float32; with a `mean`, standardized by it.

    As `((x.flatten(0, 1) - mean) / 32).clamp(-4, 4)`, in an order that is twice as fast: step by
    step, so that the data stays in the cache. Images have their channels last where gradients are
    needed: convolutions then compute them in half the time, but infer no faster.
    """
    T, B, *shape = x.shape
    channels_last = len(shape) == 3 and torch.is_grad_enabled()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    flat = torch.empty(T * B, *shape, device=x.device, memory_format=layout)
    if mean is not None:
        mean = torch.empty_like(flat[0]).copy_(mean)  # in the same layout
    for out_t, x_t in zip(flat.split(B), x, strict=True):
        if channels_last:
            for out_c, x_c in zip(out_t.unbind(1), x_t.unbind(1), strict=True):
                out_c.copy_(x_c)  # channel by channel, as long runs of memory are faster
        else:
            out_t.copy_(x_t)
        if mean is not None:
            out_t.sub_(mean).mul_(1 / 32).clamp_(-4, 4)
    return flat


def convolutions(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(channels, kernel, stride) for images [C, H, W]; none where they are too small."""
    if len(shape) != 3 or min(shape[1:]) < 32:
        return []
    return [(16, 8, 4), (32, 4, 2)] if min(shape[1:]) >= 64 else [(16, 6, 3), (32, 3, 2)]


class PolicyNet(nn.Module):
    """The part of a network with a policy that IMPALA and PPO share: its memory and its actions."""

    choices: tuple[int, ...]  # sizes of Discrete spaces; empty in Box spaces
    lstm: nn.LSTMCell | None
    log_std: nn.Parameter | None  # in Box spaces

    def remember(self, x: Tensor, first: Tensor, state: State) -> tuple[Tensor, State]:
        """Features [T, B, ...], whether each is of the first step of an episode [T, B], and the
        memory [B, H] before them -> the LSTM's outputs [T, B, H], if there is one, and the memory
        after them."""
        if self.lstm is None:
            return x, state
        outputs = []
        for x_t, first_t in zip(x, first, strict=True):
            h, c = (s.masked_fill(first_t[:, None], 0.0) for s in state)
            state = self.lstm(x_t, (h, c))
            outputs.append(state[0])
        return torch.stack(outputs), state

    def legal(self, policy: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
        """The input of `pi`, in which illegal actions have no probability."""
        if MASK not in observation:
            return policy
        return policy.masked_fill(observation[MASK] == 0, ILLEGAL)

    def pi(self, policy: Tensor) -> Choices | Gaussian:
        """The distribution of actions."""
        return Choices(policy, self.choices) if self.choices else Gaussian(policy, self.log_std)

    def no_memory(self, num_envs: int) -> State:
        """The state of the LSTM before an episode."""
        size = 0 if self.lstm is None else self.lstm.hidden_size
        zeros = torch.zeros(num_envs, size, device=self.device)
        return zeros, zeros

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class Net(PolicyNet):
    """An encoder for each part of the observation, a dense layer, perhaps an LSTM, two heads."""

    def __init__(
        self, envs: Environments, means: Mapping[str, np.ndarray], o: ImpalaOptions
    ) -> None:
        super().__init__()
        self.choices, width = envs.actions.choices, o.hidden_size
        self.encoders = nn.ModuleDict(
            {
                key: Encoder(space.shape, means.get(key), width)
                for key, space in envs.observation_spaces.items()
                if key != MASK
            }
        )
        self.hidden = nn.Linear(sum(encoder.size for encoder in self.encoders.values()), width)
        self.lstm = nn.LSTMCell(width, width) if o.lstm else None
        if self.lstm is not None:  # remembers at first
            nn.init.ones_(self.lstm.bias_ih.data[width : 2 * width])
        self.policy = nn.Linear(width, sum(self.choices) or envs.actions.size)
        self.baseline = nn.Linear(width, 1)
        log_std = torch.full((envs.actions.size,), o.initial_std).log()
        self.log_std = None if self.choices else nn.Parameter(log_std)
        self.dtype = getattr(torch, o.precision)

    def forward(
        self, observation: Mapping[str, Tensor], first: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Observations [T, B, ...], whether each is the first of an episode [T, B], and the memory
        [B, H] before them -> the input of `pi`, the baseline [T, B], and the memory after them."""
        x, state = self.features(observation, first, state)
        return *self.heads(x, observation), state

    def features(
        self, observation: Mapping[str, Tensor], first: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """The input of the heads [T, B, hidden], and the memory after it."""
        with self.arithmetic():
            features = [encoder(observation[key]) for key, encoder in self.encoders.items()]
            x = F.relu(self.hidden(torch.cat(features, -1))).unflatten(0, first.shape)
            return self.remember(x, first, state)

    def heads(self, x: Tensor, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The input of `pi` and the baseline, from features [T, B, hidden]."""
        with self.arithmetic():
            policy, baseline = self.policy(x).float(), self.baseline(x).float()
        return self.legal(policy, observation), baseline.squeeze(-1)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """The context in which layers compute in `--precision`."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)


# Networks of learners with actors in other processes


class Features(nn.Module):
    """Convolutions of images [C, H, W], else a dense layer; then a dense layer."""

    mean: Tensor

    def __init__(
        self,
        space: spaces.Box,
        mean: np.ndarray | None,
        width: int,
        activation: type[nn.Module] = nn.Tanh,
    ) -> None:
        """`mean`, of random play, standardizes uint8 input. It travels with the parameters.
        `activation` follows the dense layer in place of convolutions."""
        super().__init__()
        self.is_uint8 = space.dtype == np.uint8
        mean = np.zeros(space.shape, np.float32) if mean is None else mean
        self.register_buffer("mean", torch.from_numpy(mean))
        if len(space.shape) == 3:
            first, second = ((8, 4), (4, 2)) if space.shape[1] >= 64 else ((6, 3), (3, 2))
            layers = [nn.Conv2d(space.shape[0], 16, *first), nn.ReLU()]
            layers += [nn.Conv2d(16, 32, *second), nn.ReLU(), nn.Flatten()]
        else:
            layers = [nn.Flatten(), nn.Linear(int(np.prod(space.shape)), width), activation()]
        size = nn.Sequential(*layers)(torch.zeros(1, *space.shape)).shape[1]
        self.layers = nn.Sequential(*layers, nn.Linear(size, width), nn.ReLU())

    def features(self, x: Tensor) -> Tensor:
        """[M, ...] -> [M, width]."""
        x = x.float()
        return self.layers(((x - self.mean) / 32).clamp(-4, 4) if self.is_uint8 else x)


class ActorCritic(Features):
    """Features, a head for the policy of Discrete actions, and one for the baseline."""

    def __init__(self, space: spaces.Box, num_actions: int, mean: np.ndarray | None, width: int):
        super().__init__(space, mean, width)
        self.policy, self.baseline = nn.Linear(width, num_actions), nn.Linear(width, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Observations [T, B, ...] -> logits of the policy [T, B, actions], baseline [T, B]."""
        x, T = self.features(observation.flatten(0, 1)), len(observation)
        return self.policy(x).unflatten(0, (T, -1)), self.baseline(x).view(T, -1)
