"""PPO in PyTorch over several peers.

    moolink run -n 2 -m examples.torch.ppo --env-id CartPole-v1
    moolink run -n 2 -m examples.torch.ppo --env-id HalfCheetah-v5 --normalize --normalize-reward
    python -m examples.torch.ppo --env-id CartPole-v1 --mode evaluate

Each peer plays a rollout with the newest parameters and learns from it in epochs of minibatches. A
minibatch of each peer makes a round: the accumulator averages their gradients, and every peer
applies them with the same optimizer. The loop is that of one process but for `step.reduce`. Each
contribution normalises its own advantages, so the mean gradient of two peers differs slightly from
that of one peer with twice the environments.

Time is the first axis of all tensors, environments are the second. T is the length of a rollout, E
the number of environments, N the number of parts of an action.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import moolink.torch
from examples.common.environments import Environments, make_envs
from examples.common.evaluation import evaluated
from examples.common.normalizer import NormalizedEnvs
from examples.common.observations import MASK
from examples.common.options import PpoOptions
from examples.common.run import Run, main, make_group
from examples.torch.common import make_net, snapshot, to_device
from examples.torch.networks import Choices, Gaussian, PolicyNet, State

# The network


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A dense layer with orthogonal weights and no biases at first."""
    dense = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(dense.weight, gain)
    nn.init.zeros_(dense.bias)
    return dense


class Encoder(nn.Module):
    """One part of the observation as features: images by convolutions, all else as it is."""

    mean: Tensor

    def __init__(self, shape: tuple[int, ...], mean: np.ndarray | None) -> None:
        """`mean`, of random play, standardises uint8 input. It travels with the parameters."""
        super().__init__()
        # Gymnasium's images have their channels last, ALE's stacks of frames have them first.
        self.channels_last = len(shape) == 3 and shape[2] < shape[0]
        self.is_uint8 = mean is not None
        self.register_buffer("mean", torch.zeros(()) if mean is None else torch.tensor(mean))
        layers: list[nn.Module] = []
        if len(shape) == 3 and sorted(shape)[1] >= 32:
            channels = min(shape)
            for out_channels, kernel, stride in ((16, 8, 4), (32, 4, 2)):
                layers += [nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU()]
                channels = out_channels
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.size = self(torch.zeros(1, *shape)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """[M, ...] -> [M, size]."""
        x = x.float()
        if self.is_uint8:
            x = ((x - self.mean) / 32).clamp(-4, 4)
        return self.layers(x.movedim(-1, 1) if self.channels_last else x)


class Net(PolicyNet):
    """Features, perhaps an LSTM, and a dense network each for the policy and the value."""

    def __init__(self, envs: Environments, means: Mapping[str, np.ndarray], o: PpoOptions) -> None:
        super().__init__()
        self.choices, width = envs.actions.choices, o.hidden_size
        spaces = [(k, s) for k, s in envs.observation_spaces.items() if k != MASK]
        self.encoders = nn.ModuleDict({k: Encoder(s.shape, means.get(k)) for k, s in spaces})
        size = sum(encoder.size for encoder in self.encoders.values())
        self.lstm = nn.LSTMCell(size, width) if o.lstm else None
        if self.lstm is not None:  # remembers at first
            nn.init.ones_(self.lstm.bias_ih.data[width : 2 * width])
        size = width if o.lstm else size
        root2, outputs = 2**0.5, sum(self.choices) or envs.actions.size

        def network(outputs: int, gain: float) -> nn.Sequential:
            hidden = [layer(size, width, root2), nn.Tanh(), layer(width, width, root2), nn.Tanh()]
            return nn.Sequential(*hidden, layer(width, outputs, gain))

        self.policy, self.value = network(outputs, 0.01), network(1, 1.0)
        log_std = torch.full((envs.actions.size,), o.initial_std).log()
        self.log_std = None if self.choices else nn.Parameter(log_std)

    def forward(
        self, observation: Mapping[str, Tensor], first: Tensor, state: State
    ) -> tuple[Choices | Gaussian, Tensor, State]:
        """Observations [T, E, ...], whether each is the first of an episode [T, E], and the memory
        [E, H] before them -> the policy, the value [T, E], and the memory after them."""
        parts = [net(observation[key].flatten(0, 1)) for key, net in self.encoders.items()]
        x = torch.cat(parts, -1).unflatten(0, first.shape)
        x, state = self.remember(x, first, state)
        pi = self.pi(self.legal(self.policy(x), observation))
        return pi, self.value(x).squeeze(-1), state


# Rollouts


class Batch(NamedTuple):
    """Steps that are learned from, [T, E, ...]: of a rollout, or a part of one."""

    observation: dict[str, Tensor]
    first: Tensor  # whether the observation is the first of an episode
    action: Tensor
    log_prob: Tensor  # of the action, when it was taken
    advantage: Tensor
    target: Tensor  # of the value
    state: State  # the memory before the first of them

    def columns(self, which: Tensor) -> Batch:
        """Some of the environments."""
        observation = {key: x[:, which] for key, x in self.observation.items()}
        h, c = self.state
        return Batch(observation, *(x[:, which] for x in self[1:-1]), (h[which], c[which]))

    def flat(self) -> Batch:
        """All steps as environments of one step each: for networks without a memory."""
        observation = {key: x.flatten(0, 1)[None] for key, x in self.observation.items()}
        h, c = (s.repeat(self.first.shape[0], 1) for s in self.state)
        return Batch(observation, *(x.flatten(0, 1)[None] for x in self[1:-1]), (h, c))


def advantages(
    reward: Tensor, discount: Tensor, value: Tensor, last_value: Tensor, lambda_: float
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438):

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t = delta_t + gamma_t lambda A_{t+1}

    Args:
        reward, discount, value: [T, E]; the discount is 0 where an episode ended with the step.
        last_value: V of the observation after the last step [E].
    """
    value_tp1 = torch.cat([value[1:], last_value[None]])
    delta = reward + discount * value_tp1 - value
    result, advantage = torch.empty_like(delta), torch.zeros_like(last_value)
    for t in reversed(range(len(delta))):
        result[t] = advantage = delta[t] + discount[t] * lambda_ * advantage
    return result


class Player:
    """Plays rollouts with the network, and goes on where the last one ended."""

    def __init__(self, envs: Environments, net: Net, run: Run, o: PpoOptions) -> None:
        self.envs, self.net, self.o = NormalizedEnvs(envs, run.normalizer, run.episodes), net, o
        self.device = next(net.parameters()).device
        seed = o.acting_seed if o.seed_envs else None
        self.observation = self.tensors(self.envs.reset(seed))
        self.first = torch.ones(1, envs.num_envs, dtype=torch.bool, device=self.device)
        self.state = net.no_memory(envs.num_envs)

    def tensors(self, x: Any) -> Any:
        """Arrays [E, ...] as tensors [1, E, ...]."""
        return one_step(to_device(x, self.device))

    @torch.no_grad()
    def rollout(self) -> Batch:
        o, state = self.o, self.state
        rows: list[tuple[Any, ...]] = []
        for _ in range(o.rollout_length):
            observation, first = self.observation, self.first
            pi, value, self.state = self.net(observation, first, self.state)
            action = pi.sample()
            self.envs.send(action[0])
            step = self.envs.recv()
            reward = self.tensors(step.reward)
            reward = reward.sign() if o.clip_reward else reward
            if step.last_observation is not None:  # cut off: what would have followed counts
                last = self.tensors(step.last_observation)
                _, last_value, _ = self.net(last, torch.zeros_like(first), self.state)
                # Not a product: rows that were not cut off can hold NaN.
                last_value = last_value.where(self.tensors(step.truncated), 0.0)
                reward = reward + o.discount * last_value
            discount = o.discount * ~self.tensors(step.terminated | step.truncated)
            rows.append((observation, first, action, pi.log_prob(action), value, reward, discount))
            self.observation = self.tensors(step.observation)
            self.first = self.tensors(step.episode_over)
        _, last_value, _ = self.net(self.observation, self.first, self.state)
        observations, *columns = zip(*rows, strict=True)
        first, action, log_prob, value, reward, discount = map(torch.cat, columns)
        advantage = advantages(reward, discount, value, last_value[0], o.gae_lambda)
        observation = {k: torch.cat([x[k] for x in observations]) for k in self.observation}
        return Batch(observation, first, action, log_prob, advantage, advantage + value, state)


def one_step(x: Any) -> Any:
    """Tensors [E, ...], or a dict of them, as [1, E, ...]."""
    return {key: part[None] for key, part in x.items()} if isinstance(x, dict) else x[None]


def minibatches(player: Player, o: PpoOptions) -> Iterator[tuple[Batch, int]]:
    """Contributions without end, and the steps of the environments that are new in each."""
    while True:
        rollout = player.rollout()
        new_steps = rollout.first.numel()
        if not o.lstm:
            rollout = rollout.flat()
        for _ in range(o.epochs):
            order = torch.randperm(rollout.first.shape[1], device=player.device)
            for which in order.chunk(o.minibatches):
                yield rollout.columns(which), new_steps
                new_steps = 0


# Learning


class Losses(NamedTuple):
    """Scalars. `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: Tensor
    entropy: Tensor


def ppo_loss(net: Net, batch: Batch, o: PpoOptions) -> Losses:
    """The clipped loss (arXiv 1707.06347) of one contribution."""
    pi, value, _ = net(batch.observation, batch.first, batch.state)
    ratio = (pi.log_prob(batch.action) - batch.log_prob).exp()
    advantage = batch.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - o.clip, 1 + o.clip)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * (value - batch.target).square().mean()
    entropy = pi.entropy().mean()
    total = policy_loss + o.baseline_cost * value_loss - o.entropy_cost * entropy
    return Losses(total, entropy.detach())


def train(o: PpoOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    envs = make_envs(o, o.num_envs)
    run = Run(o, envs)
    net = make_net(Net, envs, o, run.saved)
    optimizer = torch.optim.Adam(net.parameters(), lr=o.learning_rate, eps=o.adam_eps)
    if run.saved is not None:
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])

    batches = minibatches(Player(envs, net, run, o), o)
    with (
        make_group(o) as (group, connect),
        moolink.torch.Accumulator(
            "ppo",
            net.parameters(),
            net.buffers(),
            group=group,
            max_grad_norm=o.max_grad_norm,
            on_nonfinite="raise",
        ) as accumulator,
        run.joined(group, accumulator, partial(snapshot, net, optimizer)),
    ):
        run.begin(connect)
        for step in accumulator.steps(optimizer, learning_rate=o.rate, **run.callbacks()):
            if not run.turn(step):
                continue
            batch, new_steps = next(batches)
            losses = ppo_loss(net, batch, o)
            losses.total.backward()
            step.reduce(batch.first.numel(), {"steps": new_steps, **run.counters()})
            run.metrics = {"loss": losses.total.detach(), "entropy": losses.entropy}
    envs.close()


def evaluate(o: PpoOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    with evaluated(o) as evaluation, torch.no_grad():
        net = make_net(Net, evaluation.envs, o, evaluation.saved)
        device, state = net.device, net.no_memory(evaluation.envs.num_envs)
        while not evaluation.is_over():
            observation, first = to_device((evaluation.observation, evaluation.first), device)
            pi, _, state = net(one_step(observation), first[None], state)
            evaluation.step((pi.mode() if o.greedy else pi.sample())[0].cpu().numpy())


if __name__ == "__main__":
    sys.exit(main(PpoOptions, train, evaluate))
