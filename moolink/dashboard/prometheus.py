"""Metrics in Prometheus' text format, as its own client library writes it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moolink.metrics.family import Family, HistogramValue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text(families: list[Family]) -> bytes:
    """Returns the families in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield _metric(family)


def _metric(family: Family) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help)
        for labels, value in family.samples:
            if isinstance(value, HistogramValue):
                _add_histogram(histogram, labels, value)
        return histogram
    metric: Metric
    if family.kind == "counter":
        metric = CounterMetricFamily(family.name, family.help)
        name = f"{metric.name}_total"  # the library takes it off the family's name only
    else:
        metric, name = GaugeMetricFamily(family.name, family.help), family.name
    for labels, value in family.samples:
        if not isinstance(value, HistogramValue):
            metric.add_sample(name, labels, value)
    return metric


def _add_histogram(into: HistogramMetricFamily, labels: dict[str, str], of: HistogramValue) -> None:
    total = 0
    bounds = [*(repr(float(bound)) for bound in of.bounds), "+Inf"]
    for bound, count in zip(bounds, of.counts, strict=True):
        total += count
        into.add_sample(f"{into.name}_bucket", {**labels, "le": bound}, total)
    into.add_sample(f"{into.name}_count", labels, total)
    into.add_sample(f"{into.name}_sum", labels, of.sum)
