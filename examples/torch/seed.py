"""SEED in PyTorch: actors have environments only; a server runs the network for all of them.

    moolink run -n 4 -m examples.torch.seed                     a learner, a server and two actors
    moolink run -n 4 --restart 9 -m examples.torch.seed         also when some are killed
    python -m examples.torch.seed --connect HOST:PORT --group G --peer-index 4      an actor
    python -m examples.torch.seed --mode evaluate               play from the checkpoint

Peer 0 is the learner (`learn`), the `--num-servers` next ones are inference servers (`serve`), the
others actors (`act`). An actor sends observations, rewards and ends of episodes by
`moolink.InferenceClient`, and gets actions. A server makes unrolls of what comes by, and sends them
to the learner's `moolink.TrajectoryQueue`; it switches between batches to the weights that the
learner publishes. V-trace corrects for the weights that change within an unroll. All processes
find one another by name. A server that is killed is replaced, by another one if there are several:
that costs the unrolls under way there. A learner that is started again goes on from its checkpoint.

Time is the first axis of the learner's tensors, the batch the second. `x_t` is x at time t, `x_tm1`
at t - 1 and `x_tp1` at t + 1. T is the length of an unroll, E the number of environments of an
actor, B that of an update, R the rows of a batch of inference.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

import moolink.torch
from examples.common.environments import make_envs, random_means
from examples.common.evaluation import evaluated
from examples.common.options import OptionError
from examples.common.roles import GOODBYE, LearnerRun, RoleOptions, connected, follower, spaces_of
from examples.common.run import main
from examples.torch.common import device_of, load_published, load_saved, snapshot, to_device
from examples.torch.networks import ActorCritic
from examples.torch.vtrace import vtrace

MOST_ENVS = 4096  # of all actors


@dataclass
class SeedOptions(RoleOptions):
    """IMPALA with remote inference. `--peer-index 1` and those after it are the servers."""

    num_servers: int = 1
    """Inference servers."""
    num_envs: int = 8
    """E, environments of each actor."""
    unroll_length: int = 20
    """T, the number of steps of an unroll."""
    batch_size: int = 8
    """B, unrolls of one environment in an update."""
    queue_size: int = 16
    """Unrolls that may wait for the learner; with more the servers wait."""
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

    @property
    def servers(self) -> list[str]:
        """Their names at the broker."""
        return [f"{self.group_name}-server-{i}" for i in range(1, self.num_servers + 1)]

    @property
    def env_numbers(self) -> np.ndarray:
        """Of this actor's environments among those of all actors [E]."""
        return (self.peer_index - 1 - self.num_servers) * self.num_envs + np.arange(self.num_envs)

    def validate(self) -> None:
        super().validate()
        if self.env_numbers[-1] >= MOST_ENVS:
            raise OptionError(f"a server has room for {MOST_ENVS} environments of all actors")


# Acting


def act(o: SeedOptions) -> None:
    """Steps environments with the servers' actions, until the learner ends the job."""
    envs = make_envs(o, o.num_envs)
    with (
        follower(o) as (rpc, job),
        moolink.InferenceClient(rpc, "policy", o.servers) as policy,
        moolink.InferenceClient(rpc, "values", o.servers) as values,
    ):
        zeros = np.zeros(o.num_envs, np.float32)
        observation = envs.reset(o.acting_seed if o.seed_envs else None)["obs"]
        returns, step = zeros, {"reward": zeros, "discount": zeros}
        step |= {"bootstrap": zeros, "episode_return": zeros, "env": o.env_numbers}
        while not job.is_over():
            # What came of the last actions, and the observations for the next ones.
            request = step | {"observation": observation}
            envs.send(np.asarray(policy.infer(request, timeout=o.timeout)["action"])[:, None])
            parts, reward, terminated, truncated, over, last = envs.recv()
            observation, returns, ended = parts["obs"], returns + reward, terminated | truncated
            step["reward"] = reward
            step["discount"] = np.where(ended, 0.0, o.discount).astype(np.float32)
            step["episode_return"] = np.where(over, returns, np.nan).astype(np.float32)
            step["bootstrap"] = zeros
            returns = np.where(over, 0.0, returns)
            if last is not None:
                value = values.infer({"observation": last["obs"]}, timeout=o.timeout)
                step["bootstrap"] = np.where(truncated, value, 0.0).astype(np.float32)
    envs.close()


class Unrolls:
    """The unrolls under way of all environments that a server infers for."""

    def __init__(self, space: spaces.Box, o: SeedOptions, writer: moolink.TrajectoryWriter) -> None:
        self.T, self.writer = o.unroll_length, writer
        shape = (MOST_ENVS, self.T)  # pages that are not used take no memory
        self.arrays = {
            "observation": np.empty((MOST_ENVS, self.T + 1, *space.shape), space.dtype),
            "action": np.empty(shape, np.int64),
            "log_prob": np.empty(shape, np.float32),  # of the action, under the policy that took it
            "reward": np.empty(shape, np.float32),
            "discount": np.empty(shape, np.float32),  # 0 where the step ended an episode
            "bootstrap": np.empty(shape, np.float32),  # the value after a step that was cut off
            "episode_return": np.empty(shape, np.float32),  # where an episode ended, else NaN
        }
        self.begin, self.end = np.zeros((2, MOST_ENVS), np.int64)  # versions of the weights

    def add(
        self, inputs: dict[str, np.ndarray], t: np.ndarray, version: int, **taken: np.ndarray
    ) -> np.ndarray:
        """Adds a step of R environments at the times t of their unrolls [R], with the action
        `taken` and its log_prob; sends the unrolls that are full. Returns the times after it."""
        env, begun, full = inputs["env"], t > 0, t == self.T
        for name in ("reward", "discount", "bootstrap", "episode_return"):
            self.arrays[name][env[begun], t[begun] - 1] = inputs[name][begun]
        observation = self.arrays["observation"]
        observation[env, t] = inputs["observation"]
        for i in env[full]:
            unroll = {name: array[i] for name, array in self.arrays.items()}
            self.writer.put(unroll, begin=int(self.begin[i]), end=int(self.end[i]))
        observation[env[full], 0] = observation[env[full], self.T]
        t = np.where(full, 0, t)
        for name, values in taken.items():
            self.arrays[name][env, t] = values
        self.begin[env[t == 0]] = self.end[env] = version
        return t + 1


def serve(o: SeedOptions) -> None:
    """Infers for the actors with the newest weights, until the learner ends the job."""
    torch.set_num_threads(o.torch_threads or o.cores)
    torch.manual_seed(o.acting_seed)
    envs = make_envs(o, o.num_envs)
    space, num_actions = spaces_of(envs)
    envs.close()
    device = device_of(o)
    net = ActorCritic(space, num_actions, None, o.hidden_size).to(device).requires_grad_(False)
    lock, loaded = threading.Lock(), -1

    def infer(batch: moolink.inference.InferenceBatch) -> tuple[Tensor, Tensor]:
        """Logits [R, actions] and values [R]."""
        nonlocal loaded
        with lock:
            if batch.version != loaded:
                load_published(net, batch.weights)
                loaded = batch.version
            observation = to_device(torch.from_numpy(batch.inputs["observation"]), device)
            logits, value = net(observation[None])
            return logits[0].cpu(), value[0].cpu()

    def policy_of(batch: moolink.inference.InferenceBatch) -> tuple[dict[str, np.ndarray], Any]:
        log_pi = F.log_softmax(infer(batch)[0], -1)
        action = torch.multinomial(log_pi.exp(), 1)
        log_prob = log_pi.gather(1, action)[:, 0].numpy()
        action, rows, t = action[:, 0].numpy(), batch.rows, batch.state["t"].copy()
        if not job.is_over():
            inputs = {name: x[:rows] for name, x in batch.inputs.items()}
            taken = {"action": action[:rows], "log_prob": log_prob[:rows]}
            try:
                t[:rows] = unrolls.add(inputs, t[:rows], batch.version, **taken)
            except moolink.RemoteError:
                if not job.is_over():  # else the learner has closed its queue
                    raise
        return {"action": action}, {"t": t}

    with (
        follower(o, o.servers[o.peer_index - 1]) as (rpc, job),
        moolink.Subscriber(rpc, "policy", o.learner, arrays="numpy") as weights,
        moolink.TrajectoryWriter(rpc, "unrolls", o.learner, ahead=2 * o.batch_size) as writer,
    ):
        unrolls = Unrolls(space, o, writer)
        # An environment's time in its unroll is its recurrent state; with a new actor it begins.
        state = {"t": np.zeros((), np.int64)}
        with (
            moolink.InferenceServer(
                rpc, "policy", policy_of, state=state, weights=weights
            ) as server,
            moolink.InferenceServer(rpc, "values", lambda b: infer(b)[1].numpy(), weights=weights),
        ):
            job.wait_over()
            until = time.monotonic() + GOODBYE
            while server.stats()["clients"] and time.monotonic() < until:
                time.sleep(0.05)  # actors take their last actions


# Learning


def impala_loss(
    net: ActorCritic, unrolls: dict[str, Tensor], o: SeedOptions
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


def learn(o: SeedOptions) -> None:
    """Learns from the servers' unrolls, until the job's steps or seconds are over."""
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
                batch = queue.get(o.batch_size, max_lag=o.max_lag, timeout=1.0)
            except moolink.TimeoutError as late:
                run.waits(late)
                continue
            unrolls = {name: torch.as_tensor(x) for name, x in batch.data.items()}
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


def train(o: SeedOptions) -> None:
    """Runs the peer's role."""
    role = learn if o.is_learner else serve if o.peer_index <= o.num_servers else act
    role(o)


def evaluate(o: SeedOptions) -> None:
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
    sys.exit(main(SeedOptions, train, evaluate))
