"""A learner's job: signals, progress, learning curve, checkpoints, final result."""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn, Self

import numpy as np

import moolink
from examples.common import checkpoint, curve
from examples.common.curve import LearningCurve
from examples.common.environments import rules_of, said_rules
from examples.common.folder import RunFolder
from examples.common.normalizer import THOUSANDTHS
from examples.common.options import Options
from examples.common.progress import Terminal, process_start, progress_line
from moolink import files
from moolink.launch import place

WINDOW = 100  # episodes whose mean return is reported
TURN_TIMEOUT = 0.5  # seconds in which the training loop must reach its next turn after a signal
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(Exception):
    """A signal has told the job to end."""


class Left(SystemExit):
    """Everything is closed after a signal: the process can end with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Job(abc.ABC):
    """The base of a peer's `Run` and of a learner's. It is a context around the training loop.

    Attributes:
        saved: the checkpoint to go on from, or None.
        version: of the model, to go on from.
        totals: sums of all counters of the job so far: `steps`, `episodes`, `return_thousandths`.
        metrics: of the last contribution; set by the loop. Each has a column in
            the learning curve.
    """

    def __init__(self, options: Options) -> None:
        """Makes and changes no file.

        Raises:
            OptionError, moolink.FileError: as RunFolder; or a package is not installed.
        """
        curve.check(options)
        self.options = options
        self.folder = RunFolder(options)
        self.saved = self.folder.saved
        self.started = process_start()
        self._origin = self.started  # of the column `seconds`
        self._learns_since: float | None = None
        self.terminal = Terminal(options.total_steps)
        self.terminal.say(said_rules(options))
        self.totals: Mapping[str, int] = {}
        self.version = 0
        if self.saved is not None:
            # Why the job before ended is over and done with.
            self.totals = {k: v for k, v in self.saved["totals"].items() if k != "time_is_up"}
            self.version = self.saved["model_version"]
            self._origin -= self.saved.get("seconds", 0.0)
        self._signal: str | None = None
        self._kept_steps = self.totals.get("steps", 0)  # of the newest checkpoint
        self._ending = threading.Lock()  # the thread that ends the process never releases it
        self._window: deque[tuple[int, int]] = deque([self._finished()])
        self._row_steps, self._row_time = self.totals.get("steps", 0), self.started
        self._next_log = self._next_checkpoint = 0.0
        self._snapshot: Callable[[], dict[str, Any]]
        self.curve: LearningCurve  # of the process that leads
        # Scalars of any framework. A row of the curve converts them: no turn waits for a device.
        self.metrics: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signal = signal.Signals(number).name
            if number == signal.SIGINT:  # Slurm sends SIGTERM more than once
                signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once

        # A signal that is ignored, as under nohup or in a script's background, stays so.
        ending = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, on_signal) for number in ending}
        read, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        self.terminal.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._ending.acquire()  # waits for ever if the thread ends the process
        try:
            if kind is None or kind is Stopped:
                self._finish(hurried=kind is Stopped)
        finally:
            self.terminal.__exit__()
            signal.set_wakeup_fd(self._old_wakeup)
            os.close(self._write_fd)  # the thread ends
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if kind is Stopped:
            assert self._signal is not None
            raise Left(_status(signal.Signals[self._signal]))

    def _watch(self, read_fd: int) -> None:
        """Ends the process after a signal if the main thread does not reach its next turn.

        While JAX compiles, Python runs no signal handler. The thread waits while this process has
        unsaved progress; a job that has just begun has none.
        """
        with open(read_fd, "rb", buffering=0) as pipe:
            while (byte := pipe.read(1)) and byte[0] not in ENDING:
                pass
        if not byte:
            return
        time.sleep(TURN_TIMEOUT)
        while self._has_news():
            time.sleep(TURN_TIMEOUT)
        if not self._ending.acquire(blocking=False):
            return
        number = signal.Signals(byte[0])
        self._leave()
        self.terminal.say(f"{number.name} after {self.totals.get('steps', 0):,} steps")
        self.terminal.__exit__()
        end_process(_status(number))

    @property
    def mean_return(self) -> float | None:
        """Of the last episodes of the job; None before the first has ended."""
        episodes, returns = np.subtract(self._finished(), self._window[0]).tolist()
        return returns / THOUSANDTHS / episodes if episodes else None

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between its jobs."""
        return time.monotonic() - self._origin

    def _begin_to_learn(self, now: float) -> None:
        """Called at least once when all is there that learning needs."""
        if self._learns_since is None:
            self._learns_since = self._row_time = now

    def _time_is_up(self) -> bool:
        limit, since = self.options.max_seconds, self._learns_since
        return limit is not None and since is not None and time.monotonic() - since > limit

    # Overridden by kinds of jobs.

    def _kept_state(self) -> dict[str, Any]:
        """A checkpoint's content beside the model."""
        return {}

    @abc.abstractmethod
    def _log_last(self) -> None:
        """Writes a row of what was learned since the row before, if anything was."""

    def _has_news(self) -> bool:
        """Whether this process has unsaved progress that no other process will save."""
        return self.totals.get("steps", 0) > self._kept_steps

    @abc.abstractmethod
    def _leave(self) -> None:
        """Tells the others that this process ends."""

    @abc.abstractmethod
    def _finish(self, hurried: bool) -> None:
        """Says why and where the job ended, and leaves the results on the disk."""

    @abc.abstractmethod
    def _model_version(self) -> int:
        """The version of the model now."""

    # Reports.

    def _finished(self) -> tuple[int, int]:
        return self.totals.get("episodes", 0), self.totals.get("return_thousandths", 0)

    def _slide_window(self) -> None:
        if self._finished() != self._window[-1]:
            self._window.append(self._finished())
        while len(self._window) > 1 and self._window[-1][0] - self._window[1][0] >= WINDOW:
            self._window.popleft()

    def _start_files(self) -> None:
        """Called by the process that leads, when it begins to."""
        steps = self.totals.get("steps", 0)
        self.terminal.say(self.folder.begins(steps))
        self.curve = LearningCurve(self.folder.make())
        self._write(self.curve.start, steps, self.options)
        self._write(self.folder.write_options)

    def _log(self, now: float, of_whom: str, leads: bool, **columns: Any) -> None:
        """Says a row of the learning curve in the terminal; the process that leads writes it."""
        totals, options = self.totals, self.options
        steps = totals["steps"]
        rate = (steps - self._row_steps) / max(1e-9, now - self._row_time)
        row = {
            "seconds": round(self.seconds, 2),
            "steps": steps,
            "updates": self._model_version(),
            "episodes": totals.get("episodes", 0) - self._window[0][0],
            "mean_return": self.mean_return,
            "steps_per_second": round(rate, 1),
            "cpu_seconds": round(time.process_time(), 2),
            "learning_rate": options.rate(totals),
            **columns,
        }
        if taken := row.keys() & self.metrics.keys():
            raise ValueError(f"a metric has the name of a column of the job: {sorted(taken)[0]!r}")
        row |= {name: float(x) for name, x in self.metrics.items()}
        if leads:
            self._write(self.curve.append, row)
        left = self._seconds_left(now, steps, rate)
        line = progress_line(row, options.total_steps, of_whom, left)
        self.terminal.progress(steps, line, leads=leads)
        if self.mean_return is not None:
            moolink.metrics.gauge("mean_return", "Of the last episodes.").set(self.mean_return)
        self._row_steps, self._row_time = steps, now

    def _seconds_left(self, now: float, steps: int, rate: float) -> float:
        since = now if self._learns_since is None else self._learns_since
        # The first rounds say nothing of the speed.
        knows_rate = rate > 0 and now - since > min(1.0, self.options.log_interval)
        left = (self.options.total_steps - steps) / rate if knows_rate else math.inf
        limit = self.options.max_seconds
        return left if limit is None else min(left, since + limit - now)

    # Files.

    def _save(self) -> None:
        tree = {
            **to_numpy(self._snapshot()),
            "state": self._kept_state(),
            "totals": dict(self.totals),
            "seconds": self.seconds,
            "model_version": self._model_version(),
            "options": self.options.as_dict(),
            "environment": rules_of(self.options),
        }
        self._write(checkpoint.save, self.folder.make(), tree)
        self._kept_steps = tree["totals"].get("steps", 0)

    def _save_when_due(self, now: float) -> None:
        if now >= self._next_checkpoint:
            self._next_checkpoint = now + self.options.checkpoint_interval
            self._log_last()
            self._save()
            self._write(self.curve.plot, self.options.env_id)

    def _say_end(self, reason: str, name: str) -> None:
        self.terminal.say(
            f"{reason} after {self.totals.get('steps', 0):,} steps; model "
            f"{checksum(self._snapshot()['parameters'])} at update {self._model_version()} "
            f"on {name}"
        )

    def _write_results(self) -> None:
        """After the checkpoint, which matters more where there is little time."""
        self._write(self.curve.plot, self.options.env_id)
        self.terminal.say(f"learning curve: {self.curve.csv_path} and .png")
        self._write(self._write_json)
        self.curve.close()

    def _write_json(self) -> None:
        if self.options.result_json is None:
            return
        result = {
            "mean_return": self.mean_return,
            "steps": self.totals.get("steps", 0),
            "seconds": round(self.seconds, 2),
            "updates": self._model_version(),
            "options": self.options.as_dict(),
            "environment": rules_of(self.options),
        }
        self.options.result_json.parent.mkdir(parents=True, exist_ok=True)
        with files.written(self.options.result_json) as file:
            file.write((json.dumps(result, indent=2) + "\n").encode())

    def _write(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls something that writes a file. A full disk is said and does not end the job."""
        try:
            function(*args)
        except (OSError, moolink.FileError) as error:
            self.terminal.warn(f"{error}; the job goes on")


def end_process(status: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown: torch and JAX need seconds for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(number: signal.Signals) -> int:
    """The exit status after a signal. In Slurm, the job's script requeues the job if it sees it."""
    return 128 + number if place().source == "slurm" else 0


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
