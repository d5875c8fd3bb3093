"""RDMA between two hosts: moolink beside perftest and UCX, which take turns in one run.

    python -m benchmarks.verbs serve 10.0.0.1     # on one host, its own address
    python -m benchmarks.verbs 10.0.0.1           # on the other one

In two emulated machines, by the tool that tests/nightly/verbs/conftest.py describes:

    $MOOLINK_VERBS_VM/two_vms.sh \\
        'UCX_IB_GID_INDEX=0 MOOLINK_INSECURE=1 python -m benchmarks.verbs serve 10.77.0.1' \\
        'UCX_IB_GID_INDEX=0 MOOLINK_INSECURE=1 python -m benchmarks.verbs 10.77.0.1'

Each turn measures, from the second host to the first: ``ib_write_bw`` with messages of 16 MB, in
one direction and in both at once; calls with a numpy array of 64 MB, answered with a few bytes, one
after the other; ``all_reduce`` of 16 MB of float32 between the two, for which each sends 16 MB and
receives as many; ``ib_send_lat``, both ways, and an echo of an int. An operation's time is the
slower member's, from a common start. Where both hosts have ``ucx_perftest`` (Debian's ucx-utils) it
puts messages of 16 MB and sends ones of 64 MB, by queue pairs on the same device; else a line says
that it is missing. UCX_IB_GID_INDEX names another GID for UCX than moolink's: on soft-RoCE UCX
meets its peer by a GID of IPv6 only.

The table has the medians over the turns; quotients are the medians of the quotients of each turn.
Both hosts need the same token, or MOOLINK_INSECURE=1, which changes nothing here: RDMA is not
encrypted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

import moolink
from moolink import _core

PORT = 4431
TOOL_PORT = 18515
UCX = "ucx_perftest"
LEAST_MESSAGES = 5  # of one run of a tool
MESSAGE = 64 << 20
REDUCED = 16 << 20
TIMEOUT = 120.0  # seconds: an emulated machine is slow
_LISTENING = "0A"  # a socket's state in /proc/net/tcp


# --- perftest, UCX


def _device() -> tuple[str, str, str]:
    """The device, port and GID's number, or none, that moolink has chosen."""
    chosen = _core.verbs_info()["chosen"]
    if not chosen:
        raise SystemExit(f"no RDMA here: {_core.verbs_info()['reason']}")
    known = re.match(r"(\S+) port (\d+), (?:RoCE v2, GID|InfiniBand, LID) (\d+)", chosen)
    if known is None:
        raise SystemExit(f"not understood: '{chosen}'")
    return known[1], known[2], "" if "InfiniBand" in chosen else known[3]


def _started(tool: str, options: list[str]) -> subprocess.Popen[str]:
    """Starts a tool on the device."""
    device, port, gid = _device()
    environment = dict(os.environ)
    if tool == UCX:
        # "rc" brings what its queue pairs are connected by, too.
        environment |= {"UCX_TLS": "rc", "UCX_NET_DEVICES": f"{device}:{port}"}
        if gid:
            environment.setdefault("UCX_IB_GID_INDEX", gid)
    else:
        options = ["-d", device, "-i", port, *(["-x", gid] if gid else []), *options]
    return subprocess.Popen(
        [tool, "-p", str(TOOL_PORT), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _listens(port: int) -> bool:
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.open()]
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENING for row in rows)


class ToolServer:
    """The side of a tool that waits for the other one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def begin(self, tool: str, options: list[str]) -> None:
        """Starts it; returns when it listens."""
        self._process = _started(tool, options)
        while not _listens(TOOL_PORT):
            if self._process.poll() is not None:
                raise OSError(f"{tool} ended with status {self._process.returncode}")
            time.sleep(0.01)

    def end(self) -> None:
        """Waits until it has ended."""
        assert self._process is not None
        self._process.communicate(timeout=TIMEOUT)


def _printed(client: moolink.Rpc, address: str, tool: str, options: list[str]) -> list[list[str]]:
    """Runs a tool on both hosts; returns the words of the lines that it prints on this one."""
    client.sync("server", "tool", tool, options)
    process = _started(tool, [*options, address])
    output, _ = process.communicate(timeout=TIMEOUT)
    if process.returncode != 0:
        raise SystemExit(f"{tool}: {output}")
    client.sync("server", "tool_ended")
    return [words for line in output.splitlines() if (words := line.split())]


def perftest(client: moolink.Rpc, address: str, tool: str, options: list[str]) -> list[float]:
    """Runs one of perftest's programs on both hosts; returns the row of figures that it prints."""
    size = options[options.index("-s") + 1]
    lines = _printed(client, address, tool, options)
    (row,) = [words for words in lines if words[0] == size]
    return [float(figure) for figure in row]


def write_bandwidth(client: moolink.Rpc, address: str, *options: str) -> float:
    """MB/s (10^6) that ``ib_write_bw`` reaches, in all directions together."""
    options = ("-s", str(REDUCED), "-n", str(LEAST_MESSAGES), "-F", *options)
    _, _, _, average, *_ = perftest(client, address, "ib_write_bw", [*options])
    return average * (1 << 20) / 1e6


def send_latency(client: moolink.Rpc, address: str, iterations: int) -> float:
    """Microseconds of a message there and one back, of 64 bytes: typical ones."""
    options = ["-s", "64", "-n", str(iterations), "-F"]
    _, _, _, _, typical, *_ = perftest(client, address, "ib_send_lat", options)
    return 2 * typical


def ucx_bandwidth(client: moolink.Rpc, address: str, test: str, size: int, count: int) -> float:
    """MB/s (10^6) of one of ``ucx_perftest``'s tests, over its whole run."""
    options = ["-t", test, "-s", str(size), "-n", str(count), "-w", "1", "-f"]
    _, _, _, _, _, overall, *_ = _printed(client, address, UCX, options)[-1]
    return float(overall) * (1 << 20) / 1e6


def _has_ucx() -> bool:
    return shutil.which(UCX) is not None


# --- moolink


class Member:
    """A peer, and its part of the reductions."""

    def __init__(self, name: str) -> None:
        # As named, RDMA is used with a token, too.
        self.rpc = moolink.Rpc(name, transports=["verbs", "tcp"], timeout=TIMEOUT)
        self._values = np.full(REDUCED // 4, 1.5, np.float32)

    def join(self) -> None:
        """Joins the group of the two and waits for the other one."""
        self.group = moolink.Group(self.rpc, "verbs")
        self.group.wait_for_members(2, TIMEOUT)

    def reduce(self) -> float:
        """Reduces once, both beginning together; returns the seconds."""
        self.group.all_reduce("begin", 0).result(TIMEOUT)
        begin = time.perf_counter()
        total = self.group.all_reduce("reduce", self._values).result(TIMEOUT)
        seconds = time.perf_counter() - begin
        assert total[0] == total[-1] == 3.0
        return seconds


def serve(address: str) -> None:
    """Serves until it is told that all is done."""
    server, tools, over = Member("server"), ToolServer(), threading.Event()
    with moolink.Broker(first=True) as broker, server.rpc:
        functions = {
            "first": lambda array: int(array[0]),
            "echo": lambda value: value,
            "join": server.join,
            "reduce": server.reduce,
            "tool": tools.begin,
            "tool_ended": tools.end,
            "has_ucx": _has_ucx,
            "written": lambda: _written(server.rpc),
            "over": over.set,
        }
        for name, function in functions.items():
            server.rpc.define(name, function)
        broker.listen(f"{address}:{PORT}")
        server.rpc.connect(f"{address}:{PORT}")
        over.wait()


def _written(rpc: moolink.Rpc) -> dict[str, int]:
    return {kind: path["bytes_written"] for kind, path in rpc.stats()["paths"].items()}


def one_way(client: moolink.Rpc, array: np.ndarray, calls: int) -> float:
    """MB/s of calls with an array, one after the other."""
    begin = time.perf_counter()
    for _ in range(calls):
        assert client.sync("server", "first", array) == array[0]
    return calls * array.nbytes / (time.perf_counter() - begin) / 1e6


def reductions(member: Member, count: int) -> float:
    """MB/s at which each member sends, and receives, in reductions: 10^6 bytes, median."""
    seconds = []
    for _ in range(count):
        there = member.rpc.async_("server", "reduce")
        here = member.reduce()
        seconds.append(max(here, there.result()))
    return REDUCED / statistics.median(seconds) / 1e6


def echo(client: moolink.Rpc, calls: int) -> float:
    """Microseconds of a call with an int, median."""
    times = []
    for number in range(calls):
        begin = time.perf_counter()
        client.sync("server", "echo", number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


# --- the run


def turn(member: Member, address: str, options: argparse.Namespace) -> dict[str, float]:
    """One turn of all: MB/s, and microseconds of those that say so."""
    rpc = member.rpc
    array = np.ones(MESSAGE, np.uint8)
    before = _all_written(rpc)
    figures = {
        "ib_write_bw": write_bandwidth(rpc, address),
        "moolink, one way": one_way(rpc, array, options.large),
        "ib_write_bw, each way at once": write_bandwidth(rpc, address, "-b") / 2,
        "moolink, all_reduce": reductions(member, options.large),
        "ib_send_lat, us": send_latency(rpc, address, options.calls),
        "moolink, echo, us": echo(rpc, options.calls),
    }
    if options.ucx:
        figures |= {
            "ucx, put": ucx_bandwidth(rpc, address, "ucp_put_bw", REDUCED, LEAST_MESSAGES),
            "ucx, tag": ucx_bandwidth(rpc, address, "tag_bw", MESSAGE, options.large),
        }
    after = _all_written(rpc)
    figures |= {f"{kind}, MB": (after[kind] - before[kind]) / 1e6 for kind in ("verbs", "tcp")}
    if options.json:
        print(json.dumps(figures), flush=True)
    return figures


def _all_written(rpc: moolink.Rpc) -> dict[str, int]:
    here, there = _written(rpc), rpc.sync("server", "written")
    return {kind: here[kind] + there[kind] for kind in ("verbs", "tcp")}


QUOTIENTS = (
    ("moolink, one way", "ib_write_bw"),
    ("moolink, one way", "ucx, put"),
    ("moolink, one way", "ucx, tag"),
    ("moolink, all_reduce", "ib_write_bw"),
    ("moolink, all_reduce", "ib_write_bw, each way at once"),
    ("moolink, echo, us", "ib_send_lat, us"),
)


def _print_table(turns: list[dict[str, float]]) -> None:
    for what in turns[0]:
        print(f"{what:60}{statistics.median(one[what] for one in turns):12.4g}")
    for one, other in QUOTIENTS:
        if other not in turns[0]:
            continue
        quotient = statistics.median(figures[one] / figures[other] for figures in turns)
        print(f"{one + ' / ' + other:60}{quotient:12.3g}")


def _wait_for_rdma(rpc: moolink.Rpc) -> None:
    deadline = time.monotonic() + TIMEOUT
    while rpc.explain("server")["path"] != "verbs":
        if time.monotonic() > deadline:
            raise SystemExit(f"no RDMA to the server: {rpc.explain('server')['paths']}")
        time.sleep(0.01)


def measure(address: str, options: argparse.Namespace) -> None:
    """Measures against the server at an address, and prints the table."""
    member = Member("client")
    with member.rpc as rpc:
        rpc.connect(f"{address}:{PORT}")
        there = rpc.async_("server", "join")
        member.join()
        there.result()
        _wait_for_rdma(rpc)
        options.ucx = _has_ucx() and rpc.sync("server", "has_ucx")
        if not options.ucx:
            print(f"{UCX} is not installed on both hosts: nothing of UCX here")
        one_way(rpc, np.ones(MESSAGE, np.uint8), 1)  # warms memory up, as the next does
        reductions(member, 1)
        _print_table([turn(member, address, options) for _ in range(options.turns)])
        rpc.sync("server", "over")


def main() -> None:
    """Serves or measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", nargs="+", metavar="[serve] ADDRESS", help="of the server")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--large", type=int, default=3, help="calls and reductions of a turn")
    parser.add_argument("--calls", type=int, default=200, help="small ones of a turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object a turn, too")
    options = parser.parse_args()
    if len(options.address) == 2 and options.address[0] == "serve":
        serve(options.address[1])
    elif len(options.address) == 1:
        measure(options.address[0], options)
    else:
        parser.error("one address, or 'serve' and one")


if __name__ == "__main__":
    main()
