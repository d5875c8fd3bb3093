"""A torch and a JAX peer of the examples learn one game in one group, and each is killed.

    python -m tests.learning.mixed_job [--seconds 600] [--env-id ALE/Breakout-v5] [--kills 4]

SIGKILL of the leader, of the next leader, which is of the other framework, of one that follows, and
so on; each time the other one goes on alone, and who was killed comes back. In each round that two
processes both have had the gradients have the same bits and the contributors are the same, and so
are the parameters once they are the leader's. At the end both name the same checksum. Prints what
was seen, with the seconds from each death to the survivor's next round.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests import round_log
from tests.learning import processes
from tests.processes import kill_group
from tests.waiting import until

VICTIMS = ("leader", "leader", "follower")  # in turn
TIMEOUT = 300.0  # seconds for a framework to start on a busy machine
ENOUGH = 50  # rounds of both between two deaths


@dataclass
class Peer:
    framework: str
    name: str
    log: Path
    output: Path
    process: subprocess.Popen[str]
    killed: float = math.inf


@dataclass
class Job:
    """The peers of one group, and where they write."""

    address: str
    directory: Path
    options: list[str]
    peers: list[Peer] = field(default_factory=list)

    def start(self, framework: str, *options: str) -> Peer:
        """One more peer, with the results of its framework's peers before."""
        name = f"{framework}-{len(self.peers)}"
        log, output = self.directory / f"{name}.rounds", self.directory / f"{name}.output"
        with output.open("w") as file:
            process = processes.start(
                *["-m", "tests.learning.logged_peer", framework, str(log), *self.options],
                *["--connect", self.address, "--group", "mixed", "--name", name],
                *["--num-peers", "2", "--peer-index", str(len(self.peers))],
                *["--total-steps", "1000000000", "--save-dir", str(self.directory / framework)],
                *options,
                stdout=file,
            )
        self.peers.append(Peer(framework, name, log, output, process))
        return self.peers[-1]

    def wait_for_rounds(self, *peers: Peer) -> None:
        """Until these have contributed to enough rounds together, or one alone."""
        names = ",".join(sorted(peer.name for peer in peers))

        def enough() -> bool:
            for peer in peers:
                assert peer.process.poll() is None, peer.output.read_text()
            made = [line for line in round_log.lines(peers[0].log) if line.contributors == names]
            return len(made) >= (ENOUGH if len(peers) > 1 else 1)

        until(enough, f"rounds of {names}", poll=0.1, timeout=TIMEOUT)

    def kill(self, victim: Peer, survivor: Peer) -> float:
        """Returns the seconds to the survivor's next round."""
        victim.killed = time.monotonic()
        victim.process.kill()
        victim.process.wait()

        def pauses() -> list[float]:
            return round_log.alone_since(survivor.log, survivor.name, victim.killed)

        until(lambda: bool(pauses()), "a round of the survivor", poll=0.05, timeout=TIMEOUT)
        return pauses()[0]

    def check(self) -> tuple[int, int, int]:
        """Returns the rounds that two processes had, those with the leader's parameters at both,
        and those with contributions of both."""
        rounds = equal = both = 0
        for first in self.peers:
            for second in self.peers:
                if first.framework != "torch" or second.framework != "jax":
                    continue
                shared = round_log.rounds_of_both(first.log, second.log)
                rounds += len(shared)
                equal += round_log.check_equal(shared, min(first.killed, second.killed))
                both += sum("," in line.contributors for line, _ in shared)
        return rounds, equal, both


@contextlib.contextmanager
def job(directory: Path, options: list[str]) -> Iterator[Job]:
    with processes.broker() as address:
        made = Job(address, directory, options)
        try:
            yield made
        finally:
            for peer in made.peers:
                kill_group(peer.process.pid)
                peer.process.wait()


def ends(peers: tuple[Peer, Peer]) -> list[tuple[str, str]]:
    """Checksum and update at which they ended."""
    found = []
    for peer in peers:
        peer.process.wait(TIMEOUT)
        match = re.search(r"model (\w{16}) at update (\d+)", peer.output.read_text())
        assert match is not None, peer.output.read_text()
        found.append((match[1], match[2]))
    return found


def play(made: Job, seconds: float, kills: int) -> None:
    """Lets them learn, kills, and waits for the end, which comes at one round."""
    began = time.monotonic()
    leader = made.start("torch")
    made.wait_for_rounds(leader)
    follower = made.start("jax", *last_for(seconds, began) if kills == 0 else [])
    for i in range(kills):
        made.wait_for_rounds(leader, follower)
        time.sleep(max(0.0, began + seconds * (i + 1) / (kills + 1) - time.monotonic()))
        roles = {"leader": leader, "follower": follower}
        role = VICTIMS[i % len(VICTIMS)]
        victim = roles.pop(role)
        (leader,) = roles.values()
        pause = made.kill(victim, leader)
        print(
            f"{time.monotonic() - began:.0f} s: SIGKILL of the {role} {victim.name}, "
            f"{leader.name}'s next round {pause:.3f} s later",
            flush=True,
        )
        last = last_for(seconds, began) if i + 1 == kills else []
        follower = made.start(victim.framework, *last)
    first, second = ends((leader, follower))
    assert first == second, (first, second)
    print(f"both ended at update {first[1]} with the model {first[0]}")


def last_for(seconds: float, began: float) -> list[str]:
    """Options of a peer that ends the job when it is over."""
    return ["--max-seconds", str(max(15.0, began + seconds - time.monotonic()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--env-id", default="ALE/Breakout-v5")
    parser.add_argument("--kills", type=int, default=4)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        job(Path(directory), ["--env-id", options.env_id]) as made,
    ):
        play(made, options.seconds, options.kills)
        rounds, equal, both = made.check()
        print(
            f"{rounds} rounds at two processes, all with equal gradients and contributors; {equal} "
            f"with the leader's parameters at both, equal in all of them; {both} with "
            "contributions of both"
        )


if __name__ == "__main__":
    main()
