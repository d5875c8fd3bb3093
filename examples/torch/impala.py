"""IMPALA in PyTorch: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.torch.impala                              two peers and a broker
    moolink run -n 2 -m examples.torch.impala --env-id CartPole-v1         any Gymnasium environment
    python -m examples.torch.impala --connect HOST:PORT --group G          one more peer
    moolink run -n 2 -m examples.torch.impala --deterministic              the same bits each time
    python -m examples.torch.impala --mode evaluate                        play from the checkpoint

In each peer one thread acts (`Actor`) and the main thread learns (`train`). Both spend most of
their time in code that has released the GIL. The parameters are equal at all peers because all
apply the same rounds of gradients in the same order; a newcomer gets them from the group's leader.

Time is the first axis of all tensors, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments that step together,
B that of a contribution, N the number of parts of an action.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moolink.torch
from examples.common import acting, checkpoint
from examples.common.environments import Environments, make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.observations import ILLEGAL, MASK
from examples.common.options import ImpalaOptions
from examples.common.run import Run, main, make_group
from examples.torch.common import make_deterministic, to_device
from examples.torch.vtrace import vtrace

State = tuple[Tensor, Tensor]  # h and c of the LSTM, each [E, hidden]

# The network and its policy


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


class Encoder(nn.Module):
    """Features of one part of the observation: by convolutions of images, else by a dense layer."""

    mean: Tensor

    def __init__(self, shape: tuple[int, ...], mean: np.ndarray | None, width: int) -> None:
        """`mean`, of random play, standardises uint8 input. It travels with the parameters."""
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
        T, B, *shape = x.shape
        # With the channels last, gradients of convolutions take half the time; inference does not.
        channels_last = len(shape) == 3 and torch.is_grad_enabled()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        flat = torch.empty(T * B, *shape, device=x.device, memory_format=layout)
        mean = torch.empty_like(flat[0]).copy_(self.mean)
        # Step by step, so that what is computed stays in the cache: twice as fast.
        for out_t, x_t in zip(flat.split(B), x, strict=True):
            if channels_last:
                for out_c, x_c in zip(out_t.unbind(1), x_t.unbind(1), strict=True):
                    out_c.copy_(x_c)  # channel by channel, as long runs of memory are faster
            else:
                out_t.copy_(x_t)
            if self.is_uint8:
                out_t.sub_(mean).mul_(1 / 32).clamp_(-4, 4)
        return self.layers(flat)


def convolutions(shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(channels, kernel, stride) for images [C, H, W]; none where they are too small."""
    if len(shape) != 3 or min(shape[1:]) < 32:
        return []
    return [(16, 8, 4), (32, 4, 2)] if min(shape[1:]) >= 64 else [(16, 6, 3), (32, 3, 2)]


class Net(nn.Module):
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
        [B, H] before them -> what `pi` takes, the baseline [T, B], and the memory after them."""
        device, half = first.device.type, self.dtype != torch.float32
        with torch.autocast(device, self.dtype, enabled=half):
            features = [encoder(observation[key]) for key, encoder in self.encoders.items()]
            x = F.relu(self.hidden(torch.cat(features, -1)))
            if self.lstm is not None:
                outputs = []
                for x_t, first_t in zip(x.unflatten(0, first.shape), first, strict=True):
                    h, c = (s.masked_fill(first_t[:, None], 0.0) for s in state)
                    state = self.lstm(x_t, (h, c))
                    outputs.append(state[0])
                x = torch.cat(outputs)
            policy, baseline = self.policy(x).float(), self.baseline(x).float()
        policy = policy.unflatten(0, first.shape)
        if MASK in observation:  # illegal actions have no probability
            policy = policy.masked_fill(observation[MASK] == 0, ILLEGAL)
        return policy, baseline.view(first.shape), state

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
        return self.baseline.weight.device


# Acting


class Batch(NamedTuple):
    """B environments of an unroll, as views of its arrays.

    Entry t of `action` ... `bootstrap` belongs to the step from observation t to t + 1. Where it
    ended an episode the discount is 0. Where a limit cut the episode off, `bootstrap` is the value
    of what would have followed, else 0.
    """

    observation: dict[str, Tensor]  # [T + 1, B, ...]
    first: Tensor  # [T + 1, B]: whether observation t is the first of an episode
    action: Tensor  # [T, B, N]
    log_prob: Tensor  # [T, B]: of the action, under the policy that took it
    reward: Tensor  # [T, B]
    discount: Tensor  # [T, B]
    bootstrap: Tensor  # [T, B]
    state: State  # [B, H]: the memory before observation 0, stored as in R2D2
    unroll: Unroll

    def to(self, device: torch.device) -> Batch:
        def move(x: Any) -> Any:
            return to_device(x, device) if isinstance(x, Tensor) else x

        observation = {key: move(x) for key, x in self.observation.items()}
        return Batch(observation, *map(move, self[1:]))


class Unroll(acting.Unroll):
    """Its arrays are numpy's, to which small values are assigned faster than to tensors."""

    def __init__(self, envs: Environments, o: ImpalaOptions) -> None:
        super().__init__(envs, o, envs.actions.dtype)

    def batches(self, size: int) -> list[Batch]:
        """The unroll in batches of some of its environments."""
        return [self._batch(part) for part in self.parts(size)]

    def _batch(self, b: slice) -> Batch:
        observation = {key: torch.from_numpy(x[:, b]) for key, x in self.observation.items()}
        arrays = (
            self.first,
            self.action,
            self.log_prob,
            self.reward,
            self.discount,
            self.bootstrap,
        )
        h, c = self.state
        return Batch(observation, *(torch.from_numpy(x[:, b]) for x in arrays), (h[b], c[b]), self)


class Actor(acting.ActingThread[Batch]):
    """Acts with a copy of the network."""

    def __init__(self, o: ImpalaOptions, envs: Environments, net: Net, run: Run) -> None:
        super().__init__(o, envs, run)
        self.net, self.lock = copy.deepcopy(net).requires_grad_(False), threading.Lock()
        self.device = net.device

    def play(self, envs: Environments, group: int) -> Iterator[bool]:
        o, E, (normalizer, episodes) = self.o, envs.num_envs, self.statistics(group)
        returns, rewards = episodes.column(E), normalizer.column()
        seed = o.group_seed(group)
        generator = torch.Generator(self.device).manual_seed(seed)  # of the actions
        observation = normalizer.observe(envs.reset(seed if o.seeds_envs else None))
        first, state = np.ones(E, np.bool_), self.net.no_memory(E)
        for unroll in itertools.cycle(self.unrolls(Unroll, envs)):
            while unroll.unread:
                yield False
            unroll.state = state[0].clone(), state[1].clone()  # for autograd
            for t in range(o.unroll_length + 1):
                for key, x in observation.items():
                    unroll.observation[key][t] = x
                unroll.first[t] = first
                if t == o.unroll_length:
                    break
                pi, _, state = self.infer(tensors(observation), torch.from_numpy(first), state)
                action = pi.sample(generator)
                unroll.action[t] = action[0].cpu().numpy()
                unroll.log_prob[t] = pi.log_prob(action)[0].cpu().numpy()
                envs.send(unroll.action[t])
                yield True
                received, reward, terminated, truncated, first, last = envs.recv()
                observation = normalizer.observe(received)
                returns.add(reward, first)
                unroll.reward[t] = rewards.scaled(reward, first)
                unroll.discount[t] = np.where(terminated | truncated, 0.0, o.discount)
                unroll.bootstrap[t] = 0.0
                if last is not None:
                    same_episode = torch.zeros(E, dtype=torch.bool)
                    _, value, _ = self.infer(tensors(normalizer(last)), same_episode, state)
                    unroll.bootstrap[t, truncated] = value[0].cpu().numpy()[truncated]
            self.finish(group, unroll)

    def infer(
        self, observation: Mapping[str, Tensor], first: Tensor, state: State
    ) -> tuple[Choices | Gaussian, Tensor, State]:
        """One step of all environments of a group: the policy and values, [1, E, ...]."""
        moved = {key: to_device(x[None], self.device) for key, x in observation.items()}
        with torch.inference_mode(), self.lock:
            policy, value, state = self.net(moved, to_device(first[None], self.device), state)
            return self.net.pi(policy), value, state

    def copied(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [x.clone() for x in parameters]

    def use(self, parameters: Iterable[Tensor]) -> None:
        with self.lock:
            for x, new_x in zip(self.net.state_dict().values(), parameters, strict=True):
                x.copy_(new_x)


def tensors(observation: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(x) for key, x in observation.items()}


# Learning


class Losses(NamedTuple):
    """Scalars. `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: Tensor
    entropy: Tensor


def impala_loss(net: Net, batch: Batch, o: ImpalaOptions) -> Losses:
    """The loss of one contribution.

    `mean`: over time and batch. `sum`: over time and the whole round, as in the paper; a round's
    gradient is the mean of its contributions, hence the factor.
    """
    policy, baseline, _ = net(batch.observation, batch.first, batch.state)
    pi = net.pi(policy[:-1])
    log_pi_a = pi.log_prob(batch.action)
    with torch.no_grad():
        reward = batch.reward.sign() if o.clip_reward else batch.reward
        targets = vtrace(
            log_pi_a - batch.log_prob,
            batch.discount,
            reward + o.discount * batch.bootstrap,
            baseline[:-1],
            baseline[-1],
            lambda_=o.vtrace_lambda,
            clip_rho=o.clip_rho,
            clip_c=o.clip_c,
        )
    entropy = pi.entropy()
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + o.baseline_cost * 0.5 * (targets.vs - baseline[:-1]).square()
        - o.entropy_cost * entropy
    )
    total = loss_t.mean() if o.loss == "mean" else loss_t.sum(0).mean() * o.round_size
    return Losses(total, entropy.detach().mean())


def make_net(envs: Environments, o: ImpalaOptions, saved: dict[str, Any] | None) -> Net:
    """The network: with the parameters of a checkpoint, or new and equal at all peers."""
    torch.manual_seed(o.seed)
    if saved is None:
        net = Net(envs, random_means(envs, o.seed, seed_envs=o.deterministic), o)
    else:
        spaces = envs.observation_spaces.items()
        net = Net(
            envs, {k: np.zeros(s.shape, np.float32) for k, s in spaces if s.dtype == np.uint8}, o
        )
        found = checkpoint.parameters(o, saved, net.state_dict())
        net.load_state_dict({k: torch.from_numpy(x) for k, x in found.items()})
    torch.manual_seed(o.acting_seed)  # no two peers take the same actions
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return net.to(auto if o.device == "auto" else o.device)


def make_optimizer(net: Net, o: ImpalaOptions) -> torch.optim.Optimizer:
    if o.optimizer == "adam":
        # Fused: one pass over the parameters, where the default takes ten.
        return torch.optim.Adam(net.parameters(), o.learning_rate, eps=o.adam_eps, fused=True)
    return torch.optim.RMSprop(
        net.parameters(), lr=o.learning_rate, alpha=o.rmsprop_decay, eps=o.rmsprop_eps
    )


def train(o: ImpalaOptions) -> None:
    """Learns, until the job's steps or seconds are over, or until a signal comes."""
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    if o.deterministic:
        make_deterministic()
    envs = make_envs(o, o.envs_per_group)
    run = Run(o, envs)
    net = make_net(envs, o, run.saved)
    optimizer = make_optimizer(net, o)
    if run.saved is not None:
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])

    def snapshot() -> dict[str, Any]:
        optimizer_state = moolink.torch.optimizer_state(optimizer)
        return {"parameters": net.state_dict(), "optimizer": optimizer_state}

    with (
        make_group(o) as (group, connect),
        moolink.torch.Accumulator(
            "impala",
            net.parameters(),
            net.buffers(),
            group=group,
            max_grad_norm=o.max_grad_norm,
            on_nonfinite="raise",
            units=o.job_units,
        ) as accumulator,
        Actor(o, envs, net, run) as actor,
        run.joined(group, accumulator, snapshot),
    ):
        if not o.deterministic:
            accumulator.set_virtual_batch_size(o.round_size)
        accumulator.set_parallel_gradients(o.parallel_gradients)
        accumulator.set_model_version(run.version)
        connect()
        for step in accumulator.steps(
            optimizer,
            learning_rate=o.rate,
            until=run.is_over,
            totals=run.totals,
            state=run.state,
            load_state=run.load_state,
            idle=run.idle,
        ):
            if not run.turn(step):
                continue
            actor.take_parameters(net.state_dict().values(), step.version, accumulator.own_units)
            if actor.ident is None:  # not before: a newcomer's parameters come from the leader
                actor.start()
            batch = actor.next_batch(0.01, step.unit)
            if batch is None:
                continue
            T, B = batch.reward.shape
            losses = impala_loss(net, batch.to(actor.device), o)
            losses.total.backward()
            actor.release(batch.unroll)
            step.reduce(batch_size=B, counters={"steps": T * B, **run.counters()})
            run.metrics = {"loss": losses.total.detach(), "entropy": losses.entropy.detach()}


def evaluate(o: ImpalaOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    with evaluated(o) as evaluation:
        net = make_net(evaluation.envs, o, evaluation.saved)
        device, state = net.device, net.no_memory(evaluation.envs.num_envs)
        while not evaluation.is_over():
            observation = {
                k: x[None].to(device) for k, x in tensors(evaluation.observation).items()
            }
            first = torch.from_numpy(evaluation.first)[None].to(device)
            with torch.no_grad():
                policy, _, state = net(observation, first, state)
                pi = net.pi(policy)
                action = pi.mode() if o.greedy else pi.sample()
            evaluation.step(action[0].cpu().numpy())


if __name__ == "__main__":
    sys.exit(main(ImpalaOptions, train, evaluate))
