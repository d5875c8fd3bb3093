"""all_reduce on one host: moolink beside torch.distributed's gloo and mpi4py, interleaved.

    python benchmarks/allreduce.py                        2 and 4 processes, 4 B to 256 MB
    python benchmarks/allreduce.py --processes 2 --sizes 4K 1M 64M --rounds 9
    python benchmarks/allreduce.py --quick                whether everything runs

Every system has processes of its own, which wait in the kernel while it is not their turn. In each
round each system does some all_reduces of each size and dtype; who begins changes from round to
round, so that other load on the machine hits all alike. Before each all_reduce the processes meet
in a barrier of the system's own; the time is that of the slowest process, the CPU time the mean of
all. Figures are medians over all trials of all rounds.

`moolink` and `gloo` reduce torch tensors: moolink out of place, gloo in place, as it always does.
`moolink-inplace` reduces in place what moolink.empty() has made. `moolink-jit` is a compiled JAX
function that is moolink.jax.all_reduce alone, and `jax-gloo` one that is a psum over the processes
of jax.distributed, with JAX's gloo collectives; both into memory that XLA gets for the result.
`copy` is no all_reduce but what the machine allows: all processes copy that many bytes at the same
time. mpi4py is taken if it is
importable and there is an mpiexec: both come with moolink[bench-mpi], which brings Open MPI. (As
root that wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.)
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "results" / "allreduce.png"
SIZES = ["4", "4K", "64K", "1M", "16M", "64M", "256M"]
SYSTEMS = ["moolink", "moolink-inplace", "gloo", "mpi4py", "moolink-jit", "jax-gloo", "copy"]
IN_JAX = ("moolink-jit", "jax-gloo")
TIMEOUT = 120.0  # seconds for one answer

# A system's part in a process: a barrier, and one all_reduce of ones that returns the result.
Barrier = Callable[[], None]
Reduce = Callable[[Any], Any]


def size_of(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


# --- a process


def joined(rpc: Any, name: str, rank: int, count: int, broker: str) -> Any:
    """A group of so many members, who are called `name-RANK-of-COUNT`."""
    import moolink

    group = moolink.Group(rpc, f"{name}-{count}")
    group.set_timeout(TIMEOUT)  # a process that a busy machine does not run is not dead
    # Before the broker hears of this peer: a sort order that comes later begins another epoch.
    group.set_sort_order(rank)
    rpc.connect(broker)
    names = [f"{name}-{other}-of-{count}" for other in range(count)]
    while group.members() != names:
        time.sleep(0.01)
        group.update()
    group.barrier("begin", on_change="retry").result(TIMEOUT)
    return group


@contextlib.contextmanager
def moolink_system(
    rank: int, count: int, broker: str, in_place: bool
) -> Iterator[tuple[Barrier, Reduce]]:
    import moolink

    name = "in-place" if in_place else "out-of-place"
    with moolink.Rpc(f"{name}-{rank}-of-{count}") as rpc:
        group = joined(rpc, name, rank, count, broker)
        yield (
            lambda: group.barrier("barrier", on_change="retry").result(TIMEOUT),
            lambda tensor: group.all_reduce("x", tensor, inplace=in_place).result(TIMEOUT),
        )


@contextlib.contextmanager
def gloo_system(rank: int, count: int, store: str) -> Iterator[tuple[Barrier, Reduce]]:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)

    def reduce(tensor: Any) -> Any:
        distributed.all_reduce(tensor)
        return tensor

    yield distributed.barrier, reduce


@contextlib.contextmanager
def mpi_system() -> Iterator[tuple[Barrier, Reduce]]:
    from mpi4py import MPI

    def reduce(tensor: Any) -> Any:
        import torch

        result = torch.empty_like(tensor)
        MPI.COMM_WORLD.Allreduce(tensor.numpy(), result.numpy())
        return result

    yield MPI.COMM_WORLD.Barrier, reduce


@contextlib.contextmanager
def jit_system(rank: int, count: int, broker: str) -> Iterator[tuple[Barrier, Reduce]]:
    import jax

    import moolink
    import moolink.jax

    with moolink.Rpc(f"jit-{rank}-of-{count}") as rpc:
        group = joined(rpc, "jit", rank, count, broker)
        reduce = jax.jit(lambda array: moolink.jax.all_reduce(group, "x", array))
        yield (
            lambda: group.barrier("barrier", on_change="retry").result(TIMEOUT),
            lambda array: reduce(array).block_until_ready(),
        )


@contextlib.contextmanager
def jax_gloo_system(rank: int, count: int, meet: str) -> Iterator[tuple[Barrier, Reduce]]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(meet, count, rank)
    mesh, each = Mesh(np.array(jax.devices()), ("peers",)), PartitionSpec("peers")
    psum = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "peers"), mesh=mesh, in_specs=each, out_specs=PartitionSpec()
        )
    )

    def whole(mine: Any) -> Any:
        """An array of this process and the others' are one for JAX, of which each has its part."""
        shape = (count * mine.shape[0],)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, each), [mine])

    known: dict[str, Any] = {}  # the array that was reduced last, of which all trials are

    def reduce(array: Any) -> Any:
        if known.get("array") is not array:
            known.update(array=array, whole=whole(array))
        return psum(known["whole"]).block_until_ready().addressable_data(0)

    one = whole(jax.numpy.ones(1))
    yield (lambda: psum(one).block_until_ready()), reduce
    jax.distributed.shutdown()


@contextlib.contextmanager
def copy_system() -> Iterator[tuple[Barrier, Reduce]]:
    import torch

    kept: dict[int, Any] = {}

    def reduce(tensor: Any) -> Any:
        target = kept.setdefault(tensor.nbytes, torch.empty_like(tensor))
        return target.view(tensor.dtype).copy_(tensor)

    yield (lambda: None), reduce


def ones(system: str, count: int, dtype: str) -> Any:
    if system in IN_JAX:
        import jax

        return jax.numpy.ones(count, dtype)
    import torch

    if system != "moolink-inplace":
        return torch.ones(count, dtype=getattr(torch, dtype))
    import moolink

    return moolink.empty(count, dtype, arrays="torch").fill_(1)


def trials(system: str, barrier: Barrier, reduce: Reduce, order: dict[str, Any]) -> dict[str, Any]:
    """Does as many all_reduces as one order says."""
    tensor = ones(system, order["elements"], order["dtype"])
    wall, cpu = [], []
    for trial in range(order["trials"] + 1):
        if system not in IN_JAX:  # arrays of JAX cannot be written
            tensor.fill_(1)
        barrier()
        began, used = time.perf_counter(), time.process_time()
        result = reduce(tensor)
        if trial > 0:  # the first one warms memory up
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        expected = 1 if system == "copy" else order["processes"]
        if not (result[:: max(1, len(result) // 1000)] == expected).all():
            return {"error": "a wrong result"}
        del result
    return {"wall": wall, "cpu": cpu}


def process(options: argparse.Namespace) -> None:
    """One process of one system: orders come and figures go through a socket."""
    import torch

    torch.set_num_threads(1)
    system, count = options.system, options.processes[0]
    rank = options.rank
    if system == "mpi4py":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    meet = options.meet
    systems: dict[str, Callable[[], Any]] = {
        "moolink": lambda: moolink_system(rank, count, meet, in_place=False),
        "moolink-inplace": lambda: moolink_system(rank, count, meet, in_place=True),
        "gloo": lambda: gloo_system(rank, count, meet),
        "mpi4py": mpi_system,
        "moolink-jit": lambda: jit_system(rank, count, meet),
        "jax-gloo": lambda: jax_gloo_system(rank, count, meet),
        "copy": copy_system,
    }
    with (
        systems[system]() as (barrier, reduce),
        socket.create_connection(("127.0.0.1", options.port)) as line,
    ):
        orders = line.makefile("r")
        line.sendall(b"{}\n")
        for text in orders:
            order = json.loads(text)
            try:
                answer = trials(system, barrier, reduce, order)
            except Exception as e:  # noqa: BLE001 - a dtype that this system does not have
                answer = {"error": f"{type(e).__name__}: {e}".splitlines()[0][:200]}
            line.sendall(json.dumps(answer).encode() + b"\n")


# --- the one that measures


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class System:
    """The processes of one system."""

    def __init__(self, name: str, count: int, broker: str) -> None:
        self.name = name
        meet = broker
        if name.endswith("gloo"):
            meet = f"{'tcp://' if name == 'gloo' else ''}127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[tuple[socket.socket, Any]] = []
        try:
            self._start(name, count, meet)
        except BaseException:
            self.close(wait=0)
            raise

    def _start(self, name: str, count: int, meet: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT)
            command = [sys.executable, __file__, "--system", name, "--processes", str(count)]
            command += ["--port", str(server.getsockname()[1]), "--meet", meet]
            if name == "mpi4py":
                launch = ["mpiexec", "--oversubscribe", "-n", str(count), *command, "--rank", "-1"]
                self._processes = [subprocess.Popen(launch)]
            else:
                self._processes = [
                    subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(count)
                ]
            for _ in range(count):
                line = server.accept()[0]
                line.settimeout(TIMEOUT)
                self._lines.append((line, line.makefile("r")))
        for _, answers in self._lines:
            answers.readline()

    def measure(self, order: dict[str, Any]) -> tuple[list[float], list[float]]:
        """The time of the slowest process of each trial, and the mean CPU time of all."""
        for line, _ in self._lines:
            line.sendall(json.dumps(order).encode() + b"\n")
        answers = [json.loads(answers.readline() or "{}") for _, answers in self._lines]
        for answer in answers:
            if "wall" not in answer:
                raise RuntimeError(answer.get("error", "a process ended"))
        wall = [max(trial) for trial in zip(*(answer["wall"] for answer in answers), strict=True)]
        cpu = [statistics.mean(trial) for trial in zip(*(a["cpu"] for a in answers), strict=True)]
        return wall, cpu

    def close(self, wait: float = 20) -> None:
        for line, answers in self._lines:
            answers.close()
            line.close()
        for one in self._processes:
            try:
                one.wait(wait)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


Key = tuple[int, str, int, str]  # processes, dtype, bytes, system
Figures = dict[Key, tuple[list[float], list[float]]]


def missing(system: str) -> str:
    if system == "mpi4py":
        if find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        if shutil.which("mpiexec") is None:
            return "there is no mpiexec"
    if system in IN_JAX and find_spec("jax") is None:
        return "jax is not installed"
    return ""


def measure(count: int, options: argparse.Namespace, broker: str, figures: Figures) -> None:
    systems: list[System] = []
    sizes = [size_of(text) for text in options.sizes]
    try:
        for name in options.systems:
            if reason := missing(name):
                print(f"{name} is left out: {reason}")
            else:
                systems.append(System(name, count, broker))
        for number in range(options.rounds):
            for dtype in options.dtypes:
                for size in sizes:
                    first = number % len(systems)
                    for system in [*systems[first:], *systems[:first]]:
                        one_turn(system, count, dtype, size, options, figures)
    finally:
        for system in systems:
            system.close()


def one_turn(
    system: System, count: int, dtype: str, size: int, options: argparse.Namespace, figures: Figures
) -> None:
    key = (count, dtype, size, system.name)
    if key in figures and not figures[key][0]:
        return  # it cannot
    item = 2 if dtype == "bfloat16" else 4
    order = {
        "elements": max(1, size // item),
        "dtype": dtype,
        "processes": count,
        "trials": max(2, min(options.trials, (256 << 20) // size)),
    }
    wall, cpu = figures.setdefault(key, ([], []))
    try:
        more = system.measure(order)
    except RuntimeError as e:
        print(f"{system.name} does not do {dtype}: {e}")
        return
    wall += more[0]
    cpu += more[1]


# --- what was seen


def text_of(size: int) -> str:
    for unit, bytes_ in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= bytes_:
            return f"{size // bytes_} {unit}"
    return f"{size} B"


def print_tables(figures: Figures) -> None:
    tables: dict[tuple[int, str], dict[int, dict[str, Any]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for (count, dtype, size, system), (wall, cpu) in figures.items():
        if wall:
            tables[count, dtype][size][system] = (
                1e3 * statistics.median(wall),
                1e3 * statistics.median(cpu),
            )
    for (count, dtype), rows in tables.items():
        names = [name for name in SYSTEMS if any(name in row for row in rows.values())]
        print(f"\n{count} processes, {dtype}: ms (CPU ms a process)")
        print(f"{'':>8}" + "".join(f"{name:>25}" for name in names) + "   of gloo: out, in place")
        for size, row in rows.items():
            cells = [f"{row[n][0]:.3f} ({row[n][1]:.3f})" if n in row else "" for n in names]
            ratios = [
                f"{row[name][0] / row['gloo'][0]:.3f}" if name in row and "gloo" in row else "-"
                for name in ("moolink", "moolink-inplace")
            ]
            line = f"{text_of(size):>8}" + "".join(f"{cell:>25}" for cell in cells)
            print(line + "   " + ", ".join(ratios))


def write_csv(figures: Figures, path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        head = ["processes", "dtype", "bytes", "system", "median_ms", "best_ms", "cpu_ms", "trials"]
        writer.writerow(head)
        for key, (wall, cpu) in figures.items():
            if wall:
                times = (statistics.median(wall), min(wall), statistics.median(cpu))
                writer.writerow([*key, *(f"{1e3 * t:.5f}" for t in times), len(wall)])


def draw(figures: Figures, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = sorted({key[0] for key in figures})
    figure, plots = pyplot.subplots(1, len(counts), figsize=(6.5 * len(counts), 5), squeeze=False)
    for plot, count in zip(plots[0], counts, strict=True):
        for system in SYSTEMS:
            points = sorted(
                (key[2], 1e3 * statistics.median(wall))
                for key, (wall, _) in figures.items()
                if key[0] == count and key[1] == "float32" and key[3] == system and wall
            )
            if points:
                style = ":" if system == "copy" else "-"
                plot.loglog(*zip(*points, strict=True), style, marker="o", label=system)
        plot.set_title(f"all_reduce of float32, {count} processes")
        plot.set_xlabel("bytes")
        plot.set_ylabel("ms, median")
        plot.grid(alpha=0.3)
        plot.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes, with K or M")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=100, help="of a turn, at most")
    parser.add_argument("--quick", action="store_true", help="one short round, no picture")
    parser.add_argument("--png", type=Path, help=f"picture and CSV (default {PICTURE.name})")
    for hidden in ("--system", "--meet"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        return process(options)
    if options.quick:
        options.rounds, options.trials, options.sizes = 1, 3, ["4", "64K", "1M"]
        options.processes = options.processes[:1]
    import moolink

    figures: Figures = {}
    with moolink.Broker() as broker:
        address = broker.listen("127.0.0.1:0")[0]
        for count in options.processes:
            measure(count, options, address, figures)
    print_tables(figures)
    print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {platform.platform()}")
    picture = options.png or (None if options.quick else PICTURE)
    if picture is not None:
        draw(figures, picture)
        write_csv(figures, picture.with_suffix(".csv"))
        print(f"{picture} and {picture.with_suffix('.csv').name} written")
    return None


if __name__ == "__main__":
    main()
