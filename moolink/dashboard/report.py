"""Checks a member's report (moolink.rpc.report), so that it cannot harm other members.

The type, sign and size of every value are checked, so numbers computed from reports stay finite,
and the part of a report that is shown stays small.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moolink.internal.shown import cut, printable, shown
from moolink.metrics.family import (
    Family,
    HistogramValue,
    Sample,
    check_label,
    check_name,
    encodable,
)
from moolink.metrics.rounds import Round
from moolink.metrics.table import BY_NAME
from moolink.rpc.report import MOST_ENVIRONMENTS, MOST_NUMBER

MOST_BYTES = 4 << 20
MOST_OWN_NUMBER = 1e300  # of the user's metrics, as far as the page shows them
MOST_NAME = 1024  # characters; a group's name may have 1 KB
MOST_TEXT = 400
MOST_LINES = 10_000  # of a member in /metrics
MOST_OWN = 1000  # values of the user's metrics on the page; report.MOST_OWN are sent
MOST_PATHS = 64
MOST_MODELS = 64
MOST_COUNTERS = 64  # of a model's totals
MOST_ROUNDS = 64
STUCK = 10.0  # seconds
OBSERVER = "observer"
RATES = {
    "steps": "moolink_environment_steps_total",
    "calls": "moolink_calls_sent_total",
    "served": "moolink_calls_received_total",
    "sent": "moolink_sent_bytes_total",
    "received": "moolink_received_bytes_total",
    "cpu": "process_cpu_seconds_total",
}

Raw = dict[str, Any]
"""moolink's own metrics as reported: by name, pairs of labels and a value."""


class Model(NamedTuple):
    """A model of a member, and the last rounds that were applied to it."""

    group: str
    name: str
    role: str
    leader: str
    version: int
    waiting_for: list[str]
    idle: float  # seconds since its loop last called moolink; 0: it waits in a call
    still: float  # seconds since the loop last received or contributed anything
    awaited: str  # the reason why the leader waits, and the remedy
    typical: float  # median seconds of a round
    rounds: list[Round]  # of the leader
    totals: dict[str, float]  # of the whole job's counters
    target: dict[str, float]  # of the totals; a job without one: empty

    def is_stuck(self) -> bool:
        """Whether its loop has not called moolink for much longer than a round takes."""
        away = self.idle > max(STUCK, 10 * self.typical)
        return away and self.role != OBSERVER  # no member waits for an observer


class Report(NamedTuple):
    """A report. The page's data are read at once, the metrics on request."""

    host: str
    pid: int
    process: str  # an id that no other process has
    paths: list[tuple[str, str, float | None, str]]  # peer, path, latency, the peer's group
    models: list[Model]
    totals: dict[str, float]  # by the names of RATES
    memory: float
    epochs: dict[str, int]  # by group
    steps: dict[str, float]  # the counter "steps" of a group's rounds, if they have it
    values: dict[str, float]  # of the user's counters and gauges, by name and labels
    returns: list[float]  # of the user's gauges whose names contain "return"
    raw: Raw
    own: list[Any]  # families of the user's metrics
    script: str  # the program and its arguments
    environments: list[str]  # their ids

    def remains(self) -> Report:
        """The part that is still shown after a member has gone."""
        return self._replace(paths=[], models=[], values={}, returns=[], raw={}, own=[])

    def families(self, with_process: bool) -> list[Family]:
        """The metrics that have the right form.

        Args:
            with_process: whether to include the metrics of the process. False: another of its
                peers reports them.
        """
        given = [
            (name, "", "", samples)
            for name, samples in self.raw.items()
            if with_process or not is_of_process(name)
        ]
        left, families = MOST_LINES, []
        for one in [*given, *(self.own if with_process else ())]:
            if (family := _family(*one)) is not None and left > 0:
                samples = family.samples[:left]
                left -= sum(_lines(sample) for sample in samples)
                families.append(family._replace(samples=samples))
        return families


def is_of_process(name: str) -> bool:
    """Whether all peers of a process report a metric of moolink's own."""
    return name.startswith(("process_", "moolink_environment", "moolink_replay_"))


def read(text: str) -> Report:
    """Reads a report.

    Raises:
        ValueError: the report has another form.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has {len(text)} characters, of which {MOST_BYTES} may be")
        given = json.loads(text)
        # The escape of a lone surrogate, which no other program can read.
        if "\\ud" in text or "\\uD" in text:
            given = json.loads(encodable(json.dumps(given, ensure_ascii=False)))
        return _read(given)
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as wrong:
        raise ValueError(f"{type(wrong).__name__}: {wrong}") from None


def _read(given: Any) -> Report:
    raw, own = dict(given["metrics"]), list(given["own"])
    epochs = _samples(raw, "moolink_group_epoch")
    return Report(
        _text(given["host"]),
        _count(given["pid"]),
        _text(given["process"]),
        [_path(*path) for path in given["paths"][:MOST_PATHS]],
        [_model(model) for model in given["models"][:MOST_MODELS]],
        _totals(raw),
        _sum(raw, "process_resident_memory_bytes"),
        {labels["group"]: int(_size(epoch)) for labels, epoch in epochs},
        _steps(_samples(raw, "moolink_counter")),
        *_values(own),
        raw,
        own,
        _text(given.get("script", "")),
        [_text(one) for one in list(given.get("environments", ()))[:MOST_ENVIRONMENTS]],
    )


def _path(
    peer: Any,
    path: Any,
    latency: Any,
    group: Any = "",
    *_: Any,  # a later version may add
) -> tuple[str, str, float | None, str]:
    return _text(peer), _text(path), None if latency is None else _size(latency), _text(group)


def _totals(raw: Raw) -> dict[str, float]:
    """By the names of RATES. Steps are those of pools, or else those of its contributions."""
    totals = {rate: _sum(raw, of) for rate, of in RATES.items() if of in raw}
    contributed = _steps(_samples(raw, "moolink_own_counter"))
    if "steps" not in totals and contributed:
        totals["steps"] = sum(contributed.values())
    return totals


def _counters(given: Mapping[str, Any]) -> dict[str, float]:
    """Of more than MOST_COUNTERS the first ones."""
    return {_text(name): _clamped(given[name]) for name in list(given)[:MOST_COUNTERS]}


def _values(own: Iterable[Any]) -> tuple[dict[str, float], list[float]]:
    """The values of the user's counters and gauges, and those of them that are returns."""
    values: dict[str, float] = {}
    returns: list[float] = []
    for name, kind, _, samples in own:
        for labels, value in samples:
            if kind == "histogram" or not _is_number(value) or len(values) == MOST_OWN:
                continue
            if not abs(value) <= MOST_OWN_NUMBER:  # it may be no number at all
                continue
            shown = ",".join(f"{label}={of}" for label, of in labels.items())
            values[_text(f"{name}{{{shown}}}" if shown else name)] = float(value)
            if kind == "gauge" and "return" in name:
                returns.append(float(value))
    return values, returns


def _model(given: Mapping[str, Any]) -> Model:
    return Model(
        group=_name(given["group"]),
        name=_name(given["name"]),
        role=_text(given["role"]),
        leader=_name(given["leader"]),
        version=_count(given["version"]),
        waiting_for=[_name(peer) for peer in list(given["waiting_for"])],
        idle=_size(given["idle"]),
        still=_size(given["still"]),
        awaited=_text(given["awaited"]),
        typical=_size(given["typical"]),
        rounds=[_round(*one) for one in given["rounds"][-MOST_ROUNDS:]],
        totals=_counters(given.get("totals", {})),
        target=_counters(given.get("target", {})),
    )


def _round(
    version: Any, time: Any, seconds: Any, batch: Any, skipped: Any, by: Any, *phases: Any
) -> Round:
    contributors = {_name(peer): _count(count) for peer, count in by.items()}
    gather, reduce, deliver, *_ = phases  # a later version may add some
    return Round(
        _count(version),
        _size(time),
        _size(seconds),
        _count(batch),
        _count(skipped),
        contributors,
        None if gather is None else _size(gather),
        _size(reduce),
        _size(deliver),
    )


def _samples(raw: Raw, name: str) -> list[tuple[Mapping[str, str], float]]:
    return [(labels, _number(value)) for labels, value in raw.get(name, ())]


def _sum(raw: Raw, name: str) -> float:
    return _size(sum(_size(value) for _, value in _samples(raw, name)))


def _steps(counters: Iterable[tuple[Mapping[str, str], float]]) -> dict[str, float]:
    """The sum over the models of each group."""
    steps: dict[str, float] = {}
    for labels, value in counters:
        if labels["counter"] == "steps":
            steps[labels["group"]] = steps.get(labels["group"], 0.0) + value
    return steps


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """A number whose sums and rates are finite."""
    if not _is_number(value):
        raise TypeError(f"{shown(value)} is no number")
    if not abs(value) <= MOST_NUMBER:  # NaN neither
        raise ValueError(f"{shown(value)} is not from {-MOST_NUMBER:g} to {MOST_NUMBER:g}")
    return float(value)


def _clamped(value: Any) -> float:
    """A sum of counters, which may have more bits than a counter."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{shown(value)} is no integer")
    return float(max(-MOST_NUMBER, min(value, MOST_NUMBER)))


def _size(value: Any) -> float:
    """A number that is not negative, such as a count, seconds or bytes."""
    if _number(value) < 0:
        raise ValueError(f"{shown(value)} is negative")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{shown(value)} is no integer")
    return int(_size(value))


def _name(value: Any) -> str:
    """The name of a peer, a group or a model, by which others know it: it stays as it is."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    if len(value) > MOST_NAME:
        raise ValueError(f"a name has {len(value)} characters, of which {MOST_NAME} may be")
    return value


def _text(value: Any) -> str:
    """A text that is only shown."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    return printable(cut(value, MOST_TEXT))


def _family(name: str, kind: str, help: str, samples: Iterable[Any]) -> Family | None:
    """None if the metric is unknown here (from another version of moolink) or invalid."""
    try:
        if name in BY_NAME:
            kind, help = BY_NAME[name].kind, BY_NAME[name].help
        check_name(_name(name))
        if kind not in ("counter", "gauge", "histogram"):
            return None
        of = [_sample(kind, labels, value) for labels, value in samples]
        return Family(name, kind, _text(help.replace("\n", " ")), of)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _lines(sample: Sample) -> int:
    """The labels of a sample in /metrics."""
    return len(sample.value.counts) + 2 if isinstance(sample.value, HistogramValue) else 1


def _sample(kind: str, labels: Mapping[str, Any], value: Any) -> Sample:
    for label in labels:
        check_label(_name(label))
    of = {label: _text(text) for label, text in labels.items()}
    if kind != "histogram":
        if not _is_number(value):
            raise TypeError(f"{shown(value)} is no number")
        if kind == "counter" and value < 0:
            raise ValueError(f"{shown(value)} is negative")
        return Sample(of, float(value))
    bounds, counts, total = value
    if len(counts) != len(bounds) + 1:
        raise ValueError(f"{len(counts)} counts do not go with {len(bounds)} bounds")
    limits = tuple(map(_number, bounds))
    if any(after <= before for before, after in itertools.pairwise(limits)):
        raise ValueError("the bounds do not ascend")
    if not _is_number(total):
        raise TypeError(f"{shown(total)} is no number")
    return Sample(of, HistogramValue(limits, tuple(map(_count, counts)), float(total)))
