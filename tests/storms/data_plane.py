"""Kills processes of the data plane at random, restarts them, and checks the guarantees.

    python -m tests.storms.data_plane weights --kills 1000
    python -m tests.storms.data_plane items --kills 1000

Weights: a publisher with subscribers that claim to be on three hosts, publishers of a sharded tree
with a subscriber, and a parameter server with clients. No tree is torn, and no subscriber's version
goes back. Items: a replay and a trajectory queue, each with writers. Each item is taken at most
once, and items leave the replay in their writer's order. Items that a writer has flushed are taken
even if the writer dies.

After every BETWEEN_CALMS kills comes a calm: dead processes are restarted, and each process must
make progress.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import moolink
from tests.storms import roles
from tests.storms.roles import MARKS, RANKS, Life

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([roles.__name__])

TIMEOUT = 60.0  # seconds after which a step that should take a moment counts as a hang
BETWEEN_CALMS = 25  # kills
RARELY = 0.15  # weight of killing a process whose death may lose items; others have weight 1
UNNOTICED = 0.5  # seconds for which other processes may not notice a death
Role = tuple[Callable[..., None], tuple[Any, ...]]

WEIGHTS: dict[str, Role] = {
    "publisher": (roles.publisher, ()),
    "near": (roles.subscriber, (None,)),
    "far-p": (roles.subscriber, ("p",)),
    "also-p": (roles.subscriber, ("p",)),
    "far-q": (roles.subscriber, ("q",)),
    **{f"rank-{i}": (roles.rank, (i,)) for i in range(RANKS)},
    "sharded": (roles.sharded_subscriber, ()),
    "parameter-server": (roles.parameter_server, ()),
    "client-0": (roles.parameter_client, ()),
    "client-1": (roles.parameter_client, ()),
}
ITEMS: dict[str, Role] = {
    "replay": (roles.replay_server, ()),
    "sampler": (roles.sampler, ()),
    "writer-0": (roles.replay_writer, ()),
    "writer-1": (roles.replay_writer, ()),
    "learner": (roles.learner, ()),
    "actor-0": (roles.actor, ()),
    "actor-1": (roles.actor, ()),
}
CASTS = {"weights": WEIGHTS, "items": ITEMS}
# Roles that must make progress: they get a new version, or an item of theirs is taken.
FOLLOWERS = {roles.subscriber, roles.sharded_subscriber, roles.parameter_client}
FOLLOWERS |= {roles.replay_writer, roles.actor}
# Processes whose death may lose items, with the kind of the writers of these items.
LOSERS = {"replay": "writer", "sampler": "writer", "learner": "actor"}


@dataclasses.dataclass
class Flushed:
    """Items of a writer that were accepted, all made at `since` or later."""

    writer: str
    marks: set[int]  # of the items that are not taken yet
    since: float
    count: int


@dataclasses.dataclass
class Running:
    """A running process."""

    name: str
    number: int  # of the process's life
    process: ForkServerProcess
    events: Connection[Any, Any]
    stay: Connection[Any, Any]
    newest: float = 0.0  # when the last version it got, or the last item taken from it, was made


class Storm:
    """Starts and kills processes, and records the events that they send."""

    def __init__(self, cast: dict[str, Role], seed: int) -> None:
        self.random = random.Random(seed)
        self.cast = cast
        self.hub = moolink.Rpc("hub")
        self.address = self.hub.listen("127.0.0.1:0")[0]
        self.alive: dict[str, Running] = {}
        self.lives = 0
        self.taken: set[int] = set()
        self.last_sampled: dict[int, int] = {}  # mark, by the writer's life
        self.open: list[Flushed] = []
        self.lost_at = dict.fromkeys(("writer", "actor"), 0.0)
        self.counts = dict.fromkeys(("kills", "versions", "taken", "flushed"), 0)
        for name in cast:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a process: its next life."""
        self.lives += 1
        role, arguments = self.cast[name]
        events, events_there = _processes.Pipe(duplex=False)
        stay_there, stay = _processes.Pipe(duplex=False)
        life = Life(self.address, name, self.lives, events_there)
        process = _processes.Process(target=roles.main, args=(role, life, arguments, stay_there))
        process.start()
        events_there.close()  # so that reading its events ends when the process does
        stay_there.close()
        self.alive[name] = Running(name, self.lives, process, events, stay)

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL, and reads the events that it had sent."""
        self.alive[name].process.kill()
        self._read_to_the_end(name)

    def _read_to_the_end(self, name: str) -> None:
        victim = self.alive.pop(name)
        with contextlib.suppress(EOFError, OSError):  # OSError: it was killed within a message
            while True:
                self._note(victim, *victim.events.recv())
        victim.process.join()
        assert victim.process.exitcode == -signal.SIGKILL, f"{name}: {victim.process.exitcode}"
        self.counts["kills"] += 1
        victim.events.close()
        victim.stay.close()
        if name in LOSERS:
            self.lost_at[LOSERS[name]] = time.monotonic()
            self._note_losses()

    def listen(self, seconds: float) -> None:
        """Reads events for some time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready = wait([one.events for one in self.alive.values()], left)
            for one in list(self.alive.values()):
                if one.events in ready:
                    self._read(one)

    def calm(self) -> None:
        """Restarts dead processes, and waits until each process has made progress."""
        since = time.monotonic()
        deadline = since + TIMEOUT
        while late := self._late(since):
            for name in sorted(self.cast.keys() - self.alive.keys()):
                self.start(name)
            assert time.monotonic() < deadline, f"waited {TIMEOUT} s for {late}"
            self.listen(0.05)

    def _late(self, since: float) -> list[str]:
        waited = [
            name
            for name, (role, _) in self.cast.items()
            if role in FOLLOWERS and (name not in self.alive or self.alive[name].newest <= since)
        ]
        return waited + [f"{one.marks} of {one.writer}" for one in self.open if one.since <= since]

    def _read(self, one: Running) -> None:
        try:
            while one.events.poll():
                self._note(one, *one.events.recv())
        except (EOFError, OSError):
            self._read_to_the_end(one.name)

    def _note(self, one: Running, event: str, *values: Any) -> None:
        if event == "error":
            raise AssertionError(f"{one.name}, life {one.number}: {values[0]}")
        if event == "version":
            one.newest = values[0]
            self.counts["versions"] += 1
        elif event == "taken":
            self._note_taken(one, *values)
        else:
            first, last, since = values
            marks = set(range(first, last + 1)) - self.taken
            self.open.append(Flushed(one.name, marks, since, last + 1 - first))
            self._note_losses()

    def _note_taken(self, one: Running, marks: list[int], made: list[float]) -> None:
        for mark, at in zip(marks, made, strict=True):
            life = mark // MARKS
            assert mark not in self.taken, f"{one.name} took item {mark} again"
            self.taken.add(mark)
            if one.name == "sampler":  # trajectory writers have several calls under way: no order
                before = self.last_sampled.get(life, -1)
                assert mark > before, f"item {mark} was sampled after {before}"
                self.last_sampled[life] = mark
            for flushed in self.open:
                flushed.marks.discard(mark)
            for writer in self.alive.values():
                if writer.number == life:
                    writer.newest = at
        self.counts["taken"] += len(marks)
        self._note_losses()

    def _note_losses(self) -> None:
        """Drops items that may be lost with the process that accepted them."""
        kept = [
            one
            for one in self.open
            if one.since > self.lost_at[one.writer.partition("-")[0]] + UNNOTICED
        ]
        self.counts["flushed"] += sum(one.count for one in kept if not one.marks)
        self.open = [one for one in kept if one.marks]

    def end(self) -> dict[str, int]:
        """Ends all processes without a kill; returns the counts."""
        for one in self.alive.values():
            one.stay.close()
        for one in self.alive.values():
            one.process.join(TIMEOUT)
            # Writers kill themselves now and then.
            ended = one.process.exitcode in (0, -signal.SIGKILL)
            assert ended, f"{one.name}: {one.process.exitcode}"
        self.hub.close()
        return self.counts

    def abort(self) -> None:
        """Kills the processes that still run after a failure."""
        for one in self.alive.values():
            one.process.kill()
            one.process.join()
        self.hub.close()


def run(cast: dict[str, Role], kills: int, seed: int = 0) -> dict[str, int]:
    """Kills processes at random points; returns the counts."""
    storm = Storm(cast, seed)
    try:
        storm.calm()
        next_calm = BETWEEN_CALMS
        while storm.counts["kills"] < kills:
            storm.listen(storm.random.uniform(0, 0.15))
            names = sorted(storm.alive)
            weights = [RARELY if name in LOSERS else 1.0 for name in names]
            storm.kill(*storm.random.choices(names, weights))
            for name in sorted(cast.keys() - storm.alive.keys()):
                if storm.random.random() < 0.6:
                    storm.start(name)
            if storm.counts["kills"] >= min(next_calm, kills):
                next_calm += BETWEEN_CALMS
                storm.calm()
        return storm.end()
    except BaseException:
        storm.abort()
        raise


def main() -> None:
    """Runs a storm and prints its counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cast", choices=list(CASTS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    counts = run(CASTS[args.cast], args.kills, args.seed)
    for name, value in {**counts, "seconds": round(time.monotonic() - begun)}.items():
        print(f"{name:10} {value}")


if __name__ == "__main__":
    main()
