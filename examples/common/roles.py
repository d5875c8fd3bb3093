"""Jobs whose processes have different roles: peer 0 is the learner, the others act for it.

All find one another through the broker by name, so any of them can be killed and started again. The
learner tells the others the end of the job in the way in which it tells them its weights: it
publishes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import moolink
from examples.common.environments import Environments
from examples.common.job import Job, Stopped
from examples.common.normalizer import THOUSANDTHS
from examples.common.options import OptionError, Options

GOODBYE = 10.0  # seconds for which the learner waits until all others know that the job is over


@dataclass
class RoleOptions(Options):
    """The options of learners whose actors are other processes. `--peer-index 0` is the learner."""

    timeout: float = 60.0
    """Seconds for which an actor that starts waits for the learner."""

    @property
    def is_learner(self) -> bool:
        return self.peer_index == 0

    @property
    def learner(self) -> str:
        """The learner's name at the broker, the same after a restart."""
        return f"{self.group_name}-learner"

    def validate(self) -> None:
        super().validate()
        if self.mode == "train" and self.connect is None:
            raise OptionError(
                "the learner and its actors are processes of one job: start them with `moolink run "
                "-n 3 -m ...`, or give each of them --connect, --group and --peer-index"
            )


def spaces_of(envs: Environments) -> tuple[spaces.Box, int]:
    """The space of the observations, and the number of actions.

    Raises:
        OptionError: observations have several parts, or actions are not Discrete.
    """
    if list(envs.observation_spaces) != ["obs"] or len(envs.actions.choices) != 1:
        raise OptionError("this learner takes one Box as observation and Discrete actions")
    return envs.observation_spaces["obs"], envs.actions.choices[0]


@contextlib.contextmanager
def connected(options: RoleOptions, name: str) -> Iterator[moolink.Rpc]:
    """A peer of this name that knows the others of the job through the broker."""
    with moolink.Rpc(name) as rpc:
        try:
            rpc.connect(options.broker())
        except ValueError as error:
            raise OptionError(f"--connect {options.connect}: {error}") from None
        yield rpc


class JobNews:
    """The learner's messages about the job to the others."""

    def __init__(self, news: moolink.Subscriber, timeout: float) -> None:
        """Raises moolink.TimeoutError: there is no learner."""
        self._news, self._latest = news, news.wait(timeout=timeout)

    def is_over(self) -> bool:
        """Whether the learner has ended the job."""
        return bool(self._news.wait().tree["over"])

    def wait_over(self) -> None:
        """Waits until it has."""
        while not self.is_over():
            self._latest = self._news.wait(self._latest.version + 1)


@contextlib.contextmanager
def follower(
    options: RoleOptions, name: str | None = None
) -> Iterator[tuple[moolink.Rpc, JobNews]]:
    """A peer that is not the learner, and the news of the job.

    Raises:
        moolink.TimeoutError: there is no learner.
    """
    with (
        connected(options, name or options.peer_name) as rpc,
        moolink.Subscriber(rpc, "job", options.learner) as news,
    ):
        yield rpc, JobNews(news, options.timeout)


class LearnerRun(Job):
    """The run of a learner that has actors. `with run.joined(...)` stands around its loop."""

    def __init__(self, options: RoleOptions) -> None:
        super().__init__(options)
        self.totals = {"steps": 0, **self.totals}
        self._model = self.version
        self._batch_size = 0

    def joined(self, rpc: moolink.Rpc, snapshot: Callable[[], dict[str, Any]]) -> Self:
        """`snapshot` returns `parameters` (by name) and `optimizer`, for a checkpoint."""
        self._rpc, self._snapshot = rpc, snapshot
        return self

    def __enter__(self) -> Self:
        self._told = moolink.Publisher(self._rpc, "job")
        self._told.publish({"over": False})
        self._start_files()
        now = time.monotonic()
        self._begin_to_learn(now)
        self._next_checkpoint = now + self.options.checkpoint_interval
        return super().__enter__()

    def is_over(self) -> bool:
        """Whether the job has ended. Ends the loop when a signal has come."""
        if self._signal is not None:
            raise Stopped
        return self._steps_are_done() or self._time_is_up()

    def waits(self, reason: object) -> None:
        """Says now and then why nothing is learned."""
        self.terminal.wait(str(reason))

    def learned(
        self,
        version: int,
        steps: int,
        returns: NDArray[np.floating[Any]],
        *,
        batch_size: int,
        gradient_norm: float | None = None,
        **metrics: Any,
    ) -> None:
        """Reports an update, and saves when it is time to.

        Args:
            version: of the weights now.
            steps: of environments that are new with it.
            returns: of the episodes that ended meanwhile, one-dimensional.
            batch_size: of the update.
            gradient_norm: of the update, before it was clipped.
            metrics: of the update, for the learning curve: scalars of any framework, which only
                a row of the curve waits for.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        if gradient_norm is not None and not np.isfinite(gradient_norm):
            raise FloatingPointError(f"the gradient of update {version} is not finite")
        self._model, self.metrics = version, metrics
        gained = int(np.rint(returns.astype(np.float64) * THOUSANDTHS).sum())
        for name, count in (
            ("steps", steps),
            ("episodes", len(returns)),
            ("return_thousandths", gained),
        ):
            self.totals = {**self.totals, name: self.totals.get(name, 0) + count}
        self._slide_window()
        self._batch_size, self._norm = batch_size, gradient_norm
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + self.options.log_interval
            self._log_update(now)
        self._save_when_due(now)

    def _model_version(self) -> int:
        return self._model

    def _steps_are_done(self) -> bool:
        return self.totals.get("steps", 0) >= self.options.total_steps

    def _log_last(self) -> None:
        if self.totals.get("steps", 0) > self._row_steps:
            self._log_update(time.monotonic())

    def _log_update(self, now: float) -> None:
        followers = len(self._told.acknowledged())
        self._log(
            now,
            f"{followers} follower{'' if followers == 1 else 's'}",
            True,
            contributors=followers,
            batch_size=self._batch_size,
            gradient_norm=self._norm,
        )

    def _leave(self) -> None:
        self._rpc.close()

    def _finish(self, hurried: bool) -> None:
        reason = "all steps are done" if self._steps_are_done() else "the time is up"
        self._log_last()
        self._save()
        self._say_end(self._signal or reason if hurried else reason, self._rpc.get_name())
        if not hurried:
            self._tell_end()
        self._write_results()

    def _tell_end(self) -> None:
        followers = len(self._told.acknowledged())
        version = self._told.publish({"over": True})
        try:
            self._told.wait_acknowledged(version, followers, timeout=GOODBYE)
        except moolink.TimeoutError as late:
            self.terminal.warn(f"{late}; the job is over")
