"""One gradient round between peers: moolink's accumulator beside gloo, interleaved in one run.

Both do the same work on the same parameters: every peer contributes a gradient and ends with the
mean in ``.grad``. gloo's share is what a user writes by hand: flatten, all_reduce, scale, copy
back.

    python benchmarks/accumulator.py --peers 2 --parameters 1700000

"busy" is the CPU time of the user's thread outside of ``wait``: gathering, taking over the result.
"copy" is the CPU time of what nothing can do without: all peers at once copy their gradients into
one flat array.

    python benchmarks/accumulator.py --views

writes the gradients into the bucket that is sent (``gradient_as_bucket_view``). As without it, the
time of writing does not count.

    python benchmarks/accumulator.py --overlap 20

waits for 20 ms before each contribution, as a host does for its accelerator, with one round under
way at a time and with two: then a round is reduced while the next gradient is computed.

    python benchmarks/accumulator.py --device cuda

keeps parameters and gradients on the device; gloo reduces a copy in unpinned host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

SHAPES = {  # about 1.69 M parameters: the Nature network with four stacked frames and 6 actions
    "nature": [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,), (512, 3136),
               (512,), (6, 512), (6,), (1, 512), (1,)],
}  # fmt: skip


def parameters(count: int, device: str) -> list[torch.Tensor]:
    """Returns parameters with gradients: the Nature shapes, or one tensor of ``count`` elements."""
    shapes = SHAPES["nature"] if count == 0 else [(count,)]
    leaves = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    return leaves


def copy_gradients(leaves: list[torch.Tensor], flat: torch.Tensor) -> None:
    """Into memory that is there."""
    offset = 0
    for leaf in leaves:
        flat[offset : offset + leaf.numel()].copy_(leaf.grad.view(-1))
        offset += leaf.numel()


def gloo_round(leaves: list[torch.Tensor], peers: int) -> None:
    """Flatten, all_reduce in host memory, scale, copy back."""
    gathered = torch.cat([leaf.grad.reshape(-1) for leaf in leaves])
    flat = gathered.cpu()  # already there: no copy
    torch.distributed.all_reduce(flat)
    flat = flat.to(gathered.device).div_(peers)
    offset = 0
    for leaf in leaves:
        leaf.grad.copy_(flat[offset : offset + leaf.numel()].view_as(leaf))
        offset += leaf.numel()


def finish(device: str) -> None:
    """Waits for the work of this process on the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def peer(args: argparse.Namespace) -> None:
    """One peer's process; peer 0 prints the times as JSON."""
    import moolink

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{args.gloo_port}",
        rank=args.peer,
        world_size=args.peers,
    )
    mine = parameters(args.parameters, args.device)
    with moolink.Rpc(f"peer-{args.peer}") as rpc:
        rpc.connect(args.broker)
        group = moolink.Group(rpc, "benchmark")
        accumulator = moolink.Accumulator(
            "model", mine, group=group, checksum_every=0, gradient_as_bucket_view=args.views
        )
        accumulator.set_virtual_batch_size(args.peers)

        until = Until(group, accumulator)
        until(lambda: accumulator.connected() and len(group.members()) == args.peers)
        # The leader goes on serving newcomers until all have its state.
        ready = group.all_reduce("ready", 1, on_change="retry")
        until(ready.done)
        if args.overlap:
            figures = {n: overlap(accumulator, until, args, n) for n in (1, 2)}
        else:
            figures = rounds(accumulator, until, args, mine)
        if args.peer == 0:
            print(json.dumps(figures))
        accumulator.close()


class Until:
    """Serves the accumulator until a condition holds.

    Attributes:
        waited: CPU time of this thread within wait(), where it may carry messages, in seconds.
    """

    def __init__(self, group, accumulator) -> None:
        self._group = group
        self._accumulator = accumulator
        self.waited = 0.0

    def __call__(self, ready) -> None:
        self._update()
        while not ready():
            if self._accumulator.wants_state():
                self._accumulator.set_state(None)
            if self._accumulator.has_new_state():
                self._accumulator.state()
            before = time.thread_time()
            self._accumulator.wait(1.0)
            self.waited += time.thread_time() - before
            self._update()

    def _update(self) -> None:
        self._group.update()
        self._accumulator.update()


def rounds(accumulator, until: Until, args: argparse.Namespace, mine) -> dict[str, Any]:
    """Measures moolink's rounds and gloo's in turn; returns their times in ms."""
    theirs = parameters(args.parameters, args.device)
    flat = torch.zeros(sum(leaf.numel() for leaf in mine), device=args.device)
    times: dict[str, list[float]] = {"moolink": [], "gloo": []}
    cpu: dict[str, list[float]] = {"moolink": [], "gloo": []}
    busy: list[float] = []
    copy: list[float] = []
    for trial in range(args.trials + 5):
        for system in ("moolink", "gloo"):
            finish(args.device)
            torch.distributed.barrier()
            wall, used = time.perf_counter(), time.process_time()
            mine_used, until.waited = time.thread_time(), 0.0
            if system == "moolink":
                until(accumulator.wants_gradients)
                if args.views:  # backward() would write them here
                    before, thread = time.perf_counter(), time.thread_time()
                    for leaf in mine:
                        leaf.grad.fill_(1.0)
                    finish(args.device)
                    wall += time.perf_counter() - before
                    used += time.thread_time() - thread
                    mine_used += time.thread_time() - thread
                accumulator.reduce_gradients(1)
                until(accumulator.has_gradients)
            else:
                gloo_round(theirs, args.peers)
            finish(args.device)
            if trial >= 5:  # the first ones warm pages up
                times[system].append(1e3 * (time.perf_counter() - wall))
                cpu[system].append(1e3 * (time.process_time() - used))
                if system == "moolink":
                    busy.append(1e3 * (time.thread_time() - mine_used - until.waited))
            if system == "gloo":
                torch.distributed.barrier()
                used = time.thread_time()
                copy_gradients(theirs, flat)
                finish(args.device)
                if trial >= 5:
                    copy.append(1e3 * (time.thread_time() - used))
            else:
                assert accumulator.get_gradient_stats()["num_gradients"] == args.peers
                accumulator.zero_gradients()
                for leaf in [] if args.views else mine:
                    leaf.grad.fill_(1.0)
    torch.distributed.barrier()
    return {"wall_ms": times, "cpu_ms": cpu, "busy_ms": busy, "copy_ms": copy}


def overlap(accumulator, until: Until, args: argparse.Namespace, parallel: int) -> float:
    """Returns ms a round when each contribution takes ``args.overlap`` ms to compute."""
    accumulator.set_parallel_gradients(parallel)
    accumulator.set_virtual_batch_size(args.peers)
    rounds = 0
    start = None
    while rounds < args.trials:
        until(lambda: accumulator.has_gradients() or accumulator.wants_gradients())
        if accumulator.has_gradients():
            accumulator.zero_gradients()
            rounds += 1
            if rounds == args.trials // 5:
                start = time.perf_counter()
            continue
        time.sleep(1e-3 * args.overlap)
        accumulator.reduce_gradients(1)
    return 1e3 * (time.perf_counter() - start) / (args.trials - args.trials // 5)


def free_port() -> int:
    """Returns a port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Starts a broker and the peers, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=0, help="elements; 0: the Nature network")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--overlap", type=float, default=0, help="ms of computing a contribution")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the model")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--broker", help=argparse.SUPPRESS)
    parser.add_argument("--gloo-port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        peer(args)
        return

    import moolink

    with moolink.Broker() as broker:
        address = broker.listen("127.0.0.1:0")[0]
        command = [sys.executable, __file__, f"--peers={args.peers}", f"--broker={address}",
                   f"--parameters={args.parameters}", f"--trials={args.trials}",
                   f"--overlap={args.overlap}", f"--device={args.device}",
                   *(["--views"] if args.views else []),
                   f"--gloo-port={free_port()}"]  # fmt: skip
        children = [
            subprocess.Popen(
                [*command, f"--peer={index}"],
                stdout=subprocess.PIPE if index == 0 else None,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for index in range(args.peers)
        ]
        output, _ = children[0].communicate(timeout=600)
        codes = [child.wait(timeout=60) for child in children]
    if any(codes):
        sys.exit(f"a peer failed: exit codes {codes}")
    report(args, json.loads(output))


def report(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Prints the table."""
    count = sum(leaf.numel() for leaf in parameters(args.parameters, "cpu"))
    if args.overlap:
        for parallel, milliseconds in figures.items():
            print(
                f"{args.overlap:g} ms a contribution, {parallel} round(s) under way: "
                f"{milliseconds:.2f} ms a round"
            )
        return
    print(
        f"{args.peers} peers, {count:,} float32 parameters ({args.device}), {args.trials} rounds "
        "each, interleaved"
    )
    print(f"{'system':10} {'p50 ms':>8} {'p90 ms':>8} {'best ms':>8} {'cpu ms':>8}")
    for system, values in figures["wall_ms"].items():
        ordered = sorted(values)
        print(
            f"{system:10} {statistics.median(values):8.2f} {ordered[int(0.9 * len(ordered))]:8.2f} "
            f"{ordered[0]:8.2f} {statistics.median(figures['cpu_ms'][system]):8.2f}"
        )
    medians = {system: statistics.median(values) for system, values in figures["wall_ms"].items()}
    print(
        f"moolink / gloo: {medians['moolink'] / medians['gloo']:.2f} (medians; below 1 is faster)"
    )
    busy, copy = (statistics.median(figures[name]) for name in ("busy_ms", "copy_ms"))
    print(f"the user's thread, busy: {busy:.2f} ms a round (median); a bare copy: {copy:.2f} ms")
    if args.json:
        args.json.write_text(
            json.dumps({"peers": args.peers, "parameters": count, "device": args.device, **figures})
        )


if __name__ == "__main__":
    main()
