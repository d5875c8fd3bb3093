"""Batcher beside np.stack and torch.stack: items of three leaves into batches of 32.

    python benchmarks/batcher.py

The rivals are given lists of items that stay as they are until the batch is full; the Batcher
captures each item when it is added, as its user needs when items are views of an EnvPool's memory
(then the rivals need a copy of each item: the rows "copy +").
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moolink import Batcher

SIZE = 32
SHAPES = {"84x84x4 uint8": ((84, 84, 4), np.uint8), "1 MB float32": ((512, 512), np.float32)}

Item = dict[str, Any]


def items(shape: tuple[int, ...], dtype: type, library: str) -> list[Item]:
    """Makes one batch's items; each has memory of its own."""
    made: list[Item] = [
        {
            "obs": np.full(shape, i, dtype),
            "reward": np.array(i, np.float32),
            "done": np.array(i > 7),
        }
        for i in range(SIZE)
    ]
    if library == "torch":
        made = [{key: torch.from_numpy(leaf) for key, leaf in item.items()} for item in made]
    return made


def batcher(given: list[Item]) -> Callable[[], Item]:
    target = Batcher(SIZE)

    def run() -> Item:
        for item in given:
            target.stack(item)
        batch: Item = target.get()
        return batch

    return run


def stack(given: list[Item], library: Any, copy: bool) -> Callable[[], Item]:
    def run() -> Item:
        kept = given
        if copy:
            kept = [
                {key: library.asarray(leaf).copy() if library is np else leaf.clone()
                 for key, leaf in item.items()}
                for item in given
            ]  # fmt: skip
        return {key: library.stack([item[key] for item in kept]) for key in kept[0]}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="of one turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, (shape, dtype) in SHAPES.items():
        print(f"\n{title:24} {'items/s':>10} {'best':>10}")
        numpy_items, torch_items = items(shape, dtype, "numpy"), items(shape, dtype, "torch")
        runs = {
            "Batcher, numpy": batcher(numpy_items),
            "np.stack": stack(numpy_items, np, copy=False),
            "copy + np.stack": stack(numpy_items, np, copy=True),
            "Batcher, torch": batcher(torch_items),
            "torch.stack": stack(torch_items, torch, copy=False),
            "copy + torch.stack": stack(torch_items, torch, copy=True),
        }
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.turns):
            for name, run in runs.items():
                count, begin = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - begin) < options.seconds:
                    run()
                    count += SIZE
                rates[name].append(count / elapsed)
        for name, found in rates.items():
            print(f"{name:24} {statistics.median(found):>10,.0f} {max(found):>10,.0f}")


if __name__ == "__main__":
    main()
