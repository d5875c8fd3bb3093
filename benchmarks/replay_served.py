"""A served replay beside Reverb: one server, two writers and a learner, each a process.

    pip install 'dm-reverb[tensorflow]==0.14.0'  # on Python 3.11; adds the row of Reverb
    python -m benchmarks.replay_served --seconds 3 --turns 5

An item is one step of 28 KB (an observation of 84x84x4 uint8) or of 1 KB (256 float32), with an
action, a reward and a flag. Observations are random numbers. Tables are prioritised and full. A
batch has 256 items, and the learner reads one number of each. The writers and the learner run
together, as fast as they can. Then the learner runs alone. The row of memcpy copies a batch's bytes
out of as much memory as the table takes. All take turns in one run. Figures are medians.
"""

from __future__ import annotations

import abc
import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BATCH = 256
WRITERS = 2
EXPONENT = 0.6
SIZES: dict[str, tuple[tuple[int, ...], str, int]] = {
    "28 KB": ((84, 84, 4), "uint8", 8192),
    "1 KB": ((256,), "float32", 1 << 17),
}


def step_of(size: str) -> dict[str, Any]:
    shape, dtype, _ = SIZES[size]
    return {
        "observation": np.random.default_rng(0).integers(0, 255, shape).astype(dtype),
        "action": np.asarray(3, np.int64),
        "reward": np.asarray(1.0, np.float32),
        "terminated": np.asarray(False),
    }


def batch_bytes(size: str) -> int:
    return BATCH * sum(array.nbytes for array in step_of(size).values())


class System(abc.ABC):
    """A replay system: a method for the process of each role."""

    def __init__(self, size: str) -> None:
        self.step = step_of(size)
        self.capacity = SIZES[size][2]

    @abc.abstractmethod
    def serve(self) -> str:
        """Starts the server in this process; returns the address to which the others connect."""

    @abc.abstractmethod
    def write(self, address: str, name: str) -> Iterator[None]:
        """Inserts an item each time that it is advanced; `flush` waits for all items."""

    @abc.abstractmethod
    def flush(self) -> None: ...

    @abc.abstractmethod
    def sample(self, address: str, name: str) -> Iterator[Any]:
        """Yields the observations of a batch each time."""


class Moolink(System):
    def serve(self) -> str:
        import moolink
        from moolink.replay import Prioritized, Table

        table = Table("t", self.capacity, Prioritized(EXPONENT))
        self.peer = moolink.Rpc("server")
        self.server = moolink.ReplayServer(self.peer, moolink.Replay(table))
        return str(self.peer.listen("127.0.0.1:0")[0])

    def _client(self, address: str, name: str) -> Any:
        import moolink

        self.peer = moolink.Rpc(name)
        self.peer.connect(address)
        return moolink.ReplayClient(self.peer, server="server")

    def write(self, address: str, name: str) -> Iterator[None]:
        self.writer = self._client(address, name).writer(keep=1)
        while True:
            self.writer.append(self.step)
            history = self.writer.history
            self.writer.create_item({key: column[-1] for key, column in history.items()})
            yield

    def flush(self) -> None:
        self.writer.flush()

    def sample(self, address: str, name: str) -> Iterator[Any]:
        for batch in self._client(address, name).batches(BATCH):
            yield batch.data["observation"]


class Reverb(System):
    in_flight = 64  # items of a writer

    def serve(self) -> str:
        import reverb
        import tensorflow as tf

        signature = {
            key: tf.TensorSpec((1, *array.shape), array.dtype) for key, array in self.step.items()
        }
        table = reverb.Table(
            "t",
            sampler=reverb.selectors.Prioritized(EXPONENT),
            remover=reverb.selectors.Fifo(),
            max_size=self.capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        self.server = reverb.Server([table])
        return f"localhost:{self.server.port}"

    def write(self, address: str, name: str) -> Iterator[None]:
        import reverb

        self.writer = reverb.Client(address).trajectory_writer(num_keep_alive_refs=1)
        while True:
            self.writer.append(self.step)
            trajectory = {key: column[-1:] for key, column in self.writer.history.items()}
            self.writer.create_item("t", 1.0, trajectory)
            self.writer.flush(self.in_flight)
            yield

    def flush(self) -> None:
        self.writer.flush()

    def sample(self, address: str, name: str) -> Iterator[Any]:
        import reverb

        data = reverb.TrajectoryDataset.from_table_signature(
            address, "t", max_in_flight_samples_per_worker=2 * BATCH
        )
        for sample in data.batch(BATCH).prefetch(2).as_numpy_iterator():
            yield sample.data["observation"][:, 0]


SYSTEMS: dict[str, tuple[str, type[System]]] = {
    "moolink": ("moolink", Moolink),
    "Reverb": ("reverb", Reverb),
}


def play(role: str, system: System, address: str, name: str) -> None:
    """Runs a process that reads seconds, and writes items or batches a second, a line each time."""
    if role == "server":
        print(system.serve(), flush=True)
        sys.stdin.read()
        return
    turns = system.write(address, name) if role == "writer" else system.sample(address, name)
    for line in sys.stdin:
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() - begin < float(line):
            batch = next(turns)
            if batch is not None:
                batch.reshape(BATCH, -1)[:, 0].sum()
            count += 1
        if role == "writer":
            system.flush()
        print(count / (time.perf_counter() - begin), flush=True)


class Job:
    """The processes of a system."""

    def __init__(self, name: str, size: str) -> None:
        self._begun: list[subprocess.Popen[str]] = []
        self._arguments = ["--system", name, "--size", size]
        server = self._start("server", "")
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        self.writers = [self._start("writer", address, f"writer-{i}") for i in range(WRITERS)]
        self.learner = self._start("learner", address, "learner")
        inserted = 0.0
        while inserted < SIZES[size][2]:
            inserted += sum(self.run(self.writers, 0.5)) / 2

    def _start(self, role: str, address: str, name: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.replay_served", "--role", role]
        process = subprocess.Popen(
            [*command, *self._arguments, "--address", address, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._arguments[1] == "Reverb" else None,
            text=True,
        )
        self._begun.append(process)
        return process

    @staticmethod
    def run(processes: list[subprocess.Popen[str]], seconds: float) -> list[float]:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        return [float(p.stdout.readline()) for p in processes if p.stdout is not None]

    def close(self) -> None:
        for process in self._begun:
            process.kill()
            process.wait()


class Memory:
    """As much memory as the table's items take."""

    def __init__(self, size: str) -> None:
        self._items = np.ones((SIZES[size][2] // BATCH, batch_bytes(size)), np.uint8)
        self._batch = np.zeros(batch_bytes(size), np.uint8)

    def copies(self, seconds: float) -> float:
        """Returns the number of copies of a batch's bytes in a second."""
        count, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            np.copyto(self._batch, self._items[count % len(self._items)])
            count += 1
        return count / elapsed


def measure(size: str, names: list[str], options: argparse.Namespace) -> None:
    jobs: dict[str, Job] = {}
    memory = Memory(size)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in [*names, "memcpy"]}
    try:
        for name in names:
            jobs[name] = Job(name, size)
        for turn in range(options.turns + 1):  # the first turn warms the memory up
            for name, job in jobs.items():
                *writers, learner = job.run([*job.writers, job.learner], options.seconds)
                alone = job.run([job.learner], options.seconds)[0]
                rates = {"inserts": sum(writers), "sampled": learner, "sampled alone": alone}
                for what, rate in rates.items():
                    if turn > 0:
                        found[name].setdefault(what, []).append(rate)
            found["memcpy"].setdefault("sampled alone", []).append(memory.copies(0.3))
    finally:
        for job in jobs.values():
            job.close()
    print(f"\n{size}{'':10}inserts/s   sampled, MB/s   sampled alone, MB/s   ms a batch")
    for name, rates in found.items():
        median = {what: statistics.median(values) for what, values in rates.items()}
        megabytes = batch_bytes(size) / 1e6
        row = f"{name:15}"
        row += f"{median['inserts']:9,.0f}   " if "inserts" in median else " " * 12
        row += f"{median['sampled'] * megabytes:13,.0f}   " if "sampled" in median else " " * 16
        alone = median["sampled alone"]
        print(row + f"{alone * megabytes:19,.0f}   {1e3 / alone:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3, help="of one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--without", nargs="*", default=[], help="systems to leave out")
    for argument in ("--role", "--system", "--size", "--address", "--name"):
        parser.add_argument(argument, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        system = SYSTEMS[options.system][1](options.size)
        play(options.role, system, options.address, options.name)
        return
    names = [
        name
        for name, (module, _) in SYSTEMS.items()
        if name not in options.without and importlib.util.find_spec(module) is not None
    ]
    for size in options.sizes:
        measure(size, names, options)


if __name__ == "__main__":
    main()
