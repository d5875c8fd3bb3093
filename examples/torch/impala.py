"""IMPALA in PyTorch: every peer acts and learns; gradients are reduced through a moolink group.

    moolink run -n 2 -m examples.torch.impala                        two peers and a broker
    python -m examples.torch.impala --connect HOST:PORT --group G    one more peer
    python -m examples.torch.impala --mode evaluate                  play from the checkpoint

In each peer one thread acts (`examples.common.actor`) and the main thread learns. Both spend most
of their time in code that has released the GIL. The parameters are equal on all peers because all
apply the same gradients in the same order; a newcomer gets them from the group's leader.

Time is the first axis of all tensors, the batch the second. `x_t` is x at time t, `x_tm1` at t - 1
and `x_tp1` at t + 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import moolink
from examples.common import checkpoint
from examples.common.actor import Actor
from examples.common.config import Config, ConfigError, LearnerConfig, parse
from examples.common.curve import LearningCurve
from examples.common.environments import FRAMES_PER_STEP, VectorEnv, estimate_pixel_mean, make_env
from examples.common.evaluation import play
from examples.common.memory import keep_freed_memory
from examples.common.progress import Terminal, process_start, progress_line
from examples.common.statistics import EpisodeReturns, ReturnWindow
from examples.common.unrolls import Batch
from examples.torch.net import ActingPolicy, Net
from examples.torch.optimizers import Optimizer, make_optimizer

GATHERING_TIME = 10.0  # seconds that a new job waits for the number of peers it is meant for


class VTrace(NamedTuple):
    """Targets of the baseline and weights of the policy gradient, both [T, B]."""

    vs: Tensor
    pg_advantages: Tensor


def vtrace(
    log_rho_t: Tensor,
    discount_t: Tensor,
    reward_t: Tensor,
    value_t: Tensor,
    bootstrap_value: Tensor,
    *,
    lambda_: float,
    clip_rho: float,
    clip_c: float,
) -> VTrace:
    """V-trace, from remark 2 and section 4.2 of the IMPALA paper (arXiv 1802.01561).

    With rho_t = min(clip_rho, pi(a_t | x_t) / mu(a_t | x_t)) and c_t = lambda min(clip_c, ...):

        vs_t = V_t + rho_t (r_t + gamma_t V_{t+1} - V_t) + gamma_t c_t (vs_{t+1} - V_{t+1})
        pg_advantage_t = rho_t (r_t + gamma_t vs_{t+1} - V_t)

    Args:
        log_rho_t: log(pi / mu) of the actions taken [T, B], float.
        discount_t: gamma, or 0 where the return ended with the step [T, B].
        reward_t: [T, B].
        value_t: the baseline V at the observations before the steps [T, B].
        bootstrap_value: V at the observation after the last step [B].
    """
    ratio_t = log_rho_t.exp()
    rho_t = ratio_t.clamp(max=clip_rho)
    discounted_c_t = discount_t * ratio_t.clamp(max=clip_c) * lambda_
    value_tp1 = torch.cat([value_t[1:], bootstrap_value[None]])
    delta_t = rho_t * (reward_t + discount_t * value_tp1 - value_t)
    corrections = torch.empty_like(delta_t)  # vs_t - V_t
    correction = torch.zeros_like(bootstrap_value)
    for t in reversed(range(len(delta_t))):
        correction = torch.addcmul(delta_t[t], discounted_c_t[t], correction, out=corrections[t])
    vs = value_t + corrections
    vs_tp1 = torch.cat([vs[1:], bootstrap_value[None]])
    return VTrace(vs, rho_t * (reward_t + discount_t * vs_tp1 - value_t))


class Losses(NamedTuple):
    """Scalars. `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: Tensor
    entropy: Tensor


def impala_loss(net: Net, batch: Batch, config: LearnerConfig) -> Losses:
    """The loss of one contribution.

    `mean`: over time and batch. `sum`: summed over time and averaged over the batch, so that the
    round's weighted mean times its batch size is the paper's sum over everything.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits, baseline = net(torch.from_numpy(batch.observation))
    log_pi = F.log_softmax(logits[:-1], dim=-1)
    action_t = torch.from_numpy(batch.action)
    log_pi_a = log_pi.gather(-1, action_t[..., None]).squeeze(-1)
    reward_t = torch.from_numpy(batch.reward)
    with torch.no_grad():
        targets = vtrace(
            log_pi_a - torch.from_numpy(batch.log_prob),
            config.discount * torch.from_numpy(~batch.done),
            reward_t.sign() if config.clip_reward else reward_t,
            baseline[:-1],
            baseline[-1],
            lambda_=config.vtrace_lambda,
            clip_rho=config.clip_rho,
            clip_c=config.clip_c,
        )
    entropy = -(log_pi.exp() * log_pi).sum(-1)
    loss_t = (
        -targets.pg_advantages * log_pi_a
        + config.baseline_cost * 0.5 * (targets.vs - baseline[:-1]).square()
        - config.entropy_cost * entropy
    )
    total = loss_t.mean() if config.loss == "mean" else loss_t.sum(0).mean()
    return Losses(total, entropy.detach().mean())


def learning_rate(config: Config, steps: int) -> float:
    """Falls linearly to 0 over the job's steps. It follows the steps that the rounds counted, not
    the number of rounds: so it does not depend on batch sizes or on how many peers there are."""
    return config.learner.learning_rate * max(0.0, 1.0 - steps / config.job.total_steps)


def apply_gradients(
    net: Net, optimizer: Optimizer, learning_rate: float, max_grad_norm: float
) -> float:
    """Clips the gradients, steps the optimiser and returns the norm before clipping.

    Raises FloatingPointError, changing nothing, if the norm is not finite.
    """
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError(f"the norm of the gradients is {norm.item()}")
    optimizer.step(learning_rate)
    return norm.item()


@dataclass
class Totals:
    """What this peer adds up between two rows of the learning curve."""

    steps: int
    time: float
    contributors: int | None = None  # None: no round yet
    batch_size: int = 0
    gradient_norm: float = 0.0
    loss: float = float("nan")
    entropy: float = float("nan")


class Learner:
    """The main thread of a peer."""

    def __init__(self, config: Config, terminal: Terminal) -> None:
        self.config = config
        self.terminal = terminal
        self.started = process_start()
        self.steps = 0  # of the whole group that were learned from
        self.window = ReturnWindow()
        self.returns = EpisodeReturns()
        self.curve = LearningCurve(config.save_dir)
        self.stop_reason: str | None = None
        self.hurried = False
        self.next_log = self.next_checkpoint = 0.0
        self.leads = False
        self.joined = False  # whether it came to a job under way

        saved = checkpoint.load(config.save_dir) if config.job.resume else None
        if saved is not None:
            checkpoint.check_can_go_on(config, saved)
        env = make_env(config, config.envs_per_group)
        self.net = make_net(config, env, saved)
        self.optimizer = make_optimizer(self.net.parameters(), config.learner)
        dtype = getattr(torch, config.learner.precision)
        self.policy = ActingPolicy(self.net, config.actor_seed, dtype)
        self.actor = Actor(config, env, self.policy, self.returns)

        self.broker = None if config.group.connect else moolink.Broker(first=True)
        address = config.group.connect or self.broker.listen("127.0.0.1:0")[0]
        self.rpc = moolink.Rpc()
        self.rpc.set_name(config.peer_name)
        try:
            self.rpc.connect(address)
        except ValueError as error:
            raise ConfigError(f"--connect {address}: {error}") from None
        self.group = moolink.Group(self.rpc, config.group_name)
        self.accumulator = moolink.torch.Accumulator(
            "impala", self.net.parameters(), self.net.buffers(), group=self.group
        )
        self.accumulator.set_virtual_batch_size(config.virtual_batch_size)
        self.accumulator.set_parallel_gradients(config.learner.parallel_gradients)
        self.waiting = f"waiting for group {config.group_name} at broker {address}"
        if saved is not None:
            self.load_state(saved["state"])
            self.accumulator.set_model_version(saved["model_version"])
            terminal.say(f"resumed from {config.save_dir / checkpoint.NAME} at step {self.steps:,}")
        self.totals = Totals(self.steps, self.started)
        self.ready = time.monotonic()

    def stop(self, reason: str, hurried: bool = False) -> None:
        """Ends `run` at its next turn; when hurried, without drawing the curve. May be called from
        a signal handler."""
        self.stop_reason = self.stop_reason or reason
        self.hurried |= hurried

    def run(self) -> None:
        """Learns until the job's steps or seconds are over, or until it is told to stop."""
        try:
            while self.stop_reason is None:
                self.turn()
                self.report()
            self.finish()
        finally:
            self.actor.stop()
            self.group.close()
            self.rpc.close()
            if self.broker is not None:
                self.broker.close()

    def turn(self) -> None:
        """One turn of the loop: at most one round applied or one contribution made."""
        accumulator = self.accumulator
        self.group.update()
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state(self.state())
        if accumulator.has_new_state():
            self.load_state(accumulator.state())
            self.joined = True
        self.lead(accumulator.connected() and accumulator.is_leader())
        if not accumulator.connected():
            self.terminal.wait(self.group.waiting_for() or self.waiting)
            accumulator.wait(0.1)
            return
        if not self.actor.ident:
            if self.lacks_peers():
                accumulator.wait(0.1)
                return
            self.actor.start()  # not before: a newcomer's first parameters come from the leader
        if accumulator.has_gradients():
            self.apply_round()
        elif not accumulator.wants_gradients():
            accumulator.wait(0.1)
        elif (batch := self.actor.unrolls.get(timeout=0.01)) is not None:
            self.contribute(batch)

    def lacks_peers(self) -> bool:
        """Whether a new job waits for its other peers, which it does for some seconds at most."""
        gathered = len(self.group.members()) >= self.config.group.num_peers
        return not (gathered or self.joined or time.monotonic() > self.ready + GATHERING_TIME)

    def contribute(self, batch: Batch) -> None:
        """Computes the gradients of one batch and offers them to the group."""
        losses = impala_loss(self.net, batch, self.config.learner)
        losses.total.backward()
        num_steps, batch_size = batch.action.shape
        self.actor.unrolls.release(batch)
        self.totals.loss, self.totals.entropy = losses.total.item(), losses.entropy.item()
        self.accumulator.reduce_gradients(
            batch_size,
            counters={
                "steps": num_steps * batch_size,
                "time_is_up": int(self.time_is_up()),
                **self.returns.take(),
            },
        )

    def apply_round(self) -> None:
        """Steps the optimiser with the gradients of a round, as all peers do."""
        stats = self.accumulator.get_gradient_stats()
        learner = self.config.learner
        if learner.loss == "sum":
            torch._foreach_mul_([p.grad for p in self.net.parameters()], float(stats["batch_size"]))
        rate = learning_rate(self.config, self.steps)
        try:
            norm = apply_gradients(self.net, self.optimizer, rate, learner.max_grad_norm)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{error} in round {self.accumulator.model_version()}, of {stats['contributors']}; "
                f"lower --learning-rate and go on from the checkpoint in {self.config.save_dir}"
            ) from error
        self.accumulator.zero_gradients()
        self.policy.update(self.net)
        self.count(stats, norm)

    def count(self, stats: dict[str, Any], norm: float) -> None:
        """Takes a round's counters. They are equal on all peers, which therefore end at one round
        with equal parameters."""
        counters, totals = stats["counters"], self.totals
        self.steps += counters["steps"]
        self.window.add(counters)
        totals.batch_size, totals.gradient_norm = stats["batch_size"], norm
        contributors = len(set(stats["contributors"]))
        totals.contributors = min(contributors, totals.contributors or contributors)
        if self.steps >= self.config.job.total_steps:
            self.stop("all steps are done")
        elif counters["time_is_up"]:
            self.stop("the time is up")

    def time_is_up(self) -> bool:
        limit = self.config.job.max_seconds
        return limit is not None and time.monotonic() - self.started > limit

    def state(self) -> dict[str, Any]:
        """What newcomers need besides parameters and buffers."""
        return {
            "optimizer": self.optimizer.state(),
            "steps": self.steps,
            "window": self.window.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state(state["optimizer"])
        self.steps = state["steps"]
        self.window.load(state["window"])
        self.policy.update(self.net)
        self.totals = Totals(self.steps, time.monotonic())

    def lead(self, leads: bool) -> None:
        """The leader reports and saves; leadership moves when a leader leaves."""
        if leads and not self.leads:
            self.write(self.curve.start, self.steps)
            self.next_log = 0.0  # says at once that it learns
            self.next_checkpoint = time.monotonic() + self.config.job.checkpoint_interval
        self.leads = leads

    def report(self) -> None:
        """Logs and saves when it is time to; the leader does, and the others move their bars."""
        now = time.monotonic()
        if now >= self.next_log and self.totals.contributors is not None:
            self.next_log = now + self.config.job.log_interval
            self.terminal.advance(self.steps, f"return {self.window.mean or 0.0:.2f}")
            if self.leads:
                self.log()
        if self.leads and now >= self.next_checkpoint:
            self.next_checkpoint = now + self.config.job.checkpoint_interval
            self.save()
            self.write(self.curve.plot, self.config.job.env)

    def log(self) -> None:
        """Writes one row of the learning curve and says it in the terminal."""
        totals, now = self.totals, time.monotonic()
        row = {
            "seconds": round(now - self.started, 2),
            "steps": self.steps,
            "frames": self.steps * FRAMES_PER_STEP,
            "updates": self.accumulator.model_version(),
            "episodes": self.window.episodes,
            "mean_return": self.window.mean,
            "steps_per_second": round((self.steps - totals.steps) / (now - totals.time), 1),
            "cpu_seconds": round(time.process_time(), 2),
            "contributors": totals.contributors,
            "batch_size": totals.batch_size,
            "learning_rate": learning_rate(self.config, self.steps),
            "gradient_norm": totals.gradient_norm,
            "loss": totals.loss,
            "entropy": totals.entropy,
        }
        self.write(self.curve.append, row)
        self.terminal.say(progress_line(row, self.config.job.total_steps, totals.contributors))
        self.totals = Totals(self.steps, now)

    def save(self) -> None:
        """Writes a checkpoint."""
        tree = {
            "parameters": {name: x.numpy() for name, x in self.net.state_dict().items()},
            "state": to_numpy(self.state()),
            "model_version": self.accumulator.model_version(),
            "config": self.config.as_dict(),
        }
        self.write(checkpoint.save, self.config.save_dir, tree)

    def write(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls something that writes a file. A full disk is said and does not end the job."""
        try:
            function(*args)
        except (OSError, checkpoint.CheckpointError) as error:
            self.terminal.warn(f"{error}; the job goes on")

    def finish(self) -> None:
        """Says why and where it ended, and leaves the results on the disk."""
        if self.leads:
            if self.totals.contributors is not None:
                self.log()
            self.save()
        self.terminal.say(
            f"{self.stop_reason} after {self.steps:,} steps; model {model_checksum(self.net)} "
            f"at update {self.accumulator.model_version()} on {self.rpc.get_name()}"
        )
        if not self.hurried:
            # All end at this round. Who left before the others have it could take with it what
            # they still need; who does not come any more is not waited for.
            with contextlib.suppress(moolink.Error):
                self.group.update()
                self.group.all_reduce("end of the job", 1).result(timeout=5.0)
            if self.leads:
                self.write(self.curve.plot, self.config.job.env)
                self.terminal.say(f"learning curve: {self.curve.csv_path}, {self.curve.png_path}")


def make_net(config: Config, env: VectorEnv, saved: dict[str, Any] | None) -> Net:
    """The network: with the parameters of a checkpoint, or new and equal on all peers."""
    if saved is None:
        mean = estimate_pixel_mean(env, config.job.seed)
    else:
        mean = saved["parameters"]["pixel_mean"]
    torch.manual_seed(config.job.seed)
    net = Net(config.learner.net, env.observation_shape, env.num_actions, mean)
    if saved is not None:
        net.load_state_dict({k: torch.from_numpy(x) for k, x in saved["parameters"].items()})
    return net


def to_numpy(tree: Any) -> Any:
    """The tree with its tensors as numpy arrays, as checkpoints hold them."""
    if isinstance(tree, Tensor):
        return tree.numpy()
    if isinstance(tree, dict):
        return {key: to_numpy(value) for key, value in tree.items()}
    return type(tree)(map(to_numpy, tree)) if isinstance(tree, (list, tuple)) else tree


def model_checksum(net: Net) -> str:
    """Of the parameters' and buffers' bits: peers in step print the same one."""
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(config: Config) -> None:
    """Learns, until done or told to stop by SIGTERM or SIGINT; a second one ends it at once."""
    with Terminal(config.job.total_steps) as terminal:
        learner = Learner(config, terminal)

        def on_signal(number: int, frame: FrameType | None) -> None:
            learner.stop(signal.Signals(number).name, hurried=True)
            signal.signal(number, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        learner.run()


def evaluate(config: Config) -> None:
    """Plays greedily from the checkpoint and prints the returns."""
    saved = checkpoint.load(config.save_dir)
    if saved is None:
        raise ConfigError(f"no checkpoint in {config.save_dir}: give the --save-dir of a job")
    checkpoint.check_can_go_on(config, saved)
    net = make_net(config, make_env(config, 1), saved)

    def greedy(observation: NDArray[np.uint8]) -> NDArray[np.int64]:
        with torch.inference_mode():
            logits, _ = net(torch.from_numpy(observation)[None])
            return logits[0].argmax(-1).numpy()

    returns = play(config, greedy)
    print(
        f"{config.job.env} after {saved['state']['steps']:,} steps: mean return "
        f"{returns.mean():.2f} of {len(returns)} games (deviation {returns.std():.2f}, least "
        f"{returns.min():g}, greatest {returns.max():g})"
    )


def main() -> int:
    config = parse()
    torch.set_num_threads(config.torch_threads)
    keep_freed_memory()
    try:
        (train if config.job.mode == "train" else evaluate)(config)
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (moolink.Error, FloatingPointError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
