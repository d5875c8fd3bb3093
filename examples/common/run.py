"""One run of a learner: signals, progress, learning curve, checkpoints and the final result.

A run keeps no history that a newcomer would lack: it reports differences of the totals, which
all peers share. The group's leader writes the files; when it leaves, the next one goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import moolink
from examples.common import checkpoint
from examples.common.curve import LearningCurve
from examples.common.environments import Environments
from examples.common.memory import keep_freed_memory
from examples.common.normalizer import Normalizer
from examples.common.options import OptionError, Options, parse
from examples.common.progress import Terminal, process_start, progress_line

GATHERING_TIME = 10.0  # seconds that a new job waits for the number of peers it is meant for
THOUSANDTHS = 1000  # a round's counters are integers, so returns travel in thousandths
WINDOW = 100  # episodes whose mean return is reported


class Stopped(Exception):
    """A signal has told the run to end."""


class Episodes:
    """Episodes that this peer's environments finished and that are not yet reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._return = 0

    def column(self, num_envs: int) -> _Column:
        """A part that follows `num_envs` environments."""
        return _Column(self, num_envs)

    def add(self, returns: NDArray[np.float64]) -> None:
        with self._lock:
            self._count += len(returns)
            self._return += int(np.rint(returns * THOUSANDTHS).sum())

    def take(self) -> dict[str, int]:
        """What was finished since the last call, as counters of a contribution."""
        with self._lock:
            counters = {"episodes": self._count, "return_thousandths": self._return}
            self._count = self._return = 0
            return counters


class _Column:
    """Returns under way of one vector of environments."""

    def __init__(self, episodes: Episodes, num_envs: int) -> None:
        self._episodes = episodes
        self._running = np.zeros(num_envs)

    def add(self, reward: NDArray[np.float32], over: NDArray[np.bool_]) -> None:
        self._running += reward
        if over.any():
            self._episodes.add(self._running[over])
            self._running[over] = 0.0


class Run:
    """A run of a learner. `with run.joined(...)` stands around the training loop.

    Attributes:
        saved: the checkpoint to go on from, or None.
        version: of the model, to go on from.
        totals: sums of all counters of the job so far.
        normalizer: of observations and rewards.
        metrics: of the last contribution, for the learning curve; set by the loop.
        episodes: where the acting code counts what its environments finish.
    """

    def __init__(self, options: Options, envs: Environments) -> None:
        self.options = options
        self.normalizer = Normalizer(options, envs)
        self.started = process_start()
        self.terminal = Terminal(options.total_steps)
        self.curve = LearningCurve(options.run_dir)
        self.episodes = Episodes()
        self.saved = checkpoint.load(options.run_dir) if options.resume else None
        self.totals: Mapping[str, int] = {}
        self.version = 0
        if self.saved is not None:
            checkpoint.check_can_go_on(options, self.saved)
            # Why the job before ended is over and done with.
            self.totals = {k: v for k, v in self.saved["totals"].items() if k != "time_is_up"}
            self.version = self.saved["model_version"]
            self.load_state(self.saved["state"])
            at = f"at step {self.totals.get('steps', 0):,}"
            self.terminal.say(f"resumed from {options.run_dir / checkpoint.NAME} {at}")
        self._signal: str | None = None
        self._leads = self._gathered = False
        self._window: deque[tuple[int, int]] = deque([self._finished()])
        self._contributors: int | None = None  # fewest in a round since the row before
        self._row_steps, self._row_time = self.totals.get("steps", 0), self.started
        self._next_log = self._next_checkpoint = 0.0
        self.metrics: dict[str, float] = {}

    def joined(
        self, group: moolink.Group, accumulator: Any, snapshot: Callable[[], dict[str, Any]]
    ) -> Self:
        """Says who takes part. `snapshot` returns `parameters` (by name) and `optimizer`, for a
        checkpoint."""
        self._group, self._accumulator, self._snapshot = group, accumulator, snapshot
        self._ready = time.monotonic()
        return self

    def __enter__(self) -> Self:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number).name
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once

        self._handlers = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        self.terminal.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            if kind is None or kind is Stopped:
                self._finish(hurried=kind is Stopped)
        finally:
            self.terminal.__exit__()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        return kind is Stopped

    # What `accumulator.steps()` is given.

    def is_over(self, totals: Mapping[str, int]) -> bool:
        """For `until`: whether the job has ended, at the same round at every peer."""
        self.totals = totals
        done = totals.get("steps", 0) >= self.options.total_steps
        return done or totals.get("time_is_up", 0) > 0

    def idle(self) -> None:
        """For `idle`: ends the loop when a signal has come, and says why it waits."""
        if self._signal is not None:
            raise Stopped
        if not self._accumulator.connected():
            waiting = f"waiting for group {self._group.name()!r}"
            self.terminal.wait(self._group.waiting_for() or waiting)

    def state(self) -> dict[str, Any]:
        """For `state`: what newcomers need beside the model."""
        return {"normalizer": self.normalizer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """For `load_state`."""
        self.normalizer.load(state["normalizer"])

    # What the loop calls in each turn.

    def turn(self, step: Any) -> bool:
        """Reports and saves when it is time to. Returns whether the peers are complete: a new job
        waits for them for some seconds."""
        self.totals = step.totals
        self.idle()
        self.normalizer.exchange(self._group)
        now = time.monotonic()
        self._lead(self._accumulator.is_leader(), now)
        if step.stats is not None:
            contributors = len(set(step.stats["contributors"]))
            self._contributors = min(contributors, self._contributors or contributors)
            self._slide_window()
        if self._contributors is not None and now >= self._next_log:
            self._next_log = now + self.options.log_interval
            self.terminal.advance(self.totals["steps"], f"return {self.mean_return or 0.0:.2f}")
            if self._leads:
                self._log(step.stats, now)
        if self._leads and now >= self._next_checkpoint:
            self._next_checkpoint = now + self.options.checkpoint_interval
            self._save()
            self._write(self.curve.plot, self.options.env_id)
        return self._is_complete(step)

    def counters(self) -> dict[str, int]:
        """What each contribution counts beside its steps."""
        limit = self.options.max_seconds
        time_is_up = limit is not None and time.monotonic() - self.started > limit
        return {"time_is_up": int(time_is_up), **self.episodes.take()}

    def _finish(self, hurried: bool) -> None:
        """Says why and where the run ended, and leaves the results on the disk."""
        accumulator, leads = self._accumulator, self._leads
        time_is_up = self.totals.get("time_is_up", 0) > 0
        reason = "the time is up" if time_is_up else "all steps are done"
        if leads:
            if self._contributors is not None:
                self._slide_window()
                self._log(accumulator.get_gradient_stats(), time.monotonic())
            self._save()
        reason = self._signal if hurried else reason
        self.terminal.say(
            f"{reason} after {self.totals.get('steps', 0):,} steps; model "
            f"{checksum(self._snapshot()['parameters'])} at update {accumulator.model_version()} "
            f"on {self._group.rpc.get_name()}"
        )
        if leads and not hurried:
            self._write(self.curve.plot, self.options.env_id)
            self.terminal.say(f"learning curve: {self.curve.csv_path}, {self.curve.png_path}")
            self._write(self._write_result)
            self.curve.close()

    @property
    def mean_return(self) -> float | None:
        """Of the last episodes of the group; None before the first has ended."""
        episodes, returns = np.subtract(self._finished(), self._window[0]).tolist()
        return returns / THOUSANDTHS / episodes if episodes else None

    def _finished(self) -> tuple[int, int]:
        return self.totals.get("episodes", 0), self.totals.get("return_thousandths", 0)

    def _slide_window(self) -> None:
        if self._finished() != self._window[-1]:
            self._window.append(self._finished())
        while len(self._window) > 1 and self._window[-1][0] - self._window[1][0] >= WINDOW:
            self._window.popleft()

    def _is_complete(self, step: Any) -> bool:
        if not self._gathered:
            enough = len(self._group.members()) >= self.options.num_peers
            late = time.monotonic() > self._ready + GATHERING_TIME
            self._gathered = enough or late or step.totals.get("steps", 0) > 0
            if not self._gathered:
                self._accumulator.wait(0.1)
        return self._gathered

    def _lead(self, leads: bool, now: float) -> None:
        if leads and not self._leads:
            self._write(self.curve.start, self.totals.get("steps", 0), self.options)
            self._next_log = 0.0  # says at once that it learns
            self._next_checkpoint = now + self.options.checkpoint_interval
        self._leads = leads

    def _log(self, stats: Any, now: float) -> None:
        """Writes one row of the learning curve and says it in the terminal."""
        totals, options = self.totals, self.options
        steps = totals["steps"]
        episodes = totals.get("episodes", 0) - self._window[0][0]
        row = {
            "seconds": round(now - self.started, 2),
            "steps": steps,
            "updates": self._accumulator.model_version(),
            "episodes": episodes,
            "mean_return": self.mean_return,
            "steps_per_second": round((steps - self._row_steps) / (now - self._row_time), 1),
            "cpu_seconds": round(time.process_time(), 2),
            "contributors": self._contributors,
            "batch_size": stats["batch_size"],
            "learning_rate": options.rate(totals),
            "gradient_norm": stats["grad_norm"],
            **self.metrics,
        }
        self._write(self.curve.append, row)
        self.terminal.say(progress_line(row, options.total_steps, self._contributors or 1))
        self._row_steps, self._row_time, self._contributors = steps, now, None

    def _save(self) -> None:
        tree = {
            **to_numpy(self._snapshot()),
            "state": self.state(),
            "totals": dict(self.totals),
            "model_version": self._accumulator.model_version(),
            "options": self.options.as_dict(),
        }
        self._write(checkpoint.save, self.options.run_dir, tree)

    def _write_result(self) -> None:
        if self.options.result_json is None:
            return
        result = {
            "mean_return": self.mean_return,
            "steps": self.totals.get("steps", 0),
            "seconds": round(time.monotonic() - self.started, 2),
            "updates": self._accumulator.model_version(),
            "options": self.options.as_dict(),
        }
        self.options.result_json.parent.mkdir(parents=True, exist_ok=True)
        self.options.result_json.write_text(json.dumps(result, indent=2) + "\n")

    def _write(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls something that writes a file. A full disk is said and does not end the job."""
        try:
            function(*args)
        except (OSError, checkpoint.CheckpointError) as error:
            self.terminal.warn(f"{error}; the job goes on")


def checksum(arrays: Mapping[str, Any]) -> str:
    """Of the bits of parameters and buffers: peers in step print the same one."""
    digest = hashlib.sha256()
    for name in sorted(arrays):  # each framework has an order of its own
        digest.update(np.ascontiguousarray(to_numpy(arrays[name])).tobytes())
    return digest.hexdigest()[:16]


def to_numpy(tree: Any) -> Any:
    """The tree with its tensors as numpy arrays, as checkpoints hold them."""
    if isinstance(tree, dict):
        return {key: to_numpy(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(to_numpy, tree))
    tree = tree.cpu() if hasattr(tree, "cpu") else tree  # a tensor of torch on any device
    return np.asarray(tree) if hasattr(tree, "__array__") else tree


Kind = TypeVar("Kind", bound=Options)


def main(kind: type[Kind], train: Callable[[Kind], None], evaluate: Callable[[Kind], None]) -> int:
    """The program, from its command line to its exit status."""
    options = parse(kind)  # type: ignore[type-var]
    keep_freed_memory()
    try:
        (train if options.mode == "train" else evaluate)(options)
    except (OptionError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        hint = f"lower --learning-rate and go on from the checkpoint in {options.run_dir}"
        print(f"error: FloatingPointError: {error}; {hint}", file=sys.stderr)
        return 1
    except moolink.Error as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


@contextlib.contextmanager
def make_group(options: Options) -> Iterator[tuple[moolink.Group, Callable[[], None]]]:
    """The peer's group, and what connects it to the broker: called once the accumulator has the
    version of a checkpoint, for the group begins at it. Without `--connect` the broker is here."""
    broker = moolink.Broker(first=True) if options.connect is None else None
    address = options.connect or broker.listen("127.0.0.1:0")[0]
    rpc = moolink.Rpc(options.peer_name)
    group = moolink.Group(rpc, options.group_name)

    def connect() -> None:
        try:
            rpc.connect(address)
        except ValueError as error:
            raise OptionError(f"--connect {address}: {error}") from None

    try:
        yield group, connect
    finally:
        group.close()
        rpc.close()
        if broker is not None:
            broker.close()
