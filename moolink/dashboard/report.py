"""Checks a member's report (moolink.rpc.report), so that it cannot harm other members."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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

MOST_BYTES = 4 << 20
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

    def is_stuck(self) -> bool:
        """Whether its loop has not called moolink for much longer than a round takes."""
        away = self.idle > max(STUCK, 10 * self.typical)
        return away and self.role != OBSERVER  # no member waits for an observer


class Report(NamedTuple):
    """A report. The page's data are read at once, the metrics on request."""

    host: str
    pid: int
    process: str  # an id that no other process has
    paths: list[tuple[str, str, float | None]]
    models: list[Model]
    totals: dict[str, float]  # by the names of RATES
    memory: float
    epochs: dict[str, int]  # by group
    steps: dict[str, float]  # the counter "steps" of a group's rounds, if they have it
    values: dict[str, float]  # of the user's counters and gauges, by name and labels
    returns: list[float]  # of the user's gauges whose names contain "return"
    raw: Raw
    own: list[Any]  # families of the user's metrics

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
        families = [_family(*one) for one in [*given, *(self.own if with_process else ())]]
        return [family for family in families if family is not None]


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
    values, returns = {}, []
    for name, kind, _, samples in own:
        for labels, value in samples:
            if kind == "histogram" or not _is_number(value) or not math.isfinite(value):
                continue
            shown = ",".join(f"{label}={of}" for label, of in labels.items())
            values[str(f"{name}{{{shown}}}" if shown else name)] = value
            if kind == "gauge" and "return" in name:
                returns.append(value)
    return Report(
        str(given["host"]),
        int(given["pid"]),
        str(given["process"]),
        [
            (str(peer), str(path), None if latency is None else _finite(latency))
            for peer, path, latency, *_ in given["paths"]  # a later version may add to each
        ],
        [_model(model) for model in given["models"]],
        {rate: _sum(raw, of) for rate, of in RATES.items() if of in raw},
        _sum(raw, "process_resident_memory_bytes"),
        {labels["group"]: int(epoch) for labels, epoch in _samples(raw, "moolink_group_epoch")},
        _steps(_samples(raw, "moolink_counter")),
        values,
        returns,
        raw,
        own,
    )


def _model(given: Mapping[str, Any]) -> Model:
    return Model(
        group=str(given["group"]),
        name=str(given["name"]),
        role=str(given["role"]),
        leader=str(given["leader"]),
        version=int(given["version"]),
        waiting_for=[str(peer) for peer in list(given["waiting_for"])],
        idle=_finite(given["idle"]),
        still=_finite(given["still"]),
        awaited=str(given["awaited"]),
        typical=_finite(given["typical"]),
        rounds=[_round(*one) for one in given["rounds"]],
    )


def _round(
    version: Any, time: Any, seconds: Any, batch: Any, skipped: Any, by: Any, *phases: Any
) -> Round:
    contributors = {str(peer): int(count) for peer, count in by.items()}
    gather, reduce, deliver, *_ = phases  # a later version may add some
    return Round(
        int(version),
        _finite(time),
        _finite(seconds),
        int(batch),
        int(skipped),
        contributors,
        None if gather is None else _finite(gather),
        _finite(reduce),
        _finite(deliver),
    )


def _samples(raw: Raw, name: str) -> list[tuple[Mapping[str, str], float]]:
    return [(labels, _finite(value)) for labels, value in raw.get(name, ())]


def _sum(raw: Raw, name: str) -> float:
    return _finite(sum(value for _, value in _samples(raw, name)))


def _steps(counters: Iterable[tuple[Mapping[str, str], float]]) -> dict[str, float]:
    """The sum over the models of each group."""
    steps: dict[str, float] = {}
    for labels, value in counters:
        if labels["counter"] == "steps":
            steps[labels["group"]] = steps.get(labels["group"], 0.0) + value
    return steps


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not finite")
    return float(value)


def _family(name: str, kind: str, help: str, samples: Iterable[Any]) -> Family | None:
    """None if the metric is unknown here (from another version of moolink) or invalid."""
    try:
        if name in BY_NAME:
            kind, help = BY_NAME[name].kind, BY_NAME[name].help
        check_name(name)
        if kind not in ("counter", "gauge", "histogram"):
            return None
        of = [_sample(kind, labels, value) for labels, value in samples]
        return Family(name, kind, str(help), of)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def _sample(kind: str, labels: Mapping[str, Any], value: Any) -> Sample:
    for label in labels:
        check_label(label)
    of = {label: str(text) for label, text in labels.items()}
    if kind != "histogram":
        if not _is_number(value):
            raise TypeError(f"{value!r} is no number")
        return Sample(of, float(value))
    bounds, counts, total = value
    if len(counts) != len(bounds) + 1:
        raise ValueError(f"{len(counts)} counts do not go with {len(bounds)} bounds")
    return Sample(
        of,
        HistogramValue(tuple(map(_finite, bounds)), tuple(map(int, counts)), float(total)),
    )
