"""The base of `Run`: the leader's files, the members' shared state, and the log of rounds."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import moolink
from examples.common.checksums import Checksums
from examples.common.environments import Environments
from examples.common.job import Job, Stopped
from examples.common.normalizer import Episodes, Normalizer
from examples.common.options import GroupOptions, OptionError

GATHERING_TIME = 10.0  # seconds that a new job waits for the number of peers it is meant for


class PeerJob(Job):
    """The base of `Run`, which is the interface for learners."""

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
        self._group: moolink.Group
        self._accumulator: Any
        self._ready = 0.0  # when the peer was ready to learn
        self._leads = self._gathered = self._is_introduced = False
        self._checksums: Checksums | None = None  # of a repeatable run that this peer leads
        self._version = -1  # of the last turn
        self._members = 1  # at the last turn: in the end some have left
        self._contributors: int | None = None  # fewest in a round since the row before

    def _is_over(self, totals: Mapping[str, int]) -> bool:
        self.totals = totals
        done = totals.get("steps", 0) >= self.options.total_steps
        return done or totals.get("time_is_up", 0) > 0

    # Arguments of `accumulator.steps()`.

    def idle(self) -> None:
        """For `idle`: ends the loop when a signal has come, and says why it waits."""
        if self._signal is not None:
            raise Stopped
        if not self._accumulator.connected():
            waiting = f"waiting for group {self._group.name()!r}"
            self.terminal.wait(self._group.waiting_for() or waiting)

    def state(self) -> dict[str, Any]:
        """For `state`: the state that every member gets from the leader beside the model."""
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
