"""RPC between two processes: moolink beside its peers and the machine's raw limits, in one run.

    python benchmarks/rpc.py                       all peers that are installed
    python benchmarks/rpc.py --quick               whether everything runs; the figures mean nothing
    python benchmarks/rpc.py --peers moolink-shm pyzmq-ipc

An echo of an int: latency of single calls (p50, p99), calls a second with 1, 64 and 1,000 in
flight, and the CPU time of both processes together a call. A float32 array of 1, 16 and 64 MB: one
way (the handler returns nothing; the next is sent when the reply is there), echo (both ways count),
and pipelined (one way, four in flight). Beside them what the machine allows: a copy in memory, one
copy between processes, two copies through a ring in shared memory, a Unix socket and TCP over
loopback, in C.

Each peer has a client process and a server process of its own. In every round each gets its turn
while the others are stopped (SIGSTOP: torch.rpc, for one, keeps a core busy while it is idle), so
that other load on the machine hits all alike; figures are medians over the rounds. A peer that is
not installed is left out, with the reason: pyzmq and grpcio come with moolink[bench], torch with
moolink[torch], Ray (which brings much) with moolink[bench-ray].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from rpc_peers import PEERS, limits, measure, report

from moolink.internal.processes import tethered

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "results" / "rpc.png"


class ClientProcess:
    """A peer's client, which measures one round whenever it is told to."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            tethered([sys.executable, __file__, "--client", name]),  # it may be stopped when we end
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that its server is stopped with it
        )
        try:
            self._answer()
        except RuntimeError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"its client ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        figures: dict[str, float] = answer["figures"]
        return figures

    def one_round(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(seconds, file=self._process.stdin, flush=True)
        figures = self._answer()
        self._signal(signal.SIGSTOP)
        return figures

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=20)  # closes stdin, which ends it
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.communicate()


def run_client(name: str) -> None:
    """The client process: a line with the seconds of a measurement in, a line of figures out."""
    # What a system writes to its standard output must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        client = PEERS[name].load().connect(PEERS[name].transport)
        with contextlib.closing(client):
            answer(figures={})
            for line in sys.stdin:
                answer(figures=measure.one_round(client, float(line)))
    except Exception as e:  # noqa: BLE001 - the others go on without this peer
        traceback.print_exc()
        answer(error=" ".join(f"{type(e).__name__}: {e}".split())[:300])


def start_clients(names: list[str]) -> dict[str, ClientProcess]:
    clients = {}
    for name in names:
        reason = PEERS[name].missing()
        try:
            if not reason:
                clients[name] = ClientProcess(name)
        except RuntimeError as e:
            reason = f"it did not start: {e}"
        if reason:
            print(f"{name} is left out: {reason}")
    return clients


def measure_rounds(
    clients: dict[str, ClientProcess], kinds: list[str], rounds: int, seconds: float
) -> report.Figures:
    """Turns in each round; who begins changes from round to round."""
    turns = [*clients, *kinds]
    figures: report.Figures = {name: [] for name in turns}
    for i in range(rounds):
        first = i % len(turns)
        for name in [*turns[first:], *turns[:first]]:
            if name not in figures:
                continue
            print(f"round {i + 1} of {rounds}: {name:24}", end="\r", file=sys.stderr, flush=True)
            try:
                if name in clients:
                    figures[name].append(clients[name].one_round(seconds))
                else:
                    figures[name].append(limits.one_round(name, seconds))
            except RuntimeError as e:
                print(f"{name} is left out from round {i + 1} on: {e}")
                del figures[name]
    return figures


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other work on the machine."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--no-limits", action="store_true", help="without the raw limits")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement")
    parser.add_argument("--busy", type=int, default=0, help="so many busy processes beside it")
    parser.add_argument("--quick", action="store_true", help="one short round, no picture")
    parser.add_argument("--png", type=Path, help=f"picture and CSV (default {PICTURE.name})")
    parser.add_argument("--client", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        return run_client(options.client)
    if options.serve:
        module, transport, place = options.serve
        peer = next(peer for peer in PEERS.values() if peer.module == module)
        return peer.load().serve(transport, place)
    rounds, seconds = (1, 0.02) if options.quick else (options.rounds, options.seconds)
    reason = "--no-limits" if options.no_limits else limits.missing()
    if reason:
        print(f"the raw limits are left out: {reason}")
    clients = start_clients(options.peers)
    try:
        with busy(options.busy):
            kinds = [] if reason else list(limits.KINDS)
            figures = measure_rounds(clients, kinds, rounds, seconds)
    finally:
        for client in clients.values():
            client.close()
    report.print_tables(figures)
    report.print_bars(figures)
    print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, {platform.platform()}")
    picture = options.png or (None if options.quick else PICTURE)
    if picture is not None:
        report.draw(figures, picture)
        report.write_csv(figures, picture.with_suffix(".csv"))
        print(f"{picture} and {picture.with_suffix('.csv').name} written")
    return None


if __name__ == "__main__":
    main()
