"""A peer's report to its broker: metrics, paths to other peers, models.

A broker with a dashboard calls REPORT once a second, and EXPLAIN when a user asks for a path.
"""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moolink import metrics
from moolink.internal import forks, logs
from moolink.metrics.family import Family, HistogramValue, Sample
from moolink.metrics.rounds import Rounds
from moolink.rpc import serving

if TYPE_CHECKING:
    from moolink.rpc import Rpc

REPORT = "moolink.metrics/report"
EXPLAIN = "moolink.metrics/explain"
# No group can have this name, so only peers with the job's key can call functions confined to it.
_ONLY_THE_JOB = "\x01"
MOST_PATHS = 64  # of a report
MOST_OWN = 1000  # samples of the user's own metrics
MOST_ENVIRONMENTS = 16
MOST_NUMBER = 1 << 63  # in size, of a metric of moolink's own: a broker refuses more


class _Process:
    """An id of this process. Host and PID are not enough: containers can share both."""

    def __init__(self) -> None:
        self._forked()
        forks.changes_in_children(self)

    def get(self) -> str:
        """The id."""
        return self._id

    def _forked(self) -> None:
        self._id = secrets.token_hex(8)


PROCESS = _Process()


def serve(rpc: Rpc) -> None:
    """Defines the functions at a peer, once."""
    mine = object()
    if rpc.__dict__.setdefault("_reports", mine) is not mine:  # also if two threads come at once
        return
    of = weakref.ref(rpc)  # a peer without other references is closed
    # The report of a peer of the whole job contains names and addresses of all groups.
    define_for_the_job(rpc, REPORT, lambda: _report(of()))
    define_for_the_job(rpc, EXPLAIN, lambda peer: _explain(of(), serving.text_of(peer, "peer")))


def define_for_the_job(rpc: Rpc, name: str, function: Callable[..., Any]) -> None:
    """Defines a function that those peers may call that hold the same key as this one."""
    audience = rpc.key_group or _ONLY_THE_JOB
    rpc._define_confined(
        name, lambda reply, *given: serving.answer(reply, function(*given)), audience
    )


def _report(rpc: Rpc | None) -> str:
    """As JSON: the broker reads a thousand of them a second faster than other values."""
    import json  # by the first report: most peers never make one

    if rpc is None:
        return "{}"
    connected = [peer for peer in rpc.peers() if peer["connected"]]
    models = [source.report() for source in metrics.sources.of(rpc) if isinstance(source, Rounds)]
    told = {
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "process": PROCESS.get(),
        # The broker knows the rest of moolink's own metrics from moolink.metrics.table.
        "metrics": {
            family.name: [_clamped(sample) for sample in family.samples]
            for family in metrics.sources.families(rpc)
        },
        "own": _first(metrics.registry.families()),
        "script": _script(),
        "environments": _environments(rpc),
        "paths": [
            (peer["name"], peer["path"], peer["latency"], peer["group"])
            for peer in connected[:MOST_PATHS]
        ],
        "models": [model for model in models if model is not None],
    }
    return json.dumps(told)


def _clamped(sample: Sample) -> Sample:
    """With a number that the broker takes: a sum of counters may have more bits than a counter."""
    if isinstance(sample.value, HistogramValue):
        return sample
    return sample._replace(value=max(-MOST_NUMBER, min(sample.value, MOST_NUMBER)))


@functools.cache
def _script() -> str:
    """The program and its arguments, as a user would type them; nothing else of the process."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)  # of `python -m`
    program = os.path.basename(sys.argv[0]) if spec is None else spec.name
    return shlex.join([program.removesuffix(".__main__"), *sys.argv[1:]])


def _environments(rpc: Rpc) -> list[str]:
    """The ids of the environments that this process runs."""
    found = {getattr(source, "environment", "") for source in metrics.sources.of(rpc)}
    return sorted(found - {""})[:MOST_ENVIRONMENTS]


def _first(families: list[Family]) -> list[Family]:
    """The first MOST_OWN samples: a label such as an episode number adds samples without end."""
    left, first = MOST_OWN, []
    for family in families:
        first.append(family._replace(samples=family.samples[:left]))
        left -= len(first[-1].samples)
        if left == 0:
            _warn_of_more()
            break
    return first


@functools.cache
def _warn_of_more() -> None:
    logs.logger.warning(
        "reports to the broker have the first %d samples of this program's own metrics; a label "
        "with ever new values makes ever more of them",
        MOST_OWN,
    )


def _explain(rpc: Rpc | None, peer: str) -> Any:
    return None if rpc is None else rpc.explain(peer)
