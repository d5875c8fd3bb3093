"""A training loop as an iterator, so that users need not poll an accumulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moolink.accumulate.parting import leave_together, take_news
from moolink.internal import logs
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords

if TYPE_CHECKING:
    from moolink.accumulate import AccumulatorBase
    from moolink.reports import GradientStats


LONGEST_WAIT = 1.0  # seconds of one wait for a change; the accumulator ends it early
IDLE = 0.2  # the same where the user's `idle` is called
MARK = "moolink.training_steps"  # of the states that these loops send


Until = Callable[[dict[str, int]], bool] | Mapping[str, int]
"""When a loop ends: a function of the totals, or totals of which one has to be reached. A function
may have such totals as its attribute ``target``, for the dashboard."""

FEW_ROUNDS = 10  # rounds, after which a counter that no round had is probably misspelt


class Totals(dict[str, int]):
    """Sums of counters. A counter that no round had is 0, and its name is added to `missed`."""

    def __init__(self, sums: Mapping[str, int]) -> None:
        super().__init__(sums)
        self.missed: set[str] = set()

    def __missing__(self, name: str) -> int:
        self.missed.add(name)
        return 0


@names_keywords
class TrainingStep:
    """One turn: the parameters are those of ``version``, and gradients of them are wanted.

    Attributes:
        version: the model's version, the number of rounds that led to it.
        totals: sums of all counters over all rounds of the job; equal at every member. A counter
            that no round had is 0.
        stats: of the round applied last here (``get_gradient_stats()``); None before the first.
    """

    def __init__(
        self, accumulator: AccumulatorBase, totals: dict[str, int], stats: GradientStats | None
    ) -> None:
        self._accumulator = accumulator
        self._reduced = False
        self.version = accumulator.model_version()
        self.totals = totals
        self.stats = stats

    def reduce(self, batch_size: int, counters: Mapping[str, int] | None = None) -> None:
        """Contributes the gradients, once a turn; as the accumulator's ``reduce_gradients``.

        Raises:
            RuntimeError: it was already called in this turn, or the turn is over, because the
                parameters are of a later version.
        """
        self._require_first("reduce")
        self._accumulator.reduce_gradients(batch_size, counters)
        self._reduced = True

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
        self._accumulator.skip_gradients(counters)

    def _require_current(self, method: str) -> None:
        version = self._accumulator.model_version()
        if version != self.version:
            raise RuntimeError(
                f"{method} was called for a turn of version {self.version} that is over: the "
                f"parameters are of version {version}"
            )


def training_steps(
    accumulator: AccumulatorBase,
    apply: Callable[[dict[str, int]], None],
    *,
    state: Callable[[], Any] | None,
    load_state: Callable[[Any], None] | None,
    until: Until | None,
    first_totals: Mapping[str, int] | None,
    idle: Callable[[], None] | None,
) -> Iterator[Any]:
    """See :meth:`moolink.accumulate.AccumulatorBase.training_steps`; ``apply`` gets the totals
    before each round."""
    totals = Totals(first_totals or {})
    over = False
    rounds = 0  # that are in the totals, beside those of the beginning
    stats: GradientStats | None = None
    told_of_counters = False

    def captured() -> dict[str, Any]:
        users = None if state is None else state()
        return {MARK: rounds, "totals": dict(totals), "state": users}

    target = _target(until)
    reached = _reaches(target) if isinstance(until, Mapping) else until
    accumulator._rounds.is_over = False
    accumulator._rounds.target = target
    if reached is not None:
        accumulator._parting.expect_end()
    while True:
        accumulator._rounds.totals = totals
        accumulator._group.update()
        if over and leave_together(accumulator, captured, idle):
            accumulator._rounds.is_over = True
            return
        take_news(accumulator.update)
        if accumulator.wants_state():
            accumulator.set_state(captured())
        changed = over = False
        if accumulator.has_new_state():
            received = accumulator.state()
            if _is_whole(received):
                rounds, totals = received[MARK], Totals(received["totals"])
                if load_state is not None:
                    load_state(received["state"])
            changed = True
        if accumulator.has_gradients():
            stats = accumulator.get_gradient_stats()
            apply(totals)
            accumulator.zero_gradients()
            totals = Totals(totals)  # a step that was given out keeps its own
            for name, value in stats["counters"].items():
                totals[name] = totals.get(name, 0) + value
            rounds += 1
            changed = True
        # Before the first round there are no totals to ask about.
        if changed and reached is not None and (rounds or totals):
            totals.missed.clear()
            if over := reached(totals):
                continue
            if totals.missed and rounds >= FEW_ROUNDS and not told_of_counters:
                told_of_counters = True
                _tell_of_missed(totals, rounds)
        if accumulator.wants_gradients() or (changed and accumulator.is_observer()):
            yield accumulator._kind_of_step(accumulator, totals, stats)
        elif not changed:
            _wait(accumulator, LONGEST_WAIT, idle)


def _target(until: Until | None) -> dict[str, int]:
    given = until if isinstance(until, Mapping) else getattr(until, "target", None)
    if given is None:
        return {}
    if not given:
        raise ValueError("until has no counter: give totals such as {'steps': 1_000_000}")
    return {name: integer_of(least, f"until[{name!r}]") for name, least in given.items()}


def _reaches(target: dict[str, int]) -> Callable[[dict[str, int]], bool]:
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
    if not sums or type(received.get(MARK)) is not int or "state" not in received:
        raise RuntimeError(
            "the leader's state is not one of training_steps(): use the same loop at every peer"
        )
    return True
