"""IMPALA in PyTorch: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.torch.impala                              two peers and a broker
    moolink run -n 2 -m examples.torch.impala --env-id CartPole-v1         any Gymnasium environment
    python -m examples.torch.impala --connect HOST:PORT --group G          one more peer
    moolink run -n 2 -m examples.torch.impala --deterministic              the same bits each time
    python -m examples.torch.impala --mode evaluate                        play from the checkpoint

In each peer one thread acts (`Actor.play`) and the main thread learns (`train`). Both spend most of
their time in code that has released the GIL. The parameters are equal at all peers because all
apply the same rounds of gradients in the same order; a newcomer gets them from the group's leader.

Beside this file, the algorithm is in `networks.py` and `vtrace.py`; `examples/common/options.py`
describes its options. `examples/common/acting.py` has the thread and the unrolls,
`examples/common/normalizer.py` the environments with running statistics, and
`examples/common/run.py` the job: membership, logs, checkpoints.

Time is the first axis of all tensors, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments that step together,
B that of a contribution, N the number of parts of an action.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import moolink.torch
from examples.common import acting
from examples.common.environments import Environments, Step, make_envs
from examples.common.evaluation import evaluated
from examples.common.options import ImpalaOptions
from examples.common.run import Run, main, make_group
from examples.torch.common import make_deterministic, make_net, snapshot, to_device
from examples.torch.networks import Choices, Gaussian, Net, State
from examples.torch.vtrace import vtrace

# Acting


class Actor(acting.ActingThread):
    """Acts with a copy of the network."""

    def __init__(self, o: ImpalaOptions, envs: Environments, net: Net, run: Run) -> None:
        super().__init__(o, envs, run)
        self.net, self.lock = copy.deepcopy(net).requires_grad_(False), threading.Lock()
        self.device = net.device

    def play(self, group: acting.Group) -> Iterator[acting.Unroll | None]:
        """Plays forever in a group of environments, and yields each unroll that is full. One that
        is yielded again is learned from again, and its steps count once.

        Entry t of all but the observation and `first` belongs to the step from observation t to
        t + 1. The batches of `impala_loss` have each recorded quantity under the same name.
        """
        o, E, seed = self.o, group.num_envs, self.o.group_seed(group.number)
        generator = torch.Generator(self.device).manual_seed(seed)  # of the actions
        observation = group.reset(seed if o.seeds_envs else None)
        first, state = np.ones(E, np.bool_), self.net.no_memory(E)
        for unroll in itertools.cycle(group.unrolls):
            # Stored as in R2D2. Copies, because autograd takes no tensors of inference mode.
            unroll.state = state[0].clone(), state[1].clone()
            for t in range(o.unroll_length):
                unroll.record(t, observation=observation, first=first)
                pi, _, state = self.infer(observation, first, state)
                action = pi.sample(generator)
                unroll.record(t, action=action, log_prob=pi.log_prob(action))
                group.send(action)
                yield None  # another group's turn, while these environments step
                step = group.recv()
                observation, first = step.observation, step.episode_over
                ended = step.terminated | step.truncated
                unroll.record(
                    t,
                    reward=step.reward,
                    discount=np.where(ended, 0.0, o.discount),
                    bootstrap=self.value_beyond_limit(step, state),
                )
            unroll.record(o.unroll_length, observation=observation, first=first)
            yield unroll

    def infer(
        self, observation: dict[str, Any], first: np.ndarray, state: State
    ) -> tuple[Choices | Gaussian, Tensor, State]:
        """One step of E environments: the policy, the values [E], and the memory after it."""
        inputs = to_device((observation, first), self.device)
        with torch.inference_mode(), self.lock:
            x, first_t = {key: part[None] for key, part in inputs[0].items()}, inputs[1][None]
            policy, value, state = self.net(x, first_t, state)
            return self.net.pi(policy[0]), value[0], state

    def value_beyond_limit(self, step: Step, state: State) -> np.ndarray | float:
        """The values of the observations at which a limit cut episodes off, which the learner does
        not see; elsewhere 0."""
        if step.last_observation is None:
            return 0.0
        same_episode = np.zeros_like(step.truncated)
        _, value, _ = self.infer(step.last_observation, same_episode, state)
        return np.where(step.truncated, value.cpu().numpy(), 0.0)

    def copied(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [x.clone() for x in parameters]

    def use(self, parameters: Iterable[Tensor]) -> None:
        with self.lock:
            for x, new_x in zip(self.net.state_dict().values(), parameters, strict=True):
                x.copy_(new_x)


# Learning


class Losses(NamedTuple):
    """Scalars. `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: Tensor
    entropy: Tensor


def impala_loss(net: Net, batch: dict[str, Any], o: ImpalaOptions) -> Losses:
    """The loss of one contribution. The batch has the quantities that `Actor.play` recorded in B
    environments, [T, B, ...], with T + 1 entries of the observation and `first`. Where a step ended
    an episode the discount is 0.

    `mean`: over time and batch. `sum`: over time and the whole round, as in the paper; a round's
    gradient is the mean of its contributions, hence the factor.
    """
    x, _ = net.features(batch["observation"], batch["first"], batch["state"])
    policy, baseline = net.heads(x, batch["observation"])
    pi = net.pi(policy[:-1])
    log_pi_a = pi.log_prob(batch["action"])
    with torch.no_grad():
        reward = batch["reward"].sign() if o.clip_reward else batch["reward"]
        targets = vtrace(
            log_pi_a - batch["log_prob"],
            batch["discount"],
            reward + o.discount * batch["bootstrap"],
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


def make_optimizer(net: nn.Module, o: ImpalaOptions) -> torch.optim.Optimizer:
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
    net = make_net(Net, envs, o, run.saved)
    optimizer = make_optimizer(net, o)
    if run.saved is not None:
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])

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
        run.joined(group, accumulator, partial(snapshot, net, optimizer)),
    ):
        run.begin(connect)
        for step in accumulator.steps(optimizer, learning_rate=o.rate, **run.callbacks()):
            if not run.turn(step):
                continue
            actor.take_parameters(net.state_dict().values(), step.version, accumulator.own_units)
            if actor.ident is None:  # not before: a newcomer's parameters come from the leader
                actor.start()
            batch = actor.next_batch(0.01, step.unit)
            if batch is None:
                continue
            losses = impala_loss(net, to_device(batch.data, net.device), o)
            losses.total.backward()
            actor.release(batch)
            step.reduce(o.batch_size, {"steps": batch.new_steps, **run.counters()})
            run.metrics = {"loss": losses.total.detach(), "entropy": losses.entropy.detach()}


def evaluate(o: ImpalaOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    with evaluated(o) as evaluation, torch.no_grad():
        net = make_net(Net, evaluation.envs, o, evaluation.saved)
        state = net.no_memory(evaluation.envs.num_envs)
        while not evaluation.is_over():
            observation, first = to_device((evaluation.observation, evaluation.first), net.device)
            observation = {name: x[None] for name, x in observation.items()}
            policy, _, state = net(observation, first[None], state)
            pi = net.pi(policy[0])
            evaluation.step((pi.mode() if o.greedy else pi.sample()).cpu().numpy())


if __name__ == "__main__":
    sys.exit(main(ImpalaOptions, train, evaluate))
