"""Replay beside TorchRL's and cpprb's prioritised replay buffers, in one process.

    pip install torchrl cpprb
    python benchmarks/replay.py

Transitions of 28 KB (observation and next one of 84x84x4 uint8) and of 1 KB (of 128 float32). Each
library inserts single transitions and batches of 256, samples batches of 256 and sets their
priorities. All libraries take their turns in every round, so that other load on the machine hits
all alike; the buffers are full before the first round. The table has medians, and the best in
brackets.

    python benchmarks/replay.py --spill DIRECTORY --without TorchRL cpprb

also measures a replay that keeps its steps in a file in the directory.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

BATCH = 256
SIZES: dict[str, tuple[tuple[int, ...], str, int]] = {
    "28 KB": ((84, 84, 4), "uint8", 4096),
    "1 KB": ((128,), "float32", 1 << 17),
}
EXPONENT = 0.6
Transition = dict[str, Any]


class Buffer(Protocol):
    def insert(self, item: Transition) -> None: ...
    def extend(self, batch: Transition) -> None: ...
    def sample(self) -> Any: ...
    def update(self, priorities: np.ndarray[Any, Any]) -> None: ...


class Moolink:
    def __init__(
        self,
        capacity: int,
        example: Transition,
        arrays: Any = "numpy",
        spill: str | None = None,
    ) -> None:
        from moolink import Replay
        from moolink.replay import Prioritized, Table

        table = Table("t", capacity, Prioritized(EXPONENT))
        self.replay = Replay(table, arrays=arrays, spill=spill)

    def insert(self, item: Transition) -> None:
        self.replay.insert(item)

    def extend(self, batch: Transition) -> None:
        self.replay.extend(batch)

    def sample(self) -> Any:
        self.batch = self.replay.sample(BATCH)
        return self.batch.data, self.batch.weights(0.4)

    def update(self, priorities: np.ndarray[Any, Any]) -> None:
        self.replay.update_priorities(self.batch.keys, priorities)


class TorchRL:
    def __init__(self, capacity: int, example: Transition) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

        torch.set_num_threads(1)  # several threads slow each other down on a busy machine
        self.torch, self.dict = torch, TensorDict
        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=EXPONENT,
            beta=0.4,
            storage=LazyTensorStorage(capacity),
            batch_size=BATCH,
            priority_key="priority",
        )

    def _tensors(self, item: Transition) -> dict[str, Any]:
        return {name: self.torch.as_tensor(value) for name, value in item.items()}

    def insert(self, item: Transition) -> None:
        self.buffer.add(self.dict(self._tensors(item), batch_size=[]))

    def extend(self, batch: Transition) -> None:
        self.buffer.extend(self.dict(self._tensors(batch), batch_size=[BATCH]))

    def sample(self) -> Any:
        self.batch = self.buffer.sample()
        return self.batch

    def update(self, priorities: np.ndarray[Any, Any]) -> None:
        # TorchRL's tree reads only float32.
        self.batch["priority"] = self.torch.as_tensor(priorities, dtype=self.torch.float32)
        self.buffer.update_tensordict_priority(self.batch)


class Cpprb:
    def __init__(self, capacity: int, example: Transition) -> None:
        from cpprb import PrioritizedReplayBuffer

        shapes = {
            name: {"shape": value.shape or 1, "dtype": value.dtype}
            for name, value in example.items()
        }
        self.buffer = PrioritizedReplayBuffer(capacity, shapes, alpha=EXPONENT)

    def insert(self, item: Transition) -> None:
        self.buffer.add(**item)

    extend = insert

    def sample(self) -> Any:
        self.batch = self.buffer.sample(BATCH, beta=0.4)
        return self.batch

    def update(self, priorities: np.ndarray[Any, Any]) -> None:
        self.buffer.update_priorities(self.batch["indexes"], priorities)


def transition(shape: tuple[int, ...], dtype: str) -> Transition:
    random = np.random.default_rng(0)
    return {
        "observation": random.integers(0, 255, shape).astype(dtype),
        "action": np.asarray(3, np.int64),
        "reward": np.asarray(1.0, np.float32),
        "next_observation": random.integers(0, 255, shape).astype(dtype),
        "terminated": np.asarray(False),
    }


def timed(run: Callable[[], object], seconds: float) -> float:
    """Microseconds of one run."""
    count, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds or count < 3:
        run()
        count += 1
    return elapsed / count * 1e6


def measure(
    buffers: dict[str, Buffer], item: Transition, options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    batch = {name: np.stack([value] * BATCH) for name, value in item.items()}
    priorities = np.random.default_rng(1).random(BATCH) + 0.1
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, buffer in buffers.items():
            work: dict[str, Callable[[], object]] = {
                "insert one": lambda b=buffer: b.insert(item),
                "insert 256": lambda b=buffer: b.extend(batch),
                "sample 256": buffer.sample,
                "256 priorities": lambda b=buffer: b.update(priorities),
            }
            for what, run in work.items():
                row = found.setdefault(what, {}).setdefault(name, [])
                row.append(timed(run, options.seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one turn")
    parser.add_argument("--without", nargs="*", default=[], help="libraries that are left out")
    parser.add_argument("--spill", metavar="DIRECTORY", help="also a replay that spills to it")
    parser.add_argument("--times", type=int, default=1, help="multiplies the number of transitions")
    options = parser.parse_args()
    kinds: dict[str, Any] = {"moolink": Moolink, "TorchRL": TorchRL, "cpprb": Cpprb}
    if options.spill:
        kinds["spilled"] = functools.partial(Moolink, spill=options.spill)
    for size, (shape, dtype, least) in SIZES.items():
        capacity = options.times * least
        item = transition(shape, dtype)
        batch = {name: np.stack([value] * BATCH) for name, value in item.items()}
        buffers: dict[str, Buffer] = {}
        for name, kind in kinds.items():
            if name in options.without:
                continue
            buffers[name] = kind(capacity, item)
            for _ in range(capacity // BATCH):
                buffers[name].extend(batch)
        print(f"\n{size}, {capacity} transitions, µs " + "".join(f"{n:>20}" for n in buffers))
        for what, row in measure(buffers, item, options).items():
            cells = [f"{statistics.median(x):.1f} ({min(x):.1f})" for x in row.values()]
            print(f"{what:28}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
