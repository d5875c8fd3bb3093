"""A peer that trains wherever Slurm starts it: ``python -m tests.slurm.peer FOLDER``.

It says what it sees with the time (of the machine's one monotonic clock), and ends when there is a
file FOLDER/end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import moolink
from moolink.launch import leave_on_signals, place
from tests.numpy_accumulator import NumpyAccumulator

TURN = 0.01  # seconds of work for a contribution


def say(name: str, *words: object) -> None:
    """Writes a line that a test reads."""
    print("peer", f"{time.monotonic():.3f}", name, *words, flush=True)


def train(name: str, accumulator: NumpyAccumulator, group: moolink.Group, end: Path) -> None:
    """Contributes to rounds until the end; says who the members are whenever they change."""
    members: list[str] = []
    sent = counted = 0
    last, longest = time.monotonic(), 0.0
    while not end.exists():
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state(None)
        if accumulator.has_new_state():
            accumulator.state()
        if sorted(group.members()) != members:
            members = sorted(group.members())
            say(name, "members", *members)
        if accumulator.has_gradients():
            counted += accumulator.get_gradient_stats()["counters"].get(name, 0)
            accumulator.zero_gradients()
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        elif accumulator.wants_gradients():
            accumulator.reduce_gradients(1, counters={name: 1})
            sent += 1
        accumulator.wait(TURN)
    say(name, "end", sent, counted, f"{longest:.3f}", accumulator.model_version())


def main() -> None:
    """Joins the job of its place."""
    leave_on_signals()
    here = place()
    say(here.name, "starts", here.index, here.count, int(here.restarted), here.source)
    try:
        with moolink.Rpc(here.name) as rpc:
            rpc.connect(here.start_broker() or "")
            with moolink.Group(rpc, here.group or "alone") as group:
                accumulator = NumpyAccumulator("model", np.zeros(1000, np.float32), group)
                with accumulator:
                    accumulator.set_virtual_batch_size(1)
                    try:
                        train(here.name, accumulator, group, Path(sys.argv[1]) / "end")
                    except SystemExit:
                        say(here.name, "told")
                        raise
    finally:
        say(here.name, "left")


if __name__ == "__main__":
    main()
