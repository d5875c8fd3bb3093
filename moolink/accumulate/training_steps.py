"""A training loop as an iterator, so that users need not poll an accumulator."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

from moolink.accumulate.checkpoints import Checkpoint
from moolink.accumulate.left_out_rounds import checked_carried
from moolink.accumulate.parting import leave_together, take_news
from moolink.accumulate.totals import Means, Totals, with_means
from moolink.internal import logs
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics.run_log import RunLog

if TYPE_CHECKING:
    from moolink.accumulate import AccumulatorBase
    from moolink.reports import GradientStats


LONGEST_WAIT = 1.0  # seconds of one wait for a change; the accumulator ends it early
IDLE = 0.2  # the same where the user's `idle` is called
MARK = "moolink.training_steps"  # of the states that these loops send

Until = Callable[[Totals], bool] | Mapping[str, int]
"""When a loop ends: a function of the totals, or totals of which one has to be reached. A function
may have such totals as its attribute ``target``, for the dashboard."""

FEW_ROUNDS = 10  # rounds, after which a counter that no round had is probably misspelt


@names_keywords
class TrainingStep:
    """One turn: the parameters are those of ``version``, and gradients of them are wanted.

    Attributes:
        version: the model's version, the number of rounds that led to it.
        totals: sums of all counters over all rounds of the job; equal at every member. A counter
            that no round had is 0.
        stats: of the round applied last (``get_gradient_stats()``), here or, after a resume, in the
            checkpoint; None before the first.
        unit: with the accumulator's ``units``, the unit that the turn computes; else None.
    """

    _run_log: RunLog | None = None

    def __init__(
        self, accumulator: AccumulatorBase, totals: Totals, stats: GradientStats | None
    ) -> None:
        self._accumulator = accumulator
        self._reduced = False
        self.version = accumulator.model_version()
        self.unit = accumulator.unit
        self.totals = totals
        self.stats = stats

    def reduce(
        self,
        batch_size: int,
        counters: Mapping[str, int] | None = None,
        means: Means | None = None,
    ) -> None:
        """Contributes the gradients, once a turn; as the accumulator's ``reduce_gradients``.

        Args:
            batch_size: the weight of this contribution in the mean of the gradients, at least 1.
            counters: integers summed exactly over the round's contributions.
            means: numbers, or iterables of any number of numbers, of which ``totals.mean(name)`` is
                the mean over all contributions.

        Raises:
            ValueError: a counter's name ends as those do that means travel as, such as
                "loss (count)".
            RuntimeError: it was already called in this turn, or the turn is over, because the
                parameters are of a later version, or its unit has moved to another member.
        """
        self._require_first("reduce")
        if self.unit is not None and self._accumulator.unit not in (self.unit, None):
            raise RuntimeError(
                f"reduce was called for unit {self.unit}, which has moved to another member: "
                "group.update() was called within the turn, and the membership had changed"
            )
        self._accumulator.reduce_gradients(batch_size, with_means(counters, means))
        self._reduced = True

    def log(self, values: Mapping[str, SupportsFloat | None] | None = None) -> None:
        """Writes a row to the log that ``steps(log=...)`` names, at the leader; other members write
        nothing. The row has the version, the totals, the means over the rounds since the row
        before, and these values.

        Raises:
            RuntimeError: ``steps()`` was called without ``log=``.
            ValueError: two columns would have one name, for example "version", or a counter's.
        """
        if self._run_log is None:
            raise RuntimeError('step.log() needs a place: steps(..., log="runs/name")')
        if self._accumulator.is_leader():
            self._run_log.write(self.version, self.totals, values)

    def _require_first(self, method: str) -> None:
        self._require_current(method)
        if self._reduced:
            raise RuntimeError(
                f"step.{method}() was called in a turn that has contributed before: add up the "
                "gradients of all of the turn's losses first, and contribute once"
            )

    def skip(self, counters: Mapping[str, int] | None = None) -> None:
        """Contributes counters only; as the accumulator's ``skip_gradients``. Never needed."""
        self._require_current("skip")
        self._accumulator.skip_gradients(with_means(counters, None))

    def _require_current(self, method: str) -> None:
        version = self._accumulator.model_version()
        if version != self.version:
            raise RuntimeError(
                f"{method} was called for a turn of version {self.version} that is over: the "
                f"parameters are of version {version}"
            )


@dataclasses.dataclass(frozen=True)
class OwnState:
    """An adapter's state in a loop, which travels with the user's as its ``"users"``."""

    install: Callable[[Any], None]
    """Takes what ``LoopOptions.state`` returned at another peer, but for the user's part."""
    keep: Callable[[], Callable[[], None]]
    """Returns a function that brings back the state as it is now."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The arguments of ``training_steps`` and ``steps``, which are documented there."""

    state: Callable[[], Any] | None
    load_state: Callable[[Any], None] | None
    until: Until | None
    totals: Mapping[str, int] | None
    idle: Callable[[], None] | None
    checkpoint: str | os.PathLike[str] | None
    every: float
    log: str | os.PathLike[str] | RunLog | None
    own: OwnState | None = None


@dataclasses.dataclass
class Progress:
    """How far an accumulator's loops have come: each goes on from the one before."""

    totals: Totals
    rounds: int = 0  # in the totals, beside those that the user gave
    stats: GradientStats | None = None
    run: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    """Names the run, from its first leader on: its checkpoints have it."""


def training_steps(
    accumulator: AccumulatorBase, apply: Callable[[Totals], None], options: LoopOptions
) -> Iterator[Any]:
    """See :meth:`moolink.accumulate.AccumulatorBase.training_steps`; ``apply`` gets the totals
    before each round."""
    return _Loop(accumulator, apply, options).turns()


class _Loop:
    """One loop. It reads its checkpoint when it is made, and begins with the first turn."""

    def __init__(
        self, accumulator: AccumulatorBase, apply: Callable[[Totals], None], options: LoopOptions
    ) -> None:
        self._accumulator = accumulator
        self._apply = apply
        self._options = options
        self._told_of_counters = False
        self._target = _target(options.until)
        self._until = (
            _reaches(self._target) if isinstance(options.until, Mapping) else options.until
        )
        log = options.log
        self._log = log if log is None or isinstance(log, RunLog) else RunLog(log)
        self._checkpoint: Checkpoint | None = None
        if options.checkpoint is not None and options.totals is not None:
            raise ValueError(
                "checkpoint= and totals= contradict each other: a checkpoint has the totals with "
                "which the counters go on"
            )
        if options.checkpoint is not None and not accumulator.is_observer():
            self._checkpoint = Checkpoint(accumulator, options.checkpoint, options.every)
            if accumulator._progress is None and (saved := self._checkpoint.read()) is not None:
                self._resume(self._checkpoint, saved)

    def turns(self) -> Iterator[Any]:
        accumulator, options = self._accumulator, self._options
        if options.totals is not None or accumulator._progress is None:
            accumulator._progress = Progress(Totals(options.totals))
        over, is_asked = False, False  # until() about the totals of the beginning
        accumulator._rounds.is_over = False
        accumulator._rounds.target = self._target
        if self._until is not None:
            accumulator._parting.expect_end()
        while True:
            accumulator._rounds.totals = self._progress.totals
            accumulator._group.update()
            if over and leave_together(accumulator, self._captured, options.idle):
                accumulator._rounds.is_over = True
                if self._checkpoint is not None and accumulator.is_leader():
                    self._checkpoint.save(self._progress.run, self._rest)
                return
            was_connected = accumulator.connected()
            take_news(accumulator.update)
            if accumulator.wants_state():
                accumulator.set_state(self._captured())
            if has_state := accumulator.has_new_state():
                self._take_state(accumulator.state())
            if has_round := accumulator.has_gradients():
                self._apply_round()
            changed = has_state or has_round
            begins = was_connected and not is_asked  # its parameters are the group's
            is_asked = is_asked or begins or changed
            if not is_asked and accumulator.connected():
                continue
            if over := (changed or begins) and self._is_over():
                continue
            if self._checkpoint is not None:
                self._checkpoint.save_if_due(self._progress.run, self._rest)
            if accumulator.wants_gradients() or (changed and accumulator.is_observer()):
                yield self._step()
            elif not changed:
                _wait(accumulator, LONGEST_WAIT, options.idle)

    @property
    def _progress(self) -> Progress:
        assert self._accumulator._progress is not None
        return self._accumulator._progress

    def _step(self) -> Any:
        progress = self._progress
        step = self._accumulator._kind_of_step(self._accumulator, progress.totals, progress.stats)
        step._run_log = self._log
        return step

    def _captured(self) -> dict[str, Any]:
        progress, state = self._progress, self._options.state
        users = None if state is None else state()
        return {
            MARK: progress.rounds,
            "run": progress.run,
            "totals": dict(progress.totals),
            "state": users,
        }

    def _take_state(self, received: Any) -> None:
        if not _is_whole(received):
            return
        self._install(received)
        progress = self._progress
        progress.rounds, progress.totals = received[MARK], Totals(received["totals"])
        progress.run = received.get("run", progress.run)
        self._load_users(received)

    def _install(self, received: dict[str, Any]) -> None:
        if self._options.own is not None:
            self._options.own.install(received["state"])

    def _load_users(self, received: dict[str, Any]) -> None:
        if self._options.load_state is not None:
            state = received["state"]
            self._options.load_state(state if self._options.own is None else state["users"])

    def _apply_round(self) -> None:
        accumulator, progress = self._accumulator, self._progress
        progress.stats = accumulator.get_gradient_stats()
        self._apply(progress.totals)
        accumulator.zero_gradients()
        totals = Totals(progress.totals)  # a step that was given out keeps its own
        for name, value in progress.stats["counters"].items():
            totals[name] = totals.get(name, 0) + value
        progress.totals = totals
        progress.rounds += 1

    def _is_over(self) -> bool:
        totals, rounds = self._progress.totals, self._progress.rounds
        # Before the first round there are no totals to ask about.
        if self._until is None or not (rounds or totals):
            return False
        totals.missed.clear()
        over = self._until(totals)
        if not over and totals.missed and rounds >= FEW_ROUNDS and not self._told_of_counters:
            self._told_of_counters = True
            _tell_of_missed(totals, rounds)
        return over

    def _resume(self, checkpoint: Checkpoint, saved: dict[str, Any]) -> None:
        """Takes over a checkpoint, whole or not at all, and then lets the user load the rest."""
        accumulator, own = self._accumulator, self._options.own
        bring_back = None if own is None else own.keep()
        with checkpoint.refusing():
            loop, stats = saved["rest"]["loop"], saved["rest"]["stats"]
            version = integer_of(saved["version"], "version", 0)
            carried = checked_carried(*saved["carried"])
            if loop is None or not _is_whole(loop):
                raise TypeError("it has no state of a loop")
            try:
                self._install(loop)
                accumulator._install(saved["model"])  # which checks all of it first
                accumulator.set_model_version(version)
            except BaseException:
                if bring_back is not None:
                    bring_back()
                raise
        self._load_users(loop)
        accumulator._left_out.take_over(*carried)
        accumulator._progress = Progress(Totals(loop["totals"]), loop[MARK], stats)
        accumulator._progress.run = loop.get("run", accumulator._progress.run)

    def _rest(self) -> dict[str, Any]:
        """What a checkpoint has beside the model."""
        stats = self._progress.stats
        return {"loop": self._captured(), "stats": None if stats is None else dict(stats)}


def _target(until: Until | None) -> dict[str, int]:
    if not (until is None or callable(until) or isinstance(until, Mapping)):
        raise TypeError(
            "until must be totals such as {'steps': 1_000_000}, or a function of the totals, "
            f"not {until!r}"
        )
    given = until if isinstance(until, Mapping) else getattr(until, "target", None)
    if given is None:
        return {}
    if not given:
        raise ValueError("until has no counter: give totals such as {'steps': 1_000_000}")
    return {name: integer_of(least, f"until[{name!r}]") for name, least in given.items()}


def _reaches(target: dict[str, int]) -> Callable[[Totals], bool]:
    return lambda totals: any(totals[name] >= least for name, least in target.items())


def _tell_of_missed(totals: Totals, rounds: int) -> None:
    logs.logger.warning(
        "until() asks for the counter %s, which none of %d rounds had; they had %s",
        ", ".join(map(repr, sorted(totals.missed))),
        rounds,
        ", ".join(map(repr, sorted(totals))) or "none",
    )


def _wait(accumulator: AccumulatorBase, timeout: float, idle: Callable[[], None] | None) -> None:
    accumulator.wait(timeout if idle is None else min(timeout, IDLE))
    if idle is not None:
        idle()


def checked_loop_state(received: Any, framework: str) -> dict[str, Any]:
    """The state that an adapter's ``steps()`` sent, in a form that this framework understands.

    Raises:
        RuntimeError: it is another loop's, or an optimizer's that only its framework knows.
    """
    if not isinstance(received, dict) or not {"optimizer", "users"} <= set(received):
        raise RuntimeError("the leader's state is not one of steps(): use the same loop everywhere")
    if received["optimizer"] is None and received.get(framework) is None:
        raise RuntimeError(
            f"the leader's optimizer has a state that {framework} does not understand: use Adam, "
            "RMSProp or SGD, or training_steps() with a state of your own"
        )
    return received


def _is_whole(received: Any) -> bool:
    """Whether the leader's loop sent it; without it there are the model's parameters alone."""
    if received is None:
        logs.logger.warning(
            "the leader's loop did not call set_state() within 5 s of wants_state(), so parameters "
            "came without the rest: the optimiser and the totals keep this member's values"
        )
        return False
    totals = received.get("totals") if isinstance(received, dict) else None
    sums = isinstance(totals, dict) and all(
        type(name) is str and type(value) is int for name, value in totals.items()
    )
    whole = sums and type(received.get(MARK)) is int and type(received.get("run", "")) is str
    if not whole or "state" not in received:
        raise RuntimeError(
            "the leader's state is not one of training_steps(): use the same loop at every peer"
        )
    return True
