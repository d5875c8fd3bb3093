"""Requests of actors that an InferenceServer batches, beside plain calls of the same model.

    python -m benchmarks.inference --actors 64 --seconds 3 --turns 5
    python -m benchmarks.inference --model dense

The model is DQN's network for Atari games, on frames of 84x84x4 bytes, or a dense layer of 256
units on 84 float32 numbers. Both have a head for 6 actions, and run in torch with its default
number of threads. The actors are threads of two processes, each with one row a request. Plain calls
run the model on one row each. Both ways take turns in one run, with the model alone, in batches of
1 and of as many rows as there are actors: no server can gain more than it gains from batches.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import moolink

_PROCESSES = 2
_WARM_UP = 0.5  # seconds


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    nn = torch.nn
    if kind == "dense":
        return nn.Sequential(nn.Linear(84, 256), nn.ReLU(), nn.Linear(256, 6))
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6)),
    )


def inputs_of(kind: str) -> npt.NDArray[Any]:
    return np.ones((1, 84), np.float32) if kind == "dense" else np.ones((1, 4, 84, 84), np.uint8)


def act(address: str, name: str, count: int, inputs: npt.NDArray[Any]) -> None:
    """A process of actors; each line of its input is a way and seconds, each of its output a
    number of calls."""
    peer = moolink.Rpc(name)
    peer.connect(address)
    clients = [moolink.InferenceClient(peer, "batched", "server") for _ in range(count)]
    for line in sys.stdin:
        way, seconds = line.split()
        calls = [0] * count
        deadline = time.monotonic() + float(seconds)

        def run(i: int) -> None:
            while time.monotonic() < deadline:  # noqa: B023 - the threads end with the turn
                if way == "batched":  # noqa: B023
                    clients[i].infer(inputs)
                else:
                    peer.sync("server", "plain", inputs)
                calls[i] += 1  # noqa: B023

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(calls), flush=True)


def start_actors(options: argparse.Namespace, address: str) -> list[subprocess.Popen[str]]:
    """Starts the processes of the actors, which read from stdin what to do."""
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.inference"),
                *("--model", options.model),
                *("--act", address, f"actors-{i}", str(options.actors // _PROCESSES)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(_PROCESSES)
    ]


def rate_of(choose: Callable[[Any], Any], batch: Any, seconds: float) -> float:
    """Rows a second of the model alone, measured for a quarter of `seconds`."""
    rows, start = 0, time.monotonic()
    while time.monotonic() < start + seconds / 4:
        choose(batch)
        rows += len(batch)
    return rows / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", choices=["atari", "dense"], default="atari")
    parser.add_argument("--act", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.act:
        act(options.act[0], options.act[1], int(options.act[2]), inputs_of(options.model))
        return

    model = make_model(options.model)

    def choose(inputs: Any) -> Any:
        with torch.no_grad():
            rows = torch.from_numpy(inputs)
            return model(rows / 255 if rows.dtype == torch.uint8 else rows).argmax(1)

    peer = moolink.Rpc("server")
    peer.define("plain", choose)
    started = start_actors(options, peer.listen("127.0.0.1:0")[0])

    def turn(way: str, seconds: float) -> float:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{way} {seconds}\n")
            process.stdin.flush()
        return sum(int(p.stdout.readline()) for p in started if p.stdout is not None) / seconds

    def model_alone(size: int) -> float:
        return rate_of(choose, np.concatenate([inputs_of(options.model)] * size), options.seconds)

    ways: dict[str, Callable[[], float]] = {
        "batched": lambda: turn("batched", options.seconds),
        "plain": lambda: turn("plain", options.seconds),
        "model, all rows": lambda: model_alone(options.actors),
        "model, one row": lambda: model_alone(1),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    try:
        # The model is not compiled, so it takes batches of any size.
        buckets = range(1, options.actors + 1)
        with moolink.InferenceServer(
            peer, "batched", lambda batch: choose(batch.inputs), buckets=buckets
        ) as server:
            for way in ("batched", "plain"):
                turn(way, _WARM_UP)
            for _ in range(options.turns):
                for way, measure in ways.items():
                    rates[way].append(measure())
            stats = server.stats()
    finally:
        for process in started:
            process.kill()
            process.wait()
        peer.close()
    batched, single, rows, row = (statistics.median(of_way) for of_way in rates.values())
    print(
        f"{options.actors} actors: {batched:,.0f} requests/s in batches of "
        f"{stats['rows'] / stats['batches']:.1f}; plain calls: {single:,.0f}/s; "
        f"ratio {batched / single:.2f}; the model alone: {rows:,.0f} rows/s in batches of "
        f"{options.actors}, {row:,.0f} in batches of 1, ratio {rows / row:.2f}"
    )


if __name__ == "__main__":
    main()
