"""IMPALA in PyTorch with separate actors: one process learns, the others act for it.

    moolink run -n 3 -m examples.torch.actor_learner                       a learner and two actors
    moolink run -n 3 --restart 9 -m examples.torch.actor_learner           also when some are killed
    python -m examples.torch.actor_learner --connect HOST:PORT --group G --peer-index 3   an actor
    python -m examples.torch.actor_learner --mode evaluate                 play from the checkpoint

Peer 0 is the learner (`learn`), every other one an actor (`act`). Weights go to the actors by
`moolink.Publisher` and `Subscriber`, unrolls come back by `moolink.TrajectoryWriter` and
`TrajectoryQueue`, which drops those that were begun more than `--max-lag` versions ago. V-trace
corrects for the lag that is left. All processes find one another by name: an actor that is killed
costs its unroll, and a learner that is started again goes on from its checkpoint.

Time is the first axis of all tensors, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments of an actor, B that
of an update.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moolink.torch
from examples.common.environments import make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.options import OptionError
from examples.common.roles import LearnerRun, RoleOptions, connected, follower, spaces_of
from examples.common.run import main
from examples.torch.common import device_of, load_published, load_saved, snapshot
from examples.torch.networks import ActorCritic
from examples.torch.vtrace import vtrace


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


# Acting


def act(o: ActorLearnerOptions) -> None:
    """Plays with the newest weights and sends unrolls, until the learner ends the job."""
    torch.set_num_threads(o.torch_threads or 1)
    torch.manual_seed(o.acting_seed)  # no two actors take the same actions
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    net = ActorCritic(space, num_actions, None, o.hidden_size).requires_grad_(False)
    T, E = o.unroll_length, o.num_envs
    unroll = {
        "observation": torch.from_numpy(np.empty((T + 1, E, *space.shape), space.dtype)),
        "action": torch.empty(T, E, dtype=torch.int64),
        "log_prob": torch.empty(T, E),  # of the action, under the policy that took it
        "reward": torch.empty(T, E),
        "discount": torch.empty(T, E),  # 0 where the step ended an episode
        "bootstrap": torch.empty(T, E),  # the value after a step that a limit cut off, else 0
        "episode_return": torch.empty(T, E),  # where the step ended an episode, else NaN
    }
    with (
        follower(o) as (rpc, job),
        moolink.Subscriber(rpc, "policy", o.learner, arrays="numpy") as policy,
        moolink.TrajectoryWriter(rpc, "unrolls", o.learner) as writer,
    ):
        observation = envs.reset(o.acting_seed if o.seed_envs else None)["obs"]
        returns = np.zeros(E)
        while not job.is_over():
            weights = policy.wait(timeout=o.timeout)
            load_published(net, weights.tree)
            for t in range(T):
                unroll["observation"][t] = torch.from_numpy(observation)
                logits, _ = net(unroll["observation"][t : t + 1])
                log_pi = F.log_softmax(logits[0], -1)
                action = torch.multinomial(log_pi.exp(), 1)
                unroll["action"][t], unroll["log_prob"][t] = (
                    action[:, 0],
                    log_pi.gather(1, action)[:, 0],
                )
                envs.send(action.numpy())
                parts, reward, terminated, truncated, over, last = envs.recv()
                observation = parts["obs"]
                returns += reward
                unroll["episode_return"][t] = torch.from_numpy(np.where(over, returns, np.nan))
                returns[over] = 0.0
                unroll["reward"][t] = torch.from_numpy(reward)
                unroll["discount"][t] = torch.from_numpy(
                    np.where(terminated | truncated, 0, o.discount)
                )
                unroll["bootstrap"][t] = 0.0
                if last is not None:
                    _, value = net(torch.from_numpy(last["obs"])[None])
                    unroll["bootstrap"][t, truncated] = value[0, truncated]
            unroll["observation"][T] = torch.from_numpy(observation)
            try:
                writer.put(unroll, begin=weights.version)
            except moolink.RemoteError:
                if not job.is_over():  # else the learner has closed its queue
                    raise
    envs.close()


# Learning


def impala_loss(
    net: ActorCritic, unrolls: dict[str, Tensor], o: ActorLearnerOptions
) -> tuple[Tensor, Tensor]:
    """The loss of B unrolls, and the mean entropy of the policy in nats."""
    logits, baseline = net(unrolls["observation"])
    log_pi = F.log_softmax(logits[:-1], -1)
    log_pi_a = log_pi.gather(-1, unrolls["action"][..., None])[..., 0]
    with torch.no_grad():
        reward = unrolls["reward"].sign() if o.clip_reward else unrolls["reward"] * o.reward_scale
        targets = vtrace(
            log_pi_a - unrolls["log_prob"],
            unrolls["discount"],
            reward + o.discount * unrolls["bootstrap"],
            baseline[:-1],
            baseline[-1],
            lambda_=o.vtrace_lambda,
            clip_rho=o.clip_rho,
            clip_c=o.clip_c,
        )
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + o.baseline_cost * 0.5 * (targets.vs - baseline[:-1]).square()
        - o.entropy_cost * entropy
    )
    return loss_t.mean(), entropy.detach().mean()


def learn(o: ActorLearnerOptions) -> None:
    """Learns from the actors' unrolls, until the job's steps or seconds are over."""
    torch.set_num_threads(o.torch_threads or o.cores)
    torch.manual_seed(o.seed)
    run = LearnerRun(o)
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    net = ActorCritic(space, num_actions, random_means(envs, o.seed).get("obs"), o.hidden_size)
    envs.close()
    device = device_of(o)
    optimizer = torch.optim.Adam(net.to(device).parameters(), lr=o.learning_rate, eps=o.adam_eps)
    if run.saved is not None:
        load_saved(net, o, run.saved)
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])

    with (
        connected(o, o.learner) as rpc,
        moolink.TrajectoryQueue(
            rpc, "unrolls", max_size=o.queue_size, dim=1, device=device
        ) as queue,
        moolink.Publisher(rpc, "policy") as publisher,
        run.joined(rpc, partial(snapshot, net, optimizer)),
    ):
        queue.version = publisher.publish(net.state_dict(), run.version + 1)
        while not run.is_over():
            try:
                batch = queue.get(o.batch_size // o.num_envs, max_lag=o.max_lag, timeout=1.0)
            except moolink.TimeoutError as late:
                run.waits(late)
                continue
            # The queue has made [T, unrolls, E, ...] of the actors' [T, E, ...].
            unrolls = {name: x.flatten(1, 2) for name, x in batch.data.items()}
            loss, entropy = impala_loss(net, unrolls, o)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), o.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = o.rate(run.totals)
            optimizer.step()
            # Above all versions before, also those of a learner that was killed.
            queue.version = publisher.publish(net.state_dict())
            returns = unrolls["episode_return"]
            run.learned(
                queue.version,
                unrolls["reward"].numel(),
                returns[~returns.isnan()].cpu().numpy(),
                batch_size=o.batch_size,
                gradient_norm=norm.item(),
                loss=loss.detach(),
                entropy=entropy,
            )


def train(o: ActorLearnerOptions) -> None:
    """Runs the peer's role."""
    (learn if o.is_learner else act)(o)


def evaluate(o: ActorLearnerOptions) -> None:
    """Plays episodes from the checkpoint, and reports their returns."""
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    with evaluated(o) as evaluation:
        space, num_actions = spaces_of(evaluation.envs)
        net = ActorCritic(space, num_actions, None, o.hidden_size)
        load_saved(net, o, evaluation.saved)
        while not evaluation.is_over():
            with torch.no_grad():
                logits, _ = net(torch.from_numpy(evaluation.observation["obs"])[None])
            if not o.greedy:  # the largest of log p_i - log e_i is i with probability p_i
                logits = logits - torch.empty_like(logits).exponential_().log_()
            evaluation.step(logits[0].argmax(-1, keepdim=True).numpy())


if __name__ == "__main__":
    sys.exit(main(ActorLearnerOptions, train, evaluate))
