"""One peer's run of a learner whose peers reduce their gradients through a group.

A run keeps no history that a newcomer would lack: it reports differences of the totals, which
all peers share. The group's leader writes the files; when it leaves, the next one goes on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import moolink
from examples.common.job import Left, end_process
from examples.common.memory import keep_freed_memory
from examples.common.options import OptionError, Options, parse
from examples.common.peer_job import PeerJob


class Run(PeerJob):
    """A run of a learner: `Run(options, envs)`. `with run.joined(...)` stands around the training
    loop, in which `turn` and `counters` are called. `envs` are those whose observations are
    normalized; None if the options turn normalization off.

    Attributes:
        saved: the checkpoint to go on from, or None.
        metrics: scalars of the last contribution; set by the loop. Each has a
            column in the learning curve.
        normalizer: of observations and rewards.
        episodes: where the acting code counts finished episodes.
    """

    def joined(
        self, group: moolink.Group, accumulator: Any, snapshot: Callable[[], dict[str, Any]]
    ) -> Self:
        """Begins with these. `snapshot` returns `parameters` (by name) and `optimizer`, for a
        checkpoint."""
        self._group, self._accumulator, self._snapshot = group, accumulator, snapshot
        self._ready = time.monotonic()
        return self

    def begin(self, connect: Callable[[], None]) -> None:
        """Gives the accumulator the job's settings, and connects the peer to the broker."""
        if not self._is_repeatable:  # else a round is a contribution of each unit
            self._accumulator.set_virtual_batch_size(self.options.round_size)
        self._accumulator.set_parallel_gradients(self.options.parallel_gradients)
        self._accumulator.set_model_version(self.version)
        connect()

    def callbacks(self) -> dict[str, Any]:
        """Arguments of `accumulator.steps()`: the job's end, its totals, the state that every
        member gets from the leader beside the model, and `idle`, called while the loop waits."""
        return {
            "until": self.is_over,
            "totals": self.totals,
            "state": self.state,
            "load_state": self.load_state,
            "idle": self.idle,
        }

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

    def counters(self) -> dict[str, int]:
        """The counters of each contribution beside its steps."""
        return {"time_is_up": int(self._time_is_up()), **self.episodes.take()}


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
