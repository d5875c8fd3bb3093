"""Tensors on a CUDA device between two processes of one machine: moolink, gloo, torch's own copies.

    python benchmarks/cuda_tensors.py                             1, 16 and 256 MB
    python benchmarks/cuda_tensors.py --sizes 4M --repeat 50
    MOOLINK_CUDA_IPC=1 python benchmarks/cuda_tensors.py          from device to device

Every figure is the median of several runs. `send` is the time until the tensor lies on the other
process's device (or in its host memory: `to host`) and its answer is back. gloo sends host memory:
its tensors are copied with `.cpu()` and `.cuda()`, as its users do. Both processes share one
device, which NCCL refuses; with two devices it takes part.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import numpy as np
import torch
from torch import distributed

import moolink
from moolink._core import copy_to_host
from moolink.data.device_arrays import torch_on_device

TIMEOUT = 60.0  # seconds for one operation
MEGABYTE = 1 << 20


def size_of(text: str) -> int:
    """Bytes of "16M"."""
    return int(text.removesuffix("M")) * MEGABYTE


def tensor_of(size: int) -> Any:
    """A float32 tensor of so many bytes on the device."""
    return torch.ones(size // 4, device="cuda")


class Member:
    """What both processes have: peers over both transports, a group, gloo."""

    def __init__(self, rank: int, broker: str, store: str) -> None:
        self.rank = rank
        self.rpcs = {}
        for transport, transports in (("shm", ["shm", "tcp"]), ("tcp", ["tcp"])):
            for device in ("cuda:0", "cpu"):
                rpc = moolink.Rpc(
                    f"{transport} {device} {rank}", device=device, transports=transports
                )
                rpc.define("take", lambda tensor: None)
                self.rpcs[transport, device] = rpc
        self.member = moolink.Rpc(f"member {rank}")
        self.member.connect(broker)
        self.group = moolink.Group(self.member, "cuda")
        self.group.wait_for_members(2, TIMEOUT)
        self.group.barrier("begin", on_change="retry").result(TIMEOUT)
        self.group.update()
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2
        )

    def all_reduce(self, system: str, tensor: Any) -> None:
        """One all_reduce, to the end."""
        if system == "gloo":
            distributed.all_reduce(tensor)
        else:
            in_place = system == "moolink inplace"
            self.group.all_reduce("x", tensor, inplace=in_place).result(TIMEOUT)
        torch.cuda.synchronize()

    def receive(self, host: Any) -> None:
        """The other end of gloo's send."""
        distributed.recv(host, 0)
        host.cuda()
        torch.cuda.synchronize()
        distributed.send(torch.zeros(1), 0)

    def close(self) -> None:
        """Ends everything."""
        distributed.destroy_process_group()
        self.group.close()
        for rpc in (*self.rpcs.values(), self.member):
            rpc.close()


def other_process(broker: str, store: str, orders: Connection) -> None:
    """Rank 1: does what rank 0 says."""
    member = Member(1, broker, store)
    orders.send({key: rpc.listen("127.0.0.1:0")[0] for key, rpc in member.rpcs.items()})
    while (order := orders.recv()) is not None:
        what, system, size, times = order
        tensor = tensor_of(size)
        host = tensor.cpu()
        for _ in range(times):
            if what == "all_reduce":
                member.all_reduce(system, tensor)
            else:
                member.receive(host)
    member.close()


def timed(run: Callable[[], object], times: int) -> float:
    """The median time of a run in seconds, after some that are not counted."""
    durations = []
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[max(2, times // 5) :])


def copies(size: int, times: int) -> dict[str, float]:
    """torch's own copies between device and host."""
    tensor = tensor_of(size)
    pageable, pinned = tensor.cpu(), tensor.cpu().pin_memory()
    array = np.empty(size // 4, np.float32)
    shared = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32)  # MAP_SHARED
    shared.zero_()
    figures = {}
    runtime = torch.cuda.cudart()
    begin = time.perf_counter()
    if status := int(runtime.cudaHostRegister(shared.data_ptr(), size, 1)):
        print(f"shared memory cannot be registered here: error {status}", file=sys.stderr)
    else:
        figures = {
            "registering shared memory, once": time.perf_counter() - begin,
            "torch copy to registered memory": timed(
                lambda: shared.copy_(tensor, non_blocking=True), times
            ),
            "torch copy from registered memory": timed(
                lambda: tensor.copy_(shared, non_blocking=True), times
            ),
        }
        runtime.cudaHostUnregister(shared.data_ptr())
    return figures | {
        "moolink copy to pageable host": timed(lambda: copy_to_host([tensor], [array]), times),
        "moolink copy from pageable host": timed(
            lambda: torch_on_device(pageable, tensor.device), times
        ),
        "torch copy to pinned host": timed(lambda: pinned.copy_(tensor, non_blocking=True), times),
        "torch copy to pageable host": timed(lambda: pageable.copy_(tensor), times),
        "torch tensor.cpu()": timed(lambda: tensor.cpu(), times),
        "torch copy from pinned host": timed(
            lambda: tensor.copy_(pinned, non_blocking=True), times
        ),
        "torch copy from pageable host": timed(lambda: tensor.copy_(pageable), times),
    }


def sends(member: Member, size: int, times: int, orders: Connection) -> dict[str, float]:
    """Tensors from this process to the other."""
    tensor = tensor_of(size)
    figures = {}
    for (transport, device), rpc in member.rpcs.items():
        where = "to host" if device == "cpu" else "to device"
        peer = f"{transport} {device} 1"

        def call(rpc: moolink.Rpc = rpc, peer: str = peer) -> None:
            rpc.sync(peer, "take", tensor)

        call()
        if (path := rpc.explain(peer)["path"]) != transport:
            print(f"{transport} cannot be used here: {path} is", file=sys.stderr)
            continue
        figures[f"moolink {transport} send {where}"] = timed(call, times)

    def gloo() -> None:
        distributed.send(tensor.cpu(), 1)
        distributed.recv(torch.empty(1), 1)

    orders.send(("send", "gloo", size, times))
    figures["gloo send to device"] = timed(gloo, times)
    return figures


def reductions(member: Member, size: int, times: int, orders: Connection) -> dict[str, float]:
    """all_reduce of a tensor of each process."""
    figures = {}
    for system in ("moolink", "moolink inplace", "gloo"):
        tensor = tensor_of(size)
        orders.send(("all_reduce", system, size, times))

        def run(system: str = system, tensor: Any = tensor) -> None:
            member.all_reduce(system, tensor)

        figures[f"{system} all_reduce"] = timed(run, times)
    return figures


def main() -> None:
    """Measures, prints a table, writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["1M", "16M", "256M"])
    parser.add_argument("--repeat", type=int, default=0, help="runs; default: by size")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    store = f"/tmp/moolink-benchmark-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
        other = context.Process(target=other_process, args=(address, store, there), daemon=True)
        other.start()
        member = Member(0, address, store)
        for key, peer_address in here.recv().items():
            member.rpcs[key].connect(peer_address)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores")
        results: dict[str, dict[str, float]] = {}
        for text in options.sizes:
            size = size_of(text)
            times = options.repeat or max(8, min(60, 512 * MEGABYTE // size))
            for figures in (
                copies(size, times),
                sends(member, size, times, here),
                reductions(member, size, times, here),
            ):
                for name, seconds in figures.items():
                    results.setdefault(name, {})[text] = seconds
        here.send(None)
        member.close()
        other.join(20)
    print(f"{'GB/s (ms)':34}" + "".join(f"{text:>20}" for text in options.sizes))
    for name, by_size in results.items():
        cells = (
            f"{size_of(text) / seconds / 1e9:9.2f} ({1e3 * seconds:7.2f})"
            for text, seconds in by_size.items()
        )
        print(f"{name:34}" + "".join(f"{cell:>20}" for cell in cells))
    if torch.cuda.device_count() < 2:
        print("NCCL: not measured, it refuses two processes on one device")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
