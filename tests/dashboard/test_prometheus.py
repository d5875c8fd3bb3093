"""The text format, read again by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from moolink.dashboard import prometheus
from moolink.metrics.family import Family, HistogramValue, Sample


def test_all_kinds_are_read_as_they_were() -> None:
    hostile = 'a"b\\c\nd{}'
    seconds = HistogramValue((0.1, 1.0), (4, 0, 2), 9.5)
    text = prometheus.text(
        [
            Family("calls_total", "counter", "Calls.", [Sample({"peer": hostile}, 3.0)]),
            Family("episodes", "counter", "Without the suffix.", [Sample({}, 1.0)]),
            Family("return", "gauge", "Line\nbreak.", [Sample({}, -1.5), Sample({"p": "b"}, 2.0)]),
            Family("seconds", "histogram", "", [Sample({"p": "a"}, seconds)]),
        ]
    ).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "calls": "counter",
        "episodes": "counter",
        "return": "gauge",
        "seconds": "histogram",
    }
    (calls,) = families["calls"].samples
    assert (calls.name, calls.labels, calls.value) == ("calls_total", {"peer": hostile}, 3.0)
    assert families["return"].documentation == "Line\nbreak."
    assert [sample.value for sample in families["return"].samples] == [-1.5, 2.0]
    assert [(s.name, s.labels.get("le"), s.value) for s in families["seconds"].samples] == [
        ("seconds_bucket", "0.1", 4.0),
        ("seconds_bucket", "1.0", 4.0),
        ("seconds_bucket", "+Inf", 6.0),
        ("seconds_count", None, 6.0),
        ("seconds_sum", None, 9.5),
    ]
