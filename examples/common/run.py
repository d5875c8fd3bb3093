"""One peer's run of a learner whose peers reduce their gradients through a group.

A run keeps no history that a newcomer would lack: it reports differences of the totals, which
all peers share. The group's leader writes the files; when it leaves, the next one goes on.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import moolink
from examples.common.checksums import Checksums
from examples.common.environments import Environments
from examples.common.job import THOUSANDTHS, Job, Left, Stopped, end_process
from examples.common.memory import keep_freed_memory
from examples.common.normalizer import Normalizer
from examples.common.options import GroupOptions, OptionError, Options, parse

GATHERING_TIME = 10.0  # seconds that a new job waits for the number of peers it is meant for


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

    def give(self, counters: Mapping[str, int]) -> None:
        """Adds the counters that `take` of another has returned."""
        with self._lock:
            self._count += counters["episodes"]
            self._return += counters["return_thousandths"]

    def take(self) -> dict[str, int]:
        """The episodes finished since the last call, as counters of a contribution."""
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


class Run(Job):
    """A run of a learner. `with run.joined(...)` stands around the training loop.

    Args:
        envs: the environments whose observations are normalised; may be None if the options turn
            normalisation off.

    Attributes:
        normalizer: of observations and rewards.
        episodes: where the acting code counts finished episodes.
    """

    def __init__(self, options: GroupOptions, envs: Environments | None) -> None:
        super().__init__(options)
        self.options: GroupOptions = options
        self._is_repeatable: bool = getattr(options, "deterministic", False)
        self.normalizer = Normalizer(options, envs)
        self.episodes = Episodes()
        # For `until`: whether the job has ended, at the same round at every peer.
        self.is_over = functools.partial(self._is_over)
        self.is_over.target = {"steps": options.total_steps}  # the dashboard shows the time left
        if self.saved is not None:
            self.normalizer.load(self.saved["state"]["normalizer"])
        # A repeatable run begins with all of its peers also after a checkpoint.
        self._begun_at = self.totals.get("steps", 0) if self._is_repeatable else 0
        self._leads = self._gathered = self._is_introduced = False
        self._checksums: Checksums | None = None  # of a repeatable run that this peer leads
        self._version = -1  # of the last turn
        self._members = 1  # at the last turn: in the end some have left
        self._contributors: int | None = None  # fewest in a round since the row before

    def joined(
        self, group: moolink.Group, accumulator: Any, snapshot: Callable[[], dict[str, Any]]
    ) -> Self:
        """Begins with these. `snapshot` returns `parameters` (by name) and `optimizer`, for a
        checkpoint."""
        self._group, self._accumulator, self._snapshot = group, accumulator, snapshot
        self._ready = time.monotonic()
        return self

    # Arguments of `accumulator.steps()`.

    def _is_over(self, totals: Mapping[str, int]) -> bool:
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
        """For `state`: what every member gets from the leader beside the model."""
        job = {
            "folder": self.folder.for_others(),
            "seconds": self.seconds,
            "round_size": self.options.round_size,
            "parallel_gradients": self.options.parallel_gradients,
        }
        return {**self._kept_state(), "job": job}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """For `load_state`."""
        self.normalizer.load(state["normalizer"])
        job = state["job"]
        self.folder.told(job["folder"])
        self._origin = time.monotonic() - job["seconds"]
        self._take_settings(job["round_size"], job["parallel_gradients"])

    def _take_settings(self, round_size: int, parallel_gradients: int) -> None:
        """Takes the job's, which `--num-peers` or other options of this peer may not fit."""
        options = self.options
        if round_size != options.round_size:
            if self._is_repeatable:
                raise OptionError(
                    f"the group has rounds of {round_size}, and this peer of {options.round_size}: "
                    "give the --batch-size of the others"
                )
            self.terminal.say(f"rounds of {round_size} as in the group, not {options.round_size}")
            options.virtual_batch_size = round_size
            self._accumulator.set_virtual_batch_size(round_size)
        if parallel_gradients != options.parallel_gradients:
            options.parallel_gradients = parallel_gradients
            self._accumulator.set_parallel_gradients(parallel_gradients)

    def _kept_state(self) -> dict[str, Any]:
        return {"normalizer": self.normalizer.state()}

    # Called by the loop in each turn.

    def turn(self, step: Any) -> bool:
        """Reports and saves when it is time to. Returns whether the peers are complete: a new job
        waits for them for some seconds, a repeatable one without a limit."""
        self.totals = step.totals
        self.idle()
        if not self._is_repeatable:
            self.normalizer.exchange(self._group)
        now = time.monotonic()
        self._lead(self._accumulator.is_leader(), now)
        if step.stats is not None:
            contributors = len(set(step.stats["contributors"]))
            self._contributors = min(contributors, self._contributors or contributors)
            self._slide_window()
        self._members = max(1, len(self._group.members()))
        if self._contributors is not None and now >= self._next_log:
            self._next_log = now + self.options.log_interval
            self._log_round(step.stats, now)
        if self._leads:
            self._save_when_due(now)
        if not self._is_complete(step):
            return False
        self._begin_to_learn(now)
        if self._is_repeatable and step.version != self._version:
            self._version = step.version
            self._begin_round(step)
        return True

    def _begin_round(self, step: Any) -> None:
        """Begins a round of a repeatable run: each peer does this at the same version."""
        o: Any = self.options
        self._note_checksum()
        if step.stats is not None and step.stats.get("moved_units"):
            self.terminal.say(f"this run cannot be repeated from round {step.version} on")
        # Else some would wait for one that does not exchange: it has no unit, or is new and has
        # applied no round.
        taking_part = set() if step.stats is None else set(step.stats["contributors"])
        are_all = taking_part == set(self._group.members())
        if self.normalizer.is_used and are_all and step.version % o.parts == 1 % o.parts:
            self.normalizer.exchange_in_order(self._group, f"normalizer {step.version}")

    def _note_checksum(self) -> None:
        if self._leads and self._checksums is not None:
            parameters = self._snapshot()["parameters"]
            self._write(self._checksums.note, self._model_version(), parameters)

    def counters(self) -> dict[str, int]:
        """The counters of each contribution beside its steps."""
        return {"time_is_up": int(self._time_is_up()), **self.episodes.take()}

    def _model_version(self) -> int:
        return int(self._accumulator.model_version())

    def _has_news(self) -> bool:
        return self._leads and super()._has_news()

    def _leave(self) -> None:
        self._group.close()

    def _finish(self, hurried: bool) -> None:
        if self._leads:
            self._log_last()  # not later: the next leader writes the rows after it
        if hurried:
            self._leave()  # before the checkpoint: the others wait for this peer
        time_is_up = self.totals.get("time_is_up", 0) > 0
        reason = "the time is up" if time_is_up else "all steps are done"
        if self._leads:
            self._save()
        self._note_checksum()
        self._say_end(self._signal or reason if hurried else reason, self._group.rpc.get_name())
        if self._leads:
            self._write_results()

    def _is_complete(self, step: Any) -> bool:
        if not self._gathered:
            enough = len(self._group.members()) >= self.options.num_peers
            late = time.monotonic() > self._ready + GATHERING_TIME and not self._is_repeatable
            self._gathered = enough or late or step.totals.get("steps", 0) > self._begun_at
            if not self._gathered:
                self.terminal.wait(f"waiting for {self.options.num_peers} peers")
                self._accumulator.wait(0.1)
        return self._gathered

    def _lead(self, leads: bool, now: float) -> None:
        if not leads and not self._is_introduced and (steps := self.totals.get("steps", 0)):
            self.terminal.say(f"joined the job at step {steps:,}")
        self._is_introduced = True
        if leads and not self._leads:
            self._start_files()
            if self._is_repeatable:
                self._write(self._start_checksums)
            self._next_log = 0.0  # says at once that it learns
            self._next_checkpoint = now + self.options.checkpoint_interval
        self._leads = leads

    def _start_checksums(self) -> None:
        self._checksums = Checksums(self.folder.make(), self._model_version())

    def _log_last(self) -> None:
        stats = self._accumulator.get_gradient_stats()
        if self.totals.get("steps", 0) > self._row_steps and stats["contributors"]:
            self._contributors = self._contributors or len(set(stats["contributors"]))
            self._slide_window()
            self._log_round(stats, time.monotonic())

    def _log_round(self, stats: Any, now: float) -> None:
        self._log(
            now,
            f"{self._members} peer{'s' if self._members > 1 else ''}",
            self._leads,
            contributors=self._contributors,
            batch_size=stats["batch_size"],
            gradient_norm=stats["grad_norm"],
        )
        self._contributors = None


Kind = TypeVar("Kind", bound=Options)


def main(kind: type[Kind], train: Callable[[Kind], None], evaluate: Callable[[Kind], None]) -> int:
    """The program, from its command line to its exit status."""
    options = parse(kind)  # type: ignore[type-var]
    keep_freed_memory()
    try:
        (train if options.mode == "train" else evaluate)(options)
    except (OptionError, moolink.FileError) as error:
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
    except Left as left:
        end_process(left.status)
    return 0


@contextlib.contextmanager
def make_group(options: Options) -> Iterator[tuple[moolink.Group, Callable[[], None]]]:
    """The peer's group, and what connects it to the broker: called once the accumulator has the
    version of a checkpoint, for the group begins at it."""
    address = options.broker()
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
