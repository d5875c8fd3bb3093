"""Replay: tables of items in this process, and those of another one. See docs/replay.md."""

from moolink.replay.batch import Batch, Batches
from moolink.replay.client import ReplayClient
from moolink.replay.local import Replay
from moolink.replay.n_step import NStepWriter
from moolink.replay.options import (
    Fifo,
    Lifo,
    Limiter,
    MaxHeap,
    MinHeap,
    MinSize,
    Prioritized,
    SampleToInsertRatio,
    Selector,
    Table,
    Uniform,
)
from moolink.replay.server import ReplayServer
from moolink.replay.writer import Writer

__all__ = [
    "Batch",
    "Batches",
    "Fifo",
    "Lifo",
    "Limiter",
    "MaxHeap",
    "MinHeap",
    "MinSize",
    "NStepWriter",
    "Prioritized",
    "Replay",
    "ReplayClient",
    "ReplayServer",
    "SampleToInsertRatio",
    "Selector",
    "Table",
    "Uniform",
    "Writer",
]
