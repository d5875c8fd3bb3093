"""Whatever one member reports, the page, /metrics and `moolink top` show the others."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from moolink.cli.top import Size, View, _screen
from moolink.dashboard import prometheus
from moolink.dashboard.job import Job
from tests import property
from tests.dashboard.test_job import model, told

EXTREMES = [0, -1, 1.7e308, -1.7e308, 5e-324, math.inf, -math.inf, math.nan, 2**63, 10**400, True]
NUMBERS = st.one_of(st.sampled_from(EXTREMES), st.integers(), st.floats())
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "a", "g", "le", "peer", "\x1b[2J", "\ud800", "x" * 500, "__proto__"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=10,
)


def whole() -> dict[str, Any]:
    """A report with something of each kind, as it is after JSON."""
    given = told(5, [model("leader", rounds=[{"a": 1, "good": 2}] * 5)], mean_return=1.5)
    given["metrics"] |= {
        "process_cpu_seconds_total": [({}, 1.0)],
        "process_resident_memory_bytes": [({}, 1e9)],
        "moolink_counter": [({"group": "g", "name": "m", "counter": "steps"}, 10)],
        "moolink_round_seconds": [({"group": "g", "name": "m"}, ([0.1, 1.0], [1, 2, 3], 4.0))],
    }
    given |= {"script": "train.py", "environments": ["CartPole-v1"]}
    given["models"][0] |= {"totals": {"steps": 10}, "target": {"steps": 100}}
    given["own"].append(("size", "histogram", "h", [({"l": "x"}, ([1.0], [1, 2], 3.0))]))
    changed: dict[str, Any] = json.loads(json.dumps(given))
    return changed


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to each part of a report."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


PLACES = places(whole())


@st.composite
def lies(draw: st.DrawFn) -> str:
    """A report with arbitrary values in some parts."""
    report = {"report": whole()}
    for place in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        inner: Any = report
        *way, last = "report", *place
        try:
            for key in way:
                inner = inner[key]
            inner[last] = draw(VALUES)
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change has removed it
    return json.dumps(report["report"])


def reported(*lies: str) -> Job:
    """A job with a member whose report is valid, and one before it whose report is not."""
    job = Job(0)
    job.view(0, {"g": ["a-liar", "good"], "other": ["good"]})
    for second, lie in enumerate([json.dumps(whole()), *lies], start=1):
        for name, text in (("a-liar", lie), ("good", json.dumps(whole() | {"process": "8"}))):
            try:
                job.report(second, name, text)
            except ValueError as error:
                assert name != "good"
                job.failed(name, str(error))
        job.tick(second)
    return job


def metrics_of(job: Job, peer: str) -> set[tuple[Any, ...]]:
    text = prometheus.text(job.families({})).decode()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    named = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
    assert len(named) == len(set(named)), "Prometheus refuses a sample that is given twice"
    return {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for sample in samples
        if sample.labels["peer"] == peer
    }


def row_of(job: Job, name: str, now: float) -> dict[str, Any]:
    snapshot = json.loads(json.dumps(job.snapshot(now), allow_nan=False))
    (row,) = (row for row in snapshot["members"] if row["name"] == name)
    return dict(row)


def screen(job: Job, now: float) -> str:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    shown = job.snapshot(now) | {"broker": {"name": "b"}}
    console.print(_screen(shown, View(), None, Size(300, 0)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@property.examples(300)
@given(st.lists(lies(), min_size=1, max_size=3))
def test_a_lie_harms_no_other_member(lies: list[str]) -> None:
    now = len(lies) + 1.0
    lied, true = reported(*lies), reported(*[json.dumps(whole())] * len(lies))
    # The group's members report its leader and rounds, and so also "idle".
    told_of = {"state", "why", "role"}
    row, truth = row_of(lied, "good", now), row_of(true, "good", now)
    assert {k: v for k, v in row.items() if k not in told_of} == {
        k: v for k, v in truth.items() if k not in told_of
    }
    shared = {"mean_return", "size", "size_bucket", "size_count", "size_sum"}  # the users' own
    of_moolink = {one for one in metrics_of(true, "good") if one[0] not in shared}
    assert of_moolink
    assert of_moolink <= metrics_of(lied, "good")
    text = screen(lied, now)
    assert "good" in text
    assert all(each.isprintable() or each == "\n" for each in text)
    (other,) = (one for one in lied.snapshot(now)["groups"] if one["name"] == "other")
    assert other["members"] == ["good"]
    assert other["models"] == []


@property.examples(200)
@given(st.text(max_size=50) | VALUES.map(json.dumps) | st.binary(max_size=50) | VALUES)
def test_what_is_no_report_at_all_is_refused(given: Any) -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    with pytest.raises((ValueError, TypeError)):  # the poller takes both
        job.report(1, "a", given)


def test_what_a_member_reports_is_bounded() -> None:
    lie = whole()
    lie["host"] = "h" * 100_000
    lie["paths"] *= 10_000
    lie["models"] *= 1000
    lie["own"] = [(f"own_{i}", "gauge", "", [({}, i)]) for i in range(30_000)]
    job = reported(json.dumps(lie))
    row = row_of(job, "a-liar", 3)
    assert len(row["host"]) <= 400
    assert len(row["paths"]) <= 64
    assert len(row["own"]) <= 1000
    assert len(metrics_of(job, "a-liar")) <= 10_000
    assert len(json.dumps(job.snapshot(3))) < 200_000


def test_the_rate_of_a_counter_that_leaps_is_finite() -> None:
    lies = []
    for value in (-1.7e308, 1.7e308):
        lie = whole()
        lie["metrics"]["process_cpu_seconds_total"] = [({}, value)]
        lie["metrics"]["moolink_counter"][0][1] = value
        lies.append(json.dumps(lie))
    job = reported(*lies)
    row = row_of(job, "a-liar", 4)
    assert "is not from" in row["why"]


def test_moolinks_own_metrics_keep_their_kind() -> None:
    lie = whole()
    lie["own"] = [("moolink_environment_steps", "gauge", "", [({}, 1.0)])]
    del lie["metrics"]["moolink_environment_steps_total"]
    assert any(
        name == "moolink_environment_steps_total"
        for name, _, _ in metrics_of(reported(json.dumps(lie)), "good")
    )
