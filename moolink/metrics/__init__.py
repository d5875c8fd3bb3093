"""Metrics: moolink's own, and the user's counters, gauges and histograms.

    moolink.metrics.gauge("episode_return").set(21.0)
    moolink.metrics.counter("episodes_total", env="Pong").inc()

:func:`collect` reads all of them. A broker with `--http` collects those of the members of
its groups and gives them to Prometheus: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moolink.metrics.family import Family, HistogramValue, Sample
from moolink.metrics.registry import Counter, Gauge, Histogram, Registry
from moolink.metrics.sources import Sources

if TYPE_CHECKING:
    from moolink.metrics.run_log import RunLog

__all__ = [
    "Counter",
    "Family",
    "Gauge",
    "Histogram",
    "HistogramValue",
    "RunLog",
    "Sample",
    "collect",
    "counter",
    "gauge",
    "histogram",
]

registry = Registry()
sources = Sources()


def __getattr__(name: str) -> Any:
    if name == "RunLog":  # loaded at first use: most programs have none
        from moolink.metrics.run_log import RunLog

        return RunLog
    raise AttributeError(f"module 'moolink.metrics' has no attribute {name!r}")


def counter(name: str, /, help: str = "", **labels: str) -> Counter:
    """Returns the counter of this name and these labels; the first call makes it.

    Args:
        name: letters, digits and underscores. By Prometheus' conventions it ends with `_total`,
            after a unit if it has one (`_seconds`, `_bytes`).
        help: one sentence, shown beside the name.
        labels: distinguish the counters of one name.

    Raises:
        ValueError: the name or a label is not valid, or Prometheus could not distinguish the name
            from that of another metric.
    """
    return registry.counter(name, help, labels)


def gauge(name: str, /, help: str = "", **labels: str) -> Gauge:
    """Returns the gauge of this name and these labels, as :func:`counter` does."""
    return registry.gauge(name, help, labels)


def histogram(
    name: str, /, help: str = "", *, bounds: Sequence[float] | None = None, **labels: str
) -> Histogram:
    """Returns the histogram of this name and these labels, as :func:`counter` does.

    Args:
        bounds: upper bounds of the buckets, ascending. Default: the existing bounds, or 1 ms to
            10 s for a new histogram.

    Raises:
        ValueError: as :func:`counter`, or `bounds` does not ascend or differs from the first call.
    """
    return registry.histogram(name, help, labels, bounds)


def collect() -> list[Family]:
    """Reads all metrics of this process: moolink's own, then the user's."""
    return sources.families() + registry.families()
