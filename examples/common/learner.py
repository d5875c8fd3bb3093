"""The learner's job, but for what a framework computes: rounds, files, logs, beginning and end.

`examples.torch.impala` and `examples.jax.impala` each give it a `Model`. What they do is the same
to the group, so that peers of both may learn one model together.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import moolink
from examples.common import checkpoint
from examples.common.actor import Actor, Policy
from examples.common.config import Config, ConfigError, parse
from examples.common.curve import LearningCurve
from examples.common.environments import FRAMES_PER_STEP, VectorEnv, estimate_pixel_mean, make_env
from examples.common.evaluation import play
from examples.common.memory import keep_freed_memory
from examples.common.progress import Terminal, process_start, progress_line
from examples.common.statistics import EpisodeReturns, ReturnWindow
from examples.common.unrolls import Batch

GATHERING_TIME = 10.0  # seconds that a new job waits for the number of peers it is meant for


class Hurried(Exception):
    """A signal has come while the peer waits for the others to end."""


class Model(Protocol):
    """Network, loss and optimiser, in one framework."""

    policy: Policy

    def join(self, group: moolink.Group) -> Any:
        """Returns the accumulator of its parameters, made for `group`."""

    def contribute(self, batch: Batch, release: Callable[[], None], **reduce: Any) -> Losses:
        """Computes gradients, calls `release` when the batch is not needed any more, and gives them
        to the accumulator with the options `reduce`."""

    def apply_round(self, learning_rate: float, factor: float) -> float:
        """Steps the optimiser with the round's gradients times `factor`, ends the use of the round,
        and returns the norm before clipping.

        Raises FloatingPointError, changing nothing, if the norm is not finite.
        """

    def state(self) -> dict[str, Any]:
        """The optimiser's: `count`, and lists of arrays in the order of the parameters."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes such a state, and what the accumulator has put into the parameters."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Parameters and buffers by their names in checkpoints."""

    def best_actions(self, observation: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The likeliest action [E] for each observation [E, C, H, W]."""


class MakeModel(Protocol):
    def __call__(
        self, config: Config, env: VectorEnv, parameters: dict[str, NDArray[Any]] | None
    ) -> Model:
        """A model with the parameters of a checkpoint, or new and equal on all peers."""


@dataclass(frozen=True)
class Losses:
    """Of one contribution; `entropy` is the mean entropy of the policy in nats, not a loss."""

    total: float
    entropy: float


def learning_rate(config: Config, steps: int) -> float:
    """Falls linearly to 0 over the job's steps. It follows the steps that the rounds counted, not
    the number of rounds: so it does not depend on batch sizes or on how many peers there are."""
    return config.learner.learning_rate * max(0.0, 1.0 - steps / config.job.total_steps)


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

    def __init__(self, config: Config, terminal: Terminal, make_model: MakeModel) -> None:
        self.config = config
        self.terminal = terminal
        self.started = process_start()
        self.steps = 0  # of the whole group that were learned from
        self.version = 0  # of the model: the rounds that were applied
        self.window = ReturnWindow()
        self.returns = EpisodeReturns()
        self.curve = LearningCurve(config.save_dir)
        self.stop_reason: str | None = None
        self.hurried = False
        self.is_ending = False  # it waits for the other peers to end, too
        self.next_log = self.next_checkpoint = 0.0
        self.leads = False
        self.joined = False  # whether it came to a job under way

        saved = checkpoint.load(config.save_dir) if config.job.resume else None
        if saved is not None:
            checkpoint.check_can_go_on(config, saved)
        env = make_env(config, config.envs_per_group)
        self.model = make_model(config, env, None if saved is None else saved["parameters"])
        self.actor = Actor(config, env, self.model.policy, self.returns)

        self.broker = None if config.group.connect else moolink.Broker(first=True)
        address = config.group.connect or self.broker.listen("127.0.0.1:0")[0]
        self.rpc = moolink.Rpc()
        self.rpc.set_name(config.peer_name)
        self.group = moolink.Group(self.rpc, config.group_name)
        self.accumulator = self.model.join(self.group)
        self.accumulator.set_virtual_batch_size(config.virtual_batch_size)
        self.accumulator.set_parallel_gradients(config.learner.parallel_gradients)
        self.waiting = f"waiting for group {config.group_name} at broker {address}"
        if saved is not None:
            self.load_state(saved["state"])
            self.version = saved["model_version"]
            self.accumulator.set_model_version(self.version)
            terminal.say(f"resumed from {config.save_dir / checkpoint.NAME} at step {self.steps:,}")
        try:
            self.rpc.connect(address)  # not earlier: the group would begin without that version
        except ValueError as error:
            raise ConfigError(f"--connect {address}: {error}") from None
        self.totals = Totals(self.steps, self.started)
        self.ready = time.monotonic()

    def stop(self, reason: str, hurried: bool = False) -> None:
        """Ends `run` at its next turn; when hurried, without waiting for the others and without
        drawing the curve. May be called from a signal handler."""
        self.stop_reason = self.stop_reason or reason
        self.hurried |= hurried
        if self.hurried and self.is_ending:
            raise Hurried

    def run(self) -> None:
        """Learns until the job's steps or seconds are over, or until it is told to stop."""
        try:
            while not self.is_over():
                self.turn()
                self.report()
            self.finish()
        finally:
            self.actor.stop()
            self.group.close()
            self.rpc.close()
            if self.broker is not None:
                self.broker.close()

    def is_over(self) -> bool:
        """Whether the loop ends: told to stop, at once; else with the other peers, at one round."""
        if self.stop_reason is None or self.hurried:
            return self.hurried
        try:
            self.is_ending = True
            return bool(self.accumulator.finish(self.shared_state))
        except Hurried:
            return True
        finally:
            self.is_ending = False

    def turn(self) -> None:
        """One turn of the loop: at most one round applied or one contribution made."""
        accumulator = self.accumulator
        self.group.update()
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state(self.shared_state())
        if accumulator.has_new_state():
            state = accumulator.state()
            self.load_state(state)
            self.stop_reason = self.stop_reason if self.hurried else state["stop_reason"]
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
        num_steps, batch_size = batch.action.shape
        losses = self.model.contribute(
            batch,
            lambda: self.actor.unrolls.release(batch),
            batch_size=batch_size,
            counters={
                "steps": num_steps * batch_size,
                "time_is_up": int(self.time_is_up()),
                **self.returns.take(),
            },
        )
        self.totals.loss, self.totals.entropy = losses.total, losses.entropy

    def apply_round(self) -> None:
        """Steps the optimiser with the gradients of a round, as all peers do."""
        stats = self.accumulator.get_gradient_stats()
        # The paper's loss is a sum over the round, of which the mean was reduced.
        factor = float(stats["batch_size"]) if self.config.learner.loss == "sum" else 1.0
        try:
            norm = self.model.apply_round(learning_rate(self.config, self.steps), factor)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{error} in round {self.accumulator.model_version()}, of {stats['contributors']}; "
                f"lower --learning-rate and go on from the checkpoint in {self.config.save_dir}"
            ) from error
        self.version = self.accumulator.model_version()
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
            "optimizer": self.model.state(),
            "steps": self.steps,
            "window": self.window.state(),
        }

    def shared_state(self) -> dict[str, Any]:
        """The same, and whether the job is over: who comes at its end ends with it."""
        return {**self.state(), "stop_reason": self.stop_reason}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state(state["optimizer"])
        self.steps = state["steps"]
        self.window.load(state["window"])
        self.version = self.accumulator.model_version()
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
            "updates": self.version,
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
            "parameters": self.model.arrays(),
            "state": to_numpy(self.state()),
            "model_version": self.version,
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
            f"{self.stop_reason} after {self.steps:,} steps; model {model_checksum(self.model)} "
            f"at update {self.version} on {self.rpc.get_name()}"
        )
        if self.leads and not self.hurried:
            self.write(self.curve.plot, self.config.job.env)
            self.terminal.say(f"learning curve: {self.curve.csv_path}, {self.curve.png_path}")


def to_numpy(tree: Any) -> Any:
    """The tree with its tensors as numpy arrays, as checkpoints hold them."""
    if isinstance(tree, dict):
        return {key: to_numpy(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(to_numpy, tree))
    return np.asarray(tree) if hasattr(tree, "__array__") else tree


def pixel_mean(
    config: Config, env: VectorEnv, parameters: dict[str, NDArray[Any]] | None
) -> NDArray[np.float32]:
    """That of the checkpoint's parameters, or of random play."""
    if parameters is None:
        return estimate_pixel_mean(env, config.job.seed)
    mean: NDArray[np.float32] = parameters["pixel_mean"]
    return mean


def model_checksum(model: Model) -> str:
    """Of the parameters' and buffers' bits: peers in step print the same one."""
    digest = hashlib.sha256()
    for array in model.arrays().values():
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def train(config: Config, make_model: MakeModel) -> None:
    """Learns, until done or told to stop by SIGTERM or SIGINT; a second one ends it at once."""
    with Terminal(config.job.total_steps) as terminal:
        learner = Learner(config, terminal, make_model)

        def on_signal(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            learner.stop(signal.Signals(number).name, hurried=True)

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        learner.run()


def evaluate(config: Config, make_model: MakeModel) -> None:
    """Plays greedily from the checkpoint and prints the returns."""
    saved = checkpoint.load(config.save_dir)
    if saved is None:
        raise ConfigError(f"no checkpoint in {config.save_dir}: give the --save-dir of a job")
    checkpoint.check_can_go_on(config, saved)
    model = make_model(config, make_env(config, 1), saved["parameters"])
    returns = play(config, model.best_actions)
    print(
        f"{config.job.env} after {saved['state']['steps']:,} steps: mean return "
        f"{returns.mean():.2f} of {len(returns)} games (deviation {returns.std():.2f}, least "
        f"{returns.min():g}, greatest {returns.max():g})"
    )


def run(make_model: MakeModel, prepare: Callable[[Config], None]) -> int:
    """The program, from its command line to its exit status. `prepare` sets the framework up."""
    config = parse()
    prepare(config)
    keep_freed_memory()
    try:
        (train if config.job.mode == "train" else evaluate)(config, make_model)
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (moolink.Error, FloatingPointError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
