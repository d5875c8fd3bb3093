"""Real processes, killed and stopped in the middle of training; the books must balance."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.storm import JOINER_POINTS, LEADER_POINTS, Storm, broker_restarts, churn
from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def storm() -> Iterator[Storm]:
    """Three peers in training; whatever is left of them is killed at the end."""
    storm = Storm(peers=3, seed=1)
    try:
        storm.settle()
        yield storm
    finally:
        storm.abort()


def test_kills_at_random(storm: Storm) -> None:
    for _ in range(10):
        storm.kill()
        storm.start()
        storm.settle()
    figures = storm.finish()
    assert figures["kills"] == 10


def test_death_of_a_joining_peer_at_every_crash_point(storm: Storm) -> None:
    for point in JOINER_POINTS:
        storm.crash_joiner(point)
    assert storm.finish()["kills"] == len(JOINER_POINTS)


@pytest.mark.parametrize(
    "point",
    [
        point
        if point in ("cut.sent", "snapshot.sent")
        else pytest.param(point, marks=pytest.mark.nightly)
        for point in LEADER_POINTS
    ],
)
def test_death_of_the_leader_at_a_crash_point(storm: Storm, point: str) -> None:
    storm.crash_leader(point)
    storm.finish()


def test_a_stop_of_two_seconds_evicts_nobody(storm: Storm) -> None:
    stopped = storm.alive[1]
    states = stopped.states
    stopped.signal(signal.SIGSTOP)
    try:
        storm.listen_for(2.0)
    finally:
        stopped.signal(signal.SIGCONT)
    storm.progress(time.monotonic())
    assert stopped.states == states, "it was evicted: it had to fetch the state again"
    storm.finish()


def test_a_stop_of_ten_seconds_evicts_and_the_peer_rejoins_with_equal_bits(storm: Storm) -> None:
    stopped = storm.alive[1]
    states = stopped.states
    stopped.signal(signal.SIGSTOP)
    try:
        others = [peer for peer in storm.alive if peer is not stopped]
        storm.listen_for(10.0)
        rounds = [peer.rounds for peer in others]
        storm.until(
            lambda: all(p.rounds > n for p, n in zip(others, rounds, strict=True)),
            "rounds without the stopped peer",
        )
    finally:
        stopped.signal(signal.SIGCONT)
    storm.until(lambda: stopped.states > states, "a new state at the peer that was evicted")
    storm.progress(time.monotonic())
    storm.finish(evicted={f"peer-{stopped.slot}"})


def test_training_goes_on_without_the_broker_and_joins_wait_for_its_return(storm: Storm) -> None:
    address = storm.address.removeprefix("tcp://")
    storm.broker.close()
    storm.progress(time.monotonic())
    newcomer = storm.start()
    storm.progress(time.monotonic(), besides=newcomer)
    assert newcomer.rounds == 0
    broker = subprocess.Popen(
        [sys.executable, "-m", "moolink.broker", address], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        storm.settle()
        storm.progress(time.monotonic())
        storm.finish()
    finally:
        broker.terminate()
        assert broker.wait(timeout=PROCESS_LIMIT) == 0


def test_kills_of_the_broker_lose_no_round() -> None:
    assert broker_restarts(2, peers=2, seed=1)["restarts"] == 2  # the books balance


def test_peers_that_come_and_go_lose_no_contribution_of_the_others() -> None:
    assert churn(4.0, peers=2, seed=1, calm_seconds=1.0)["joins"] > 0  # the books balance
