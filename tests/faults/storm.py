"""Kills peers of a training group at random and keeps the books.

Every peer's contributions are one-hot vectors (one_hot_peer.py), so each peer's model tells which
contributions were delivered, and how often. After any number of kills: no entry above 1, every
peer's model the same at the same version, every contribution of a survivor delivered once, and the
named losses only of the dead.

    python -m tests.faults.storm --kills 200               peers, at random and at crash points
    python -m tests.faults.storm --broker-restarts 50      SIGKILL of the broker
    python -m tests.faults.storm --churn 600               joins and leaves every second
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import moolink
from tests.faults import one_hot_peer
from tests.faults.one_hot_peer import ENTRIES

# Peers are forked from a process that has imported torch: a second of CPU saved at each.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([one_hot_peer.__name__])

# Passed by every peer that joins, at once or soon, and by the leader alone.
JOINER_POINTS = ["announce.sent", "join", "flush.sent", "ready.sent", "offer.sent", "reduce.sent",
                 "slice.sent", "have.sent"]  # fmt: skip
LEADER_POINTS = ["resume.sent", "go.sent", "cut.sent", "snapshot.sent"]
TIMEOUT = 100.0  # seconds after which a step that takes one is a hang, on a busy machine too
CONTRIBUTIONS = 1000  # that a peer can make, unless it is to live longer


@dataclass
class Peer:
    """One peer process and what it has said."""

    slot: int
    entries: range  # of the model, one for each contribution
    process: ForkServerProcess
    stay: Connection[object, object]  # closed: the peer is to leave
    offered: int = 0
    delivered: set[int] = field(default_factory=set)
    versions: dict[int, frozenset[int]] = field(default_factory=dict)
    started_at: float = 0.0  # its process is up and asks to join
    contributed_at: float | None = None  # the first round with a contribution of its own
    version: int = 0  # of its last round
    last_round_at: float = 0.0
    longest_pause: float = 0.0  # between two rounds, since it was last looked at
    reader: threading.Thread | None = None
    rounds: int = 0
    states: int = 0  # snapshots received
    lost: set[tuple[str, int]] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        """Sends its process a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Storm:
    """A broker, some peers, and the books of what they delivered."""

    def __init__(
        self, peers: int, seed: int, contributions: int = CONTRIBUTIONS, device: str = "cpu"
    ) -> None:
        self.device = device  # of the peers' models
        self.random = random.Random(seed)
        self.broker = moolink.Broker(first=True)
        self.address = self.broker.listen("127.0.0.1:0")[0]
        self.events: queue.Queue[tuple[Peer, dict[str, Any]]] = queue.Queue()
        self.alive: list[Peer] = []
        self.dead: list[Peer] = []
        self.rounds: dict[int, frozenset[int]] = {}
        self.gaps: list[float] = []
        self.left: list[Peer] = []
        self.entries = 0  # of the model, given to peers
        for _ in range(peers):
            self.start(contributions=contributions)

    def start(self, crash_at: str | None = None, contributions: int = CONTRIBUTIONS) -> Peer:
        """Starts a peer, to die by itself at a crash point if one is named."""
        slot = len(self.alive) + len(self.dead) + len(self.left)
        entries = range(self.entries, self.entries + contributions)
        if entries.stop > ENTRIES:
            raise RuntimeError(f"the model has room for {ENTRIES} contributions")
        self.entries = entries.stop
        events, events_there = _processes.Pipe(duplex=False)
        stay_there, stay = _processes.Pipe(duplex=False)
        process = _processes.Process(
            target=one_hot_peer.main,
            args=(self.address, slot, entries, crash_at, self.device, events_there, stay_there),
        )
        process.start()
        events_there.close()  # so that the end of the process is the end of its events
        stay_there.close()
        peer = Peer(slot, entries, process, stay)
        self.alive.append(peer)
        peer.reader = threading.Thread(target=self._read, args=(peer, events), daemon=True)
        peer.reader.start()
        return peer

    def _read(self, peer: Peer, events: Connection[dict[str, Any], object]) -> None:
        with events:
            while True:
                try:
                    self.events.put((peer, events.recv()))
                except (EOFError, OSError):  # OSError: it was killed within a message
                    break
        self.events.put((peer, {"event": "end"}))

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Takes events until `done`; a hang is an error that shows where every peer stands."""
        deadline = time.monotonic() + TIMEOUT
        while not done():
            try:
                peer, event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                state = {p.slot: (p.rounds, p.process.exitcode) for p in self.alive}
                raise AssertionError(f"waited {TIMEOUT} s for {what}; peers: {state}") from None
            self._note(peer, event)

    def _note(self, peer: Peer, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                peer.started_at = event["at"]
            case "offer":
                peer.offered = event["k"]
            case "state":
                assert event["total"] == event["sum"], f"peer {peer.slot}: state {event}"
                peer.states += 1
            case "round":
                self._note_round(peer, event)
            case "end" if peer in self.alive:
                peer.process.join()
                if peer.process.exitcode not in (0, -signal.SIGKILL):
                    peer.errors.append(f"exit status {peer.process.exitcode}")

    def _note_round(self, peer: Peer, event: dict[str, Any]) -> None:
        if peer.rounds > 0:
            peer.longest_pause = max(peer.longest_pause, event["at"] - peer.last_round_at)
        peer.last_round_at, peer.rounds = event["at"], peer.rounds + 1
        peer.version = event["version"]
        if peer.contributed_at is None and f"peer-{peer.slot}" in event["contributors"]:
            peer.contributed_at = event["at"]
        indices = frozenset(event["indices"])
        known = self.rounds.setdefault(event["version"], indices)
        assert known == indices, f"round {event['version']} differs at peer {peer.slot}"
        assert event["worst"] <= 1.0, f"peer {peer.slot}: a contribution was delivered twice"
        assert event["total"] == event["sum"], f"peer {peer.slot}: counters and sum differ: {event}"
        assert event["batch_size"] == len(indices)
        peer.delivered |= indices
        peer.lost |= {(name, k) for name, k in event["lost"]}

    def _bury(self, peer: Peer) -> None:
        self.alive.remove(peer)
        self.dead.append(peer)

    def kill(self) -> None:
        """SIGKILLs a random peer and waits until every other one has delivered a new round."""
        victim = self.random.choice(self.alive)
        victim.process.kill()
        killed_at = time.monotonic()
        victim.process.join()
        self._bury(victim)
        self.progress(killed_at)

    def leave(self, peer: Peer) -> None:
        """Has a peer leave in order; its books are kept as those of the living."""
        peer.stay.close()
        self.until(lambda: peer.process.exitcode is not None, "a peer to leave")
        assert peer.process.exitcode == 0, f"peer {peer.slot}: {peer.process.exitcode}"
        assert peer.reader is not None
        peer.reader.join(TIMEOUT)
        self.alive.remove(peer)
        self.left.append(peer)

    def crash_joiner(self, point: str) -> None:
        """Starts a peer that dies when it passes the point, and waits as in kill()."""
        once = point in ("join", "flush.sent", "ready.sent")  # in the life of one that only joins
        passage = 1 if once else self.random.randint(1, 3)
        self._await_death(self.start(crash_at=f"{point}:{passage}"))

    def crash_leader(self, point: str) -> None:
        """Lets a peer that dies at the point become the leader, and waits as in kill()."""
        older = list(self.alive)
        victim = self.start(crash_at=point)
        self.settle()
        self.start()
        self.settle()
        for peer in older:
            peer.process.kill()
            peer.process.join()
            self._bury(peer)
        if point == "snapshot.sent":
            self.start()  # asks the new leader for a snapshot
        self._await_death(victim)
        self.start()
        self.start()
        self.settle()

    def _await_death(self, victim: Peer) -> None:
        victim.process.join(TIMEOUT)
        if victim.process.exitcode is None:
            self.until(self.events.empty, "the events before")
            books = [(p.slot, p.rounds, p.states, p.version) for p in self.alive]
            raise AssertionError(
                f"peer {victim.slot} passed no crash point; (slot, rounds, states, version) of the "
                f"living: {books}"
            )
        died_at = time.monotonic()
        assert victim.process.exitcode == -signal.SIGKILL
        self._bury(victim)
        self.progress(died_at)

    def listen_for(self, seconds: float) -> None:
        """Takes events for a while: how long a peer stays stopped is the test's input."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._note(*self.events.get(timeout=left))
            except queue.Empty:
                return

    def progress(self, since: float, besides: Peer | None = None) -> None:
        """Waits until every peer (but one, if given) has delivered a round cut after ``since``.

        The round after the newest one known may have been cut before, so the one after that counts.
        """
        self.until(self.events.empty, "the events before")
        waited = [peer for peer in self.alive if peer is not besides]
        after = max(self.rounds, default=0) + 1
        self.until(
            lambda: all(p.version > after and p.last_round_at > since for p in waited),
            "a new round at every survivor",
        )
        self.gaps.append(max(p.last_round_at for p in waited) - since)

    def settle(self) -> None:
        """Waits until every living peer takes part in rounds."""
        self.until(lambda: all(p.rounds > 0 for p in self.alive), "a first round at every peer")

    def finish(self, evicted: frozenset[str] | set[str] = frozenset()) -> dict[str, Any]:
        """Ends the peers in order and checks the books.

        Args:
            evicted: peers that live but were out of the group for a time: what they had offered
                then is theirs to lose.
        """
        for peer in self.alive:
            peer.stay.close()
        for peer in self.alive:
            peer.process.join(TIMEOUT)
            assert peer.process.exitcode == 0, f"peer {peer.slot}: {peer.process.exitcode}"
            assert peer.reader is not None
            peer.reader.join(TIMEOUT)
        self.until(self.events.empty, "the last events")
        self.broker.close()
        count: dict[int, int] = {}
        for indices in self.rounds.values():
            for index in indices:
                count[index] = count.get(index, 0) + 1
        assert all(times == 1 for times in count.values()), "a contribution is in two rounds"
        assert sorted(self.rounds) == list(range(min(self.rounds), max(self.rounds) + 1))
        # Who leaves takes along what is in no round yet.
        dead_names = {f"peer-{peer.slot}" for peer in [*self.dead, *self.left]} | evicted
        missing: list[tuple[int, int]] = []
        for peer in [*self.alive, *self.left]:
            assert not peer.errors, f"peer {peer.slot}: {peer.errors}"
            assert {name for name, _ in peer.lost} <= dead_names, f"lost: {peer.lost}"
            if f"peer-{peer.slot}" in evicted:
                continue
            # The last few may be under way when the group ends; none before them may be missing.
            present = [index in count for index in peer.entries[: peer.offered]]
            last = max((i for i, there in enumerate(present) if there), default=-1)
            missing += [(peer.slot, i + 1) for i in range(last) if not present[i]]
        assert not missing, f"contributions of survivors that no round holds: {missing}"
        joins = [
            peer.contributed_at - peer.started_at
            for peer in [*self.alive, *self.dead, *self.left]
            if peer.contributed_at is not None
        ]
        return {
            "kills": len(self.dead),
            "rounds": len(self.rounds),
            "contributions": len(count),
            "gap_ms_median": 1e3 * statistics.median(self.gaps) if self.gaps else 0.0,
            "gap_ms_worst": 1e3 * max(self.gaps, default=0.0),
            "joins": len(joins),
            "join_ms_median": 1e3 * statistics.median(joins) if joins else 0.0,
            "join_ms_worst": 1e3 * max(joins, default=0.0),
        }

    def abort(self) -> None:
        """Ends what still runs, after a failure."""
        for peer in self.alive:
            peer.process.kill()
            peer.process.join()
        self.broker.close()


def kills(number: int, peers: int, seed: int, device: str) -> dict[str, Any]:
    """Kills peers: every other time a random one, else at each crash point in turn."""
    storm = Storm(peers, seed, device=device)
    points = JOINER_POINTS * 3 + LEADER_POINTS
    try:
        storm.settle()
        for kill in range(number):
            if kill % 2 == 0:
                storm.kill()
                storm.start()
                storm.settle()
            elif (point := points[kill // 2 % len(points)]) in LEADER_POINTS:
                storm.crash_leader(point)
            else:
                storm.crash_joiner(point)
        return storm.finish()
    except BaseException:
        storm.abort()
        raise


class BrokerProcess:
    """A broker in a process of its own, to be killed and started again at one address."""

    def __init__(self, address: str) -> None:
        self._command = [sys.executable, "-m", "moolink.broker", address.removeprefix("tcp://")]
        self.start()

    def start(self) -> None:
        """Starts it and waits until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert "listens" in self._process.stdout.readline()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def broker_restarts(number: int, peers: int, seed: int) -> dict[str, Any]:
    """Kills the broker again and again: no round is lost, and none waits for it."""
    storm = Storm(peers, seed, contributions=ENTRIES // peers)
    pauses: list[float] = []
    broker: BrokerProcess | None = None
    try:
        storm.settle()
        storm.broker.close()
        broker = BrokerProcess(storm.address)
        storm.listen_for(3.0)  # the new one has heard all
        for _ in range(number):
            for peer in storm.alive:
                peer.longest_pause = 0.0
            broker.kill()
            storm.listen_for(storm.random.uniform(0.0, 1.0))
            broker.start()
            storm.listen_for(2.0)
            storm.progress(time.monotonic())
            pauses.append(max(peer.longest_pause for peer in storm.alive))
        figures = storm.finish()
    except BaseException:
        storm.abort()
        raise
    finally:
        if broker is not None:
            broker.kill()
    return {
        "restarts": number,
        "rounds": figures["rounds"],
        "contributions": figures["contributions"],
        "pause_ms_median": 1e3 * statistics.median(pauses),
        "pause_ms_worst": 1e3 * max(pauses),
    }


def churn(seconds: float, peers: int, seed: int, calm_seconds: float = 20.0) -> dict[str, Any]:
    """A peer joins and another leaves every second; how fast the others go on meanwhile."""
    storm = Storm(peers, seed, contributions=ENTRIES // (2 * peers))
    stable = list(storm.alive)

    def rate(during: Callable[[], None]) -> float:
        """Contributions a second of the slowest of those that stay."""
        before = [peer.offered for peer in stable]
        start = time.monotonic()
        during()
        elapsed = time.monotonic() - start
        return min(p.offered - n for p, n in zip(stable, before, strict=True)) / elapsed

    def join_and_leave() -> None:
        guests: list[Peer] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            second = time.monotonic() + 1.0
            guests.append(storm.start(contributions=200))
            if len(guests) > 2:
                storm.leave(guests.pop(0))
            storm.listen_for(second - time.monotonic())
        for guest in guests:
            storm.leave(guest)

    try:
        storm.settle()
        calm = rate(lambda: storm.listen_for(calm_seconds))
        stormy = rate(join_and_leave)
        storm.settle()
        figures = storm.finish()
    except BaseException:
        storm.abort()
        raise
    return {
        "joins": len(storm.left),
        "rounds": figures["rounds"],
        "contributions": figures["contributions"],
        "calm_per_s": calm,
        "churn_per_s": stormy,
        "ratio": stormy / calm,
        "join_ms_median": figures["join_ms_median"],
        "join_ms_worst": figures["join_ms_worst"],
    }


def main() -> None:
    """Prints the figures of one storm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kills", type=int, default=20)
    what.add_argument("--broker-restarts", type=int, metavar="N")
    what.add_argument("--churn", type=float, metavar="SECONDS")
    parser.add_argument("--device", default="cpu", help="of the models, with --kills")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device != "cpu" and (args.churn or args.broker_restarts):
        parser.error("--device is for --kills only")
    if args.broker_restarts:
        figures = broker_restarts(args.broker_restarts, args.peers, args.seed)
    elif args.churn:
        figures = churn(args.churn, args.peers, args.seed)
    else:
        figures = kills(args.kills, args.peers, args.seed, args.device)
    for name, value in figures.items():
        print(f"{name:16} {value:.2f}" if isinstance(value, float) else f"{name:16} {value}")


if __name__ == "__main__":
    main()
