"""PPO in PyTorch with environments that are simulated on the learner's device, in one file.

    moolink run -n 2 -m examples.torch.on_device
    python -m examples.torch.on_device --device cuda --num-envs 4096
    python -m examples.torch.on_device --mode evaluate

`--env-id module:function` makes `num_envs` environments on `device` with Isaac Lab's interface:
`reset` and `step` take and return torch tensors on that device, and an environment whose episode
ends is reset in the same step. Observations, actions and rollouts stay on the device, where
simulation, batcher, network, advantages and loss run. Only gradients, which the accumulator
averages over the peers, and four numbers of each contribution pass through the host.

T is the length of a rollout, E the number of environments, N the number of parts of an action.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import moolink.torch
from examples.common import checkpoint
from examples.common.environments import constructor
from examples.common.evaluation import report
from examples.common.normalizer import THOUSANDTHS
from examples.common.options import OptionError, PpoOptions
from examples.common.run import Run, main, make_group
from examples.torch.common import device_of, load_saved, snapshot

Gaussian = torch.distributions.Normal


@dataclass
class OnDeviceOptions(PpoOptions):
    """PPO with environments on the device. Observations are the Box `policy` of a Dict, or one Box;
    actions are a Box. The learner does not scale actions."""

    env_id: str = "examples.torch.cartpole:CartPole"
    """`module:function` with the parameters `num_envs` and `device`."""

    def validate(self) -> None:
        super().validate()
        absent = "lstm normalize normalize_reward clip_reward seed_envs env_processes"
        for name in absent.split():
            if getattr(self, name):
                option = name.replace("_", "-")
                raise OptionError(f"this learner does not support --{option}: leave it out")

    def preset(self) -> None:
        self.total_steps, self.num_envs, self.rollout_length = 200_000, 64, 32
        super().preset()
        self.learning_rate, self.entropy_cost, self.initial_std = 3e-3, 0.0, 0.5


# The network


class Net(nn.Module):
    """Two dense networks: the mean of a Gaussian policy, and the value."""

    def __init__(self, inputs: int, actions: int, o: OnDeviceOptions) -> None:
        super().__init__()
        width = o.hidden_size

        def network(outputs: int, gain: float) -> nn.Sequential:
            shapes = [(inputs, width, 2**0.5), (width, width, 2**0.5), (width, outputs, gain)]
            layers: list[nn.Module] = []
            for a, b, gain_ in shapes:
                layers += [nn.Linear(a, b), nn.Tanh()]
                nn.init.orthogonal_(layers[-2].weight, gain_)
                nn.init.zeros_(layers[-2].bias)
            return nn.Sequential(*layers[:-1])

        self.policy, self.value = network(actions, 0.01), network(1, 1.0)
        self.log_std = nn.Parameter(torch.full((actions,), o.initial_std).log())

    def forward(self, observation: Tensor) -> tuple[Gaussian, Tensor]:
        """[M, ...] -> the policy of actions [M, N], and the value [M]."""
        x = observation.flatten(1)
        pi = Gaussian(self.policy(x), self.log_std.exp(), validate_args=False)
        return pi, self.value(x).squeeze(-1)


# Rollouts


def advantages(reward: Tensor, discount: Tensor, value: Tensor, lambda_: float) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438), [T, E]:

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t = delta_t + gamma_t lambda A_{t+1}

    Args:
        reward, discount: [T, E]; the discount is 0 where an episode ended with the step.
        value: of T + 1 observations.
    """
    delta = reward + discount * value[1:] - value[:-1]
    result, advantage = torch.empty_like(delta), torch.zeros_like(value[0])
    for t in reversed(range(len(delta))):
        result[t] = advantage = delta[t] + discount[t] * lambda_ * advantage
    return result


class Player:
    """Plays rollouts with the network. The host does not wait for the device.

    Attributes:
        episodes, returns: number and sum of returns of the episodes that ended since the last call
            of `take`, on the device.
    """

    def __init__(self, envs: Any, net: Net, o: OnDeviceOptions, device: torch.device) -> None:
        self.envs, self.net, self.o = moolink.drive(envs), net, o
        self.steps = moolink.Batcher(o.rollout_length + 1, device=str(device))
        self.envs.async_reset()
        observation, self.reward, *_ = self.envs.recv()
        self.observation = for_policy(observation)
        self.discount = self.reward + o.discount
        self.running = torch.zeros_like(self.reward)  # returns under way
        self.episodes = self.returns = self.running.sum()

    @torch.no_grad()
    def rollout(self) -> dict[str, Tensor]:
        """T steps of each environment as T x E rows."""
        for t in range(self.o.rollout_length + 1):
            pi, value = self.net(self.observation)
            # pi.sample() would wait for the device, to see whether a deviation is negative.
            action = pi.mean + pi.stddev * torch.randn_like(pi.mean)
            # Before the step: environments may write the next observation into this one.
            self.steps.stack(
                {
                    "observation": self.observation,
                    "action": action,
                    "log_prob": pi.log_prob(action).sum(-1),
                    "value": value,
                    "reward": self.reward,  # of the step that led here
                    "discount": self.discount,
                }
            )
            if t < self.o.rollout_length:
                self.step(action, value)
        rows = self.steps.get()
        reward, discount, value = rows.pop("reward"), rows.pop("discount"), rows.pop("value")
        advantage = advantages(reward[1:], discount[1:], value, self.o.gae_lambda)
        rows = {name: x[:-1] for name, x in rows.items()}
        rows |= {"advantage": advantage, "target": advantage + value[:-1]}
        return {name: x.flatten(0, 1) for name, x in rows.items()}

    def step(self, action: Tensor, value: Tensor) -> None:
        """One step of each environment."""
        self.envs.send(action)
        observation, reward, terminated, truncated, _ = self.envs.recv()
        self.observation, over = for_policy(observation), terminated | truncated
        self.running = self.running + reward
        self.episodes = self.episodes + over.sum()
        self.returns = self.returns + (self.running * over).sum()
        self.running = self.running.masked_fill(over, 0.0)
        # The environments do not return the observation at which a limit cut an episode off. As in
        # RSL-RL, the value before the step takes its place.
        cut_off = truncated & ~terminated
        self.reward = reward + self.o.discount * cut_off * value
        self.discount = self.o.discount * ~over

    def take(self) -> tuple[Tensor, Tensor]:
        """Number and sum of returns of the episodes that ended since the last call."""
        ended = self.episodes, self.returns
        self.episodes = self.returns = torch.zeros_like(self.returns)
        return ended


def for_policy(observation: Any) -> Tensor:
    """Returns the observation for the policy: Isaac Lab's observations are dicts of groups, and
    the policy's group is `policy`."""
    return observation["policy"] if isinstance(observation, dict) else observation


def minibatches(player: Player, o: OnDeviceOptions) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yields contributions without end, each with the number of its new environment steps."""
    while True:
        rows = player.rollout()
        new_steps = rows["advantage"].shape[0]
        for _ in range(o.epochs):
            order = torch.randperm(rows["advantage"].shape[0], device=rows["advantage"].device)
            for which in order.chunk(o.minibatches):
                yield {name: x[which] for name, x in rows.items()}, new_steps
                new_steps = 0


# Learning


def ppo_loss(net: Net, rows: dict[str, Tensor], o: OnDeviceOptions) -> tuple[Tensor, Tensor]:
    """The clipped loss (arXiv 1707.06347) of one contribution, and the policy's mean entropy in
    nats."""
    pi, value = net(rows["observation"])
    ratio = (pi.log_prob(rows["action"]).sum(-1) - rows["log_prob"]).exp()
    advantage = rows["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - o.clip, 1 + o.clip)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * (value - rows["target"]).square().mean()
    entropy = pi.entropy().sum(-1).mean()
    total = policy_loss + o.baseline_cost * value_loss - o.entropy_cost * entropy
    return total, entropy.detach()


def make(o: OnDeviceOptions, num_envs: int, saved: dict[str, Any] | None) -> tuple[Any, Net]:
    """Makes environments and the network on the device. The parameters are those of the checkpoint;
    without one they are new, and equal at all peers."""
    made_by = constructor(o.env_id)
    if made_by is None:
        raise OptionError(f"--env-id {o.env_id} must be module:function(num_envs, device)")
    device = torch.device(device_of(o))
    envs = made_by(num_envs=num_envs, device=device)
    space = envs.single_observation_space
    inputs = space["policy"] if hasattr(space, "spaces") else space
    torch.manual_seed(o.seed)
    size, actions = (torch.Size(box.shape).numel() for box in (inputs, envs.single_action_space))
    net = Net(size, actions, o)
    if saved is not None:
        load_saved(net, o, saved)
    torch.manual_seed(o.acting_seed)  # no two peers take the same actions
    return envs, net.to(device)


def train(o: OnDeviceOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    run = Run(o, None)
    envs, net = make(o, o.num_envs, run.saved)
    optimizer = torch.optim.Adam(net.parameters(), lr=o.learning_rate, eps=o.adam_eps)
    if run.saved is not None:
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])

    player = Player(envs, net, o, next(net.parameters()).device)
    batches = minibatches(player, o)
    with (
        make_group(o) as (group, connect),
        moolink.torch.Accumulator(
            "on_device",
            net.parameters(),
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
            rows, new_steps = next(batches)
            loss, entropy = ppo_loss(net, rows, o)
            loss.backward()
            # All that the host needs to know, in one copy.
            numbers = torch.stack([loss.detach(), entropy, *player.take()]).tolist()
            counters = {
                **run.counters(),
                "steps": new_steps,
                "episodes": round(numbers[2]),
                "return_thousandths": round(numbers[3] * THOUSANDTHS),
            }
            step.reduce(len(rows["advantage"]), counters)
            run.metrics = {"loss": numbers[0], "entropy": numbers[1]}
    envs.close()


def evaluate(o: OnDeviceOptions) -> None:
    """Plays one episode in each of `--episodes` environments from the checkpoint, and reports their
    returns."""
    torch.manual_seed(o.seed)
    saved = checkpoint.load(o.run_dir)
    if saved is None:
        raise OptionError(f"no checkpoint in {o.run_dir}: give the --save-dir of a job")
    checkpoint.check_can_go_on(o, saved)
    envs, net = make(o, o.episodes, saved)
    observation, _ = envs.reset()
    returns = torch.zeros(o.episodes, device=next(net.parameters()).device)
    alive = torch.ones_like(returns, dtype=torch.bool)
    while alive.any():
        with torch.no_grad():
            pi, _ = net(for_policy(observation))
        action = pi.mean
        if not o.greedy:
            action = action + pi.stddev * torch.randn_like(action)
        observation, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * alive
        alive &= ~(terminated | truncated)
    envs.close()
    report(o, saved, returns.tolist(), {})


if __name__ == "__main__":
    sys.exit(main(OnDeviceOptions, train, evaluate))
