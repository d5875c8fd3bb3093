"""Whether peers hold no more after hours than after minutes.

    python tests/soak.py --minutes 20 [--seed 1] [--csv FILE] [--plot FILE]

Some peers live all the time and do at random what peers do: calls with small and large arguments,
lent memory, streams, cancelled and late calls, collectives that end and that do not, groups that
come and go (soak_peer.py). Others join, leave and are killed; the broker is killed and restarted.
Of those that live, resident memory, descriptors, threads and mapped segments must be flat after the
warm-up. Exits with status 1, and says what grew, if they are not.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUANTITIES = ("resident_mb", "descriptors", "threads", "segments")
# What the median of the last third may be above that of the first third after the warm-up.
SLACK = {"resident_mb": 12.0, "descriptors": 8.0, "threads": 2.0, "segments": 12.0}


@dataclass
class Life:
    """A peer process and what it has said."""

    name: str
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread | None = None

    def read(self) -> None:
        """Keeps its lines until its output ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def leave(self) -> int:
        """Has it end by itself; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -1


class Soak:
    """A broker, peers that live and peers that come and go."""

    def __init__(self, survivors: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.events: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.broker = self._broker("127.0.0.1:0")
        assert self.broker.stdout is not None
        self.address = self.broker.stdout.readline().split()[-1]  # "... listens on tcp://..."
        self.survivors = [self._peer(f"survivor {i}") for i in range(survivors)]
        self.mortals: list[Life] = []
        self.born = 0
        self.rows: list[dict[str, Any]] = []  # of judge()

    def _broker(self, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "moolink.broker", address, "--log-level", "error"]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def _peer(self, name: str) -> Life:
        seed = str(self.dice.randrange(1 << 30))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak_peer", name, self.address, seed],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        life = Life(name, process)
        life.reader = threading.Thread(target=life.read, daemon=True)
        life.reader.start()
        return life

    def event(self) -> None:
        """A peer joins or leaves."""
        kind = self.dice.choice(("join", "join", "leave", "kill", "broker"))
        if kind == "join" and len(self.mortals) < 2:
            self.born += 1
            self.mortals.append(self._peer(f"mortal {self.born}"))
        elif kind in ("leave", "kill") and self.mortals:
            mortal = self.mortals.pop(self.dice.randrange(len(self.mortals)))
            if kind == "kill":
                mortal.process.kill()
                mortal.process.wait()
            elif (status := mortal.leave()) != 0:
                self.faults.append(f"{mortal.name} ended with status {status}")
        elif kind == "broker":
            self.broker.send_signal(signal.SIGKILL)
            self.broker.wait()
            self.broker = self._broker(self.address)
        else:
            return
        self.events[kind] += 1

    def run(self, seconds: float, every: float) -> None:
        """Goes on for so long, with an event about every so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.faults:
            time.sleep(min(every * self.dice.uniform(0.5, 1.5), max(0.0, end - time.monotonic())))
            self.event()
            for life in self.survivors:
                if life.process.poll() is not None:
                    self.faults.append(f"{life.name} ended by itself: {life.process.returncode}")

    def finish(self) -> None:
        """Ends all of it."""
        for life in [*self.mortals, *self.survivors]:
            if (status := life.leave()) != 0:
                self.faults.append(f"{life.name} ended with status {status}")
        self.broker.kill()
        self.broker.wait()

    def judge(self, warm_up: float) -> list[dict[str, Any]]:
        """A row for each survivor and quantity; what is not flat is among the faults."""
        rows = []
        for life in self.survivors:
            warm = [line for line in life.lines if line["at"] >= warm_up]
            third = len(warm) // 3
            if third == 0:
                self.faults.append(f"{life.name} has said too little: {len(life.lines)} lines")
                continue
            for what in QUANTITIES:
                first = statistics.median(line[what] for line in warm[:third])
                last = statistics.median(line[what] for line in warm[-third:])
                rows.append(
                    {"peer": life.name, "what": what, "first": round(first, 1),
                     "last": round(last, 1), "most": round(max(line[what] for line in warm), 1)}
                )  # fmt: skip
                if last > first + SLACK[what]:
                    self.faults.append(f"{life.name}: {what} grew from {first} to {last}")
        return rows

    def deeds(self) -> dict[str, int]:
        """What the survivors have done, and the errors that they met."""
        total: collections.Counter[str] = collections.Counter()
        for life in self.survivors:
            if life.lines:
                total.update(life.lines[-1]["done"])
        return dict(sorted(total.items()))


def soak(seconds: float, seed: int = 1, warm_up: float | None = None, every: float = 3.0) -> Soak:
    """Runs one; look at its `faults`."""
    job = Soak(survivors=3, seed=seed)
    try:
        job.run(seconds, every)
    finally:
        job.finish()
    job.rows = job.judge(seconds / 4 if warm_up is None else warm_up)
    return job


def write_csv(job: Soak, path: Path) -> None:
    """What each survivor said, a line each second."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["peer", "at", *QUANTITIES])
        for life in job.survivors:
            for line in life.lines[::10]:
                writer.writerow([life.name, round(line["at"]), *(line[q] for q in QUANTITIES)])


def plot(job: Soak, path: Path) -> None:
    """A panel for each quantity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(QUANTITIES), figsize=(14, 3), constrained_layout=True)
    for axis, what in zip(axes, QUANTITIES, strict=True):
        for life in job.survivors:
            minutes = [line["at"] / 60 for line in life.lines]
            axis.plot(minutes, [line[what] for line in life.lines], linewidth=0.8, label=life.name)
        axis.set(title=what.replace("_mb", ", MB"), xlabel="minutes", ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Runs a soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    job = soak(options.minutes * 60, options.seed)
    print(f"{'peer':12} {'what':12} {'first':>8} {'last':>8} {'most':>8}")
    for row in job.rows:
        print(f"{row['peer']:12} {row['what']:12} {row['first']:8} {row['last']:8} {row['most']:8}")
    print("events:", dict(job.events))
    print("deeds and errors:", job.deeds())
    if options.csv:
        write_csv(job, options.csv)
    if options.plot:
        plot(job, options.plot)
    for fault in job.faults:
        print("FAULT:", fault)
    return 1 if job.faults else 0


if __name__ == "__main__":
    sys.exit(main())
