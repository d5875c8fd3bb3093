"""Ape-X DQN in PyTorch: many actors fill a prioritised replay, from which one process learns.

    moolink run -n 3 -m examples.torch.apex_dqn                            a learner and two actors
    moolink run -n 3 --restart 9 -m examples.torch.apex_dqn                also when some are killed
    python -m examples.torch.apex_dqn --connect HOST:PORT --group G --peer-index 3        an actor
    python -m examples.torch.apex_dqn --mode evaluate                      play from the checkpoint

Peer 0 is the learner (`learn`). It has the table, a `moolink.Replay`, and serves it to the actors
(`act`), which write to it with a `moolink.ReplayClient`; weights go to them by `moolink.Publisher`
and `Subscriber`. Actors explore with epsilons of their own and give each transition its first
priority; the learner gives it those after. Double Q-learning, dueling heads, n-step returns. All
processes find one another by name. An actor that is killed costs its last steps; a learner that is
started again goes on from its checkpoint with an empty table.

`_t` is of time t and `_tpn` of t + n. E is the number of environments of an actor, B the size
of a batch, A the number of actions.
"""

from __future__ import annotations

import copy
import queue
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

import moolink.torch
from examples.common.environments import make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.options import OptionError
from examples.common.roles import LearnerRun, RoleOptions, connected, follower, spaces_of
from examples.common.run import main
from examples.torch.common import device_of, load_published, load_saved, snapshot, to_device
from examples.torch.networks import Features
from moolink.replay import NStepWriter, Prioritized, SampleToInsertRatio, Table

REPORTED = 0.02  # returns are those of environments with an epsilon below it
REPORT_EVERY = 16  # steps


@dataclass
class ApexOptions(RoleOptions):
    """Ape-X DQN: distributed prioritised replay."""

    num_envs: int = 8
    """E, environments of each actor."""
    epsilon: float = 0.4
    """Environment i of N takes a random action with probability epsilon ** (1 + spread * i / (N -
    1))."""
    epsilon_spread: float = 7.0
    """The larger, the less do most environments explore."""
    n_step: int = 3
    """Rewards in a return."""
    replay_size: int = 100_000
    """Transitions in the table."""
    min_size: int = 2_000
    """Transitions that the learner waits for at first."""
    samples_per_insert: float = 8.0
    """How often a transition is learned from, on average; actors or learner wait for each other."""
    priority_exponent: float = 0.6
    """Transitions are sampled in proportion to priority ** exponent."""
    importance_exponent: float = 0.4
    """Corrects for that in the loss; 1 wholly."""
    batch_size: int = 64
    """B, transitions in an update."""
    target_interval: int = 200
    """Updates between two copies of the network to the target network."""
    publish_interval: int = 8
    """Updates between two versions of the weights."""

    def validate(self) -> None:
        super().validate()
        if not self.greedy:
            raise OptionError("--no-greedy: Q-learning has no policy to sample from")

    def preset(self) -> None:
        self.learning_rate, self.max_grad_norm = 5e-4, 10.0
        if self.is_atari:
            self.total_steps, self.hidden_size = 2_000_000, 256
            self.clip_reward = self.episodic_life = True
            self.learning_rate, self.min_size = 2.5e-4, 20_000
            self.target_interval = 1_000
        elif self.env_id.startswith("CartPole"):
            self.total_steps = 200_000


class Net(Features):
    """Features, and dueling heads."""

    def __init__(self, space: spaces.Box, num_actions: int, mean: np.ndarray | None, width: int):
        super().__init__(space, mean, width, nn.ReLU)
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, num_actions)

    def forward(self, observation: Tensor) -> Tensor:
        """Observations [B, ...] -> Q [B, A]."""
        x = self.features(observation)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


# Acting


def make_writers(client: moolink.ReplayClient, o: ApexOptions) -> list[NStepWriter]:
    """One for each of E environments. A note is Q of the action taken and the largest Q."""

    def priority(of_t: Any, return_t: float, discount_t: float, of_tpn: Any) -> float:
        return priority_of(return_t + discount_t * of_tpn[1] - of_t[0])

    n, discount = o.n_step, o.discount
    return [NStepWriter(client, n, discount, priority=priority) for _ in range(o.num_envs)]


def priority_of(error: Any) -> Any:
    """The priority of a transition by the error of its Q. Each is sampled now and then."""
    return abs(error) + 1e-3


def act(o: ApexOptions) -> None:
    """Plays with the newest weights and writes transitions, until the learner ends the job."""
    torch.set_num_threads(o.torch_threads or 1)
    random, E = np.random.default_rng(o.acting_seed), o.num_envs
    envs = make_envs(o, E)
    space, num_actions = spaces_of(envs)
    net = Net(space, num_actions, None, o.hidden_size).requires_grad_(False)
    actors = max(1, o.num_peers - 1)
    place = (np.arange(E) * actors + o.peer_index - 1) / max(
        1, actors * E - 1
    )  # among all: 0 ... 1
    epsilon = o.epsilon ** (1 + o.epsilon_spread * np.minimum(1, place))
    with (
        follower(o) as (rpc, job),
        moolink.Subscriber(rpc, "policy", o.learner, arrays="numpy") as policy,
    ):
        writers = make_writers(moolink.ReplayClient(rpc, server=o.learner), o)
        observation = envs.reset(o.acting_seed if o.seed_envs else None)["obs"]
        version, returns, finished, steps = -1, np.zeros(E), [], 0
        while not job.is_over():
            weights = policy.wait(timeout=o.timeout)
            if weights.version != version:
                load_published(net, weights.tree)
                version = weights.version
            q = net(torch.from_numpy(observation)).numpy()
            explores = random.random(E) < epsilon
            action = np.where(explores, random.integers(num_actions, size=E), q.argmax(-1))
            envs.send(action[:, None])
            parts, reward, terminated, truncated, over, last = envs.recv()
            learned = np.sign(reward) if o.clip_reward else reward
            if last is not None:
                q_last = net(torch.from_numpy(last["obs"])).numpy()
            for row, writer in enumerate(writers):
                note = q[row, action[row]], q[row].max()
                writer.append(observation[row], action[row], learned[row], note)
                if terminated[row]:
                    writer.terminate()
                elif truncated[row]:
                    writer.truncate(last["obs"][row], (0.0, q_last[row].max()))
            observation, steps, returns = parts["obs"], steps + 1, returns + reward
            finished += returns[over & (epsilon < REPORTED)].tolist()
            returns[over] = 0.0
            if steps % REPORT_EVERY == 0:  # without waiting for the reply
                rpc.async_(o.learner, "played", REPORT_EVERY * E, finished)
                finished = []
    envs.close()


# Learning


def errors_of(net: Net, target: Net, batch: dict[str, Tensor]) -> Tensor:
    """The errors of Q [B] by double Q-learning: the network chooses the action at t + n, and the
    target network values it."""
    q_t = net(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        action_tpn = net(batch["next_observation"]).argmax(-1, keepdim=True)
        value_tpn = target(batch["next_observation"]).gather(1, action_tpn)[:, 0]
    return batch["reward"] + batch["discount"] * value_tpn - q_t


def huber(error: Tensor) -> Tensor:
    """Half the square of an error up to 1, beyond that linear."""
    return torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)


def make_replay(o: ApexOptions) -> moolink.Replay:
    limiter = SampleToInsertRatio(
        o.samples_per_insert, o.min_size, error_buffer=o.samples_per_insert * 256 + o.batch_size
    )
    sampler = Prioritized(o.priority_exponent)
    table = Table("transitions", o.replay_size, sampler, limiter=limiter)
    return moolink.Replay(table, seed=o.seed, arrays="torch")


def learn(o: ApexOptions) -> None:
    """Learns from the table that the actors fill, until the job's steps or seconds are over."""
    torch.set_num_threads(o.torch_threads or o.cores)
    torch.manual_seed(o.seed)
    run = LearnerRun(o)
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    net = Net(space, num_actions, random_means(envs, o.seed).get("obs"), o.hidden_size)
    envs.close()
    device = device_of(o)
    optimizer = torch.optim.Adam(net.to(device).parameters(), lr=o.learning_rate, eps=o.adam_eps)
    if run.saved is not None:
        load_saved(net, o, run.saved)
        moolink.torch.load_optimizer_state(optimizer, run.saved["optimizer"])
    target = copy.deepcopy(net).requires_grad_(False)
    played: queue.SimpleQueue[tuple[int, list[float]]] = queue.SimpleQueue()

    with (
        connected(o, o.learner) as rpc,
        make_replay(o) as replay,
        moolink.ReplayServer(rpc, replay),
        moolink.Publisher(rpc, "policy") as publisher,
        run.joined(rpc, partial(snapshot, net, optimizer)),
    ):
        rpc.define("played", lambda steps, returns: played.put((steps, returns)))
        version, updates = publisher.publish(net.state_dict(), run.version + 1), 0
        while not run.is_over():
            try:
                batch = replay.sample(o.batch_size, timeout=1.0, device=device)
            except moolink.TimeoutError as late:
                run.waits(late)
                continue
            error = errors_of(net, target, batch.data)
            weights = to_device(torch.from_numpy(batch.weights(o.importance_exponent)), device)
            loss = (weights * huber(error)).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), o.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = o.rate(run.totals)
            optimizer.step()
            replay.update_priorities(batch.keys, priority_of(error.detach()).cpu().numpy())
            updates += 1
            if updates % o.target_interval == 0:
                target.load_state_dict(net.state_dict())
            if updates % o.publish_interval == 0:
                # Above all versions before, also those of a learner that was killed.
                version = publisher.publish(net.state_dict())
            reports = [played.get() for _ in range(played.qsize())]
            run.learned(
                version,
                sum(steps for steps, _ in reports),
                np.array([x for _, returns in reports for x in returns]),
                batch_size=len(batch),
                gradient_norm=norm.item(),
                loss=loss.detach(),
            )


def train(o: ApexOptions) -> None:
    """Runs the peer's role."""
    (learn if o.is_learner else act)(o)


def evaluate(o: ApexOptions) -> None:
    """Plays with the actions of the largest Q from the checkpoint, and reports the returns."""
    torch.set_num_threads(o.torch_threads or max(1, o.cores // 2))
    with evaluated(o) as evaluation:
        space, num_actions = spaces_of(evaluation.envs)
        net = Net(space, num_actions, None, o.hidden_size).requires_grad_(False)
        load_saved(net, o, evaluation.saved)
        while not evaluation.is_over():
            q = net(torch.from_numpy(evaluation.observation["obs"]))
            evaluation.step(q.argmax(-1, keepdim=True).numpy())


if __name__ == "__main__":
    sys.exit(main(ApexOptions, train, evaluate))
