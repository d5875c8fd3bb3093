"""The transfer of the state to a newcomer of a training group, beside a bare copy of its bytes.

    python -m benchmarks.newcomer --megabytes 1024               on one host, beside memcpy
    python -m benchmarks.newcomer --path link --rate 1000        between two hosts, beside the link

Two peers train a model. Nearly all of the model is in frozen buffers, so that the rounds are small
(`--trained` KB of gradients, `--compute` ms for each contribution) and the state is large.
Newcomers follow one another: each joins, gets the state, contributes to three rounds and leaves. It
allocates its model before it joins.

The transfer begins with the leader's first copy of the state for the newcomer, and ends with the
newcomer's first turn, when it can contribute. The speed is the model's bytes divided by this time.
The column "before" has the time from the start of the newcomer's Rpc to the transfer: connecting,
the view with the newcomer, its request. A newcomer that falls too far behind (1,024 rounds, or four
times the state in bytes of rounds) starts over with a later copy of the state. If it has no turn
within `--limit` seconds, the run ends without a speed; a larger `--compute` makes the rounds
slower. All processes read one monotonic clock.

On one host, the state passes through shared memory; memcpy copies as many bytes within one process
into memory that it has written before ("new": into new memory). With `--path link`, both peers are
on one host and the newcomer is on another. The hosts are namespaces of this machine
(tests/network/hosts.py; needs root) with a link of `--rate` Mbit/s in each direction; bare sockets
send as much in both directions at once. Where namespaces are not allowed, the newcomer uses TCP
over loopback, beside a bare socket loop. Neither is encrypted. The transfer and the copies
alternate in one run.

A pause is the time between two rounds at one of the two peers. The longest pause is the longest one
that overlaps the transfer; the usual one is the median of the second before the newcomer joined.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import moolink
import moolink.torch
from benchmarks.hosts import bare
from benchmarks.tcp import bare_figures, compile_bare_loop
from tests.network.hosts import ROOT, Hosts, why_not
from tests.network.members import BROKER_PORT

BAR = 0.7
BUFFERS = 16
TRAINERS = ("trainer-0", "trainer-1")
WARM_UP = 20  # rounds of the two peers before the first newcomer
TURNS = 3  # of a newcomer

# Times of a newcomer: until the leader's first copy of the state, until its last copy, the last
# copy, its way to the newcomer, its copy into the model, until the first turn; the sum without the
# first.
PHASES = ("before", "given up", "copy", "way", "install", "turn", "transfer")

Times = dict[str, float]


class Accumulator(moolink.torch.Accumulator):
    """Records the times of its copies of the state and of its installation of one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.given: list[tuple[float, float]] = []
        self.installed = (0.0, 0.0)
        super().__init__(*args, **options)

    def set_state(self, state: Any) -> None:
        begin = time.monotonic()
        super().set_state(state)
        self.given.append((begin, time.monotonic()))

    def _install_model(self, model: Any) -> None:
        begin = time.monotonic()
        super()._install_model(model)
        self.installed = (begin, time.monotonic())


# --- the peers


def peer(args: argparse.Namespace) -> None:
    """Runs a trainer until it reads a line, or a newcomer for some turns; prints times as JSON."""
    torch.set_num_threads(1)
    is_newcomer = args.peer not in TRAINERS
    applied: list[float] = []
    weights = torch.zeros(args.trained << 8, requires_grad=True)
    count = (args.megabytes << 18) // BUFFERS
    frozen = [torch.full((count,), float(not is_newcomer)) for _ in range(BUFFERS)]
    optimizer = torch.optim.SGD([weights], lr=1e-3, foreach=False)  # imports modules for seconds
    optimizer.register_step_post_hook(lambda *_: applied.append(time.monotonic()))
    if is_newcomer:
        print("ready", flush=True)
        sys.stdin.readline()
    begin = time.monotonic()
    with (
        moolink.Rpc(args.peer, transports=["tcp"] if args.tcp else None) as rpc,
        moolink.Group(rpc, "newcomer") as group,
    ):
        rpc.connect(args.broker)
        accumulator = Accumulator("model", [weights], frozen, group=group)
        accumulator.set_virtual_batch_size(2)
        steps = accumulator.steps(optimizer)
        if not is_newcomer:
            wait_for_both(steps, group)
        turns = train(steps, weights, args)
        accumulator.close()
    times: dict[str, Any] = {"given": accumulator.given, "rounds": applied}
    if is_newcomer:
        assert all(bool((buffer[::1024] == 1).all()) for buffer in frozen), "wrong bytes"
        times = {"join": begin, "installed": accumulator.installed, "turn": turns[0]}
    print(json.dumps(times), flush=True)


def train(
    steps: Iterator[moolink.torch.TrainingStep], weights: torch.Tensor, args: argparse.Namespace
) -> list[float]:
    """Contributes to rounds; returns the start of each turn, in seconds."""
    turns: list[float] = []
    for step in steps:
        turns.append(time.monotonic())
        if args.peer in TRAINERS:
            if len(turns) == WARM_UP:
                print("trains", flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                break
        elif len(turns) > TURNS:
            break
        time.sleep(1e-3 * args.compute)  # as if an accelerator computed
        weights.sum().backward()
        step.reduce(batch_size=1)
    return turns


def wait_for_both(steps: Iterator[moolink.torch.TrainingStep], group: moolink.Group) -> None:
    """Waits, without rounds, until both trainers have the state."""
    both: moolink.group.GroupFuture | None = None
    for _ in steps:
        if both is None and len(group.members()) == len(TRAINERS):
            both = group.all_reduce("both", 1, on_change="retry")
        if both is not None and both.done():
            return
        time.sleep(0.01)  # a turn without a contribution does not wait


# --- the hosts


class OneMachine:
    """Processes of this host, which reach one another by shared memory or TCP over loopback."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._stack = contextlib.ExitStack()
        broker = self._stack.enter_context(moolink.Broker(first=True))
        self._broker = broker.listen("127.0.0.1:0")[0]
        self._bare_loop = compile_bare_loop() if args.path == "link" else None
        if args.path == "link" and self._bare_loop is None:
            raise SystemExit("the bare socket loop needs a C compiler: cc or gcc")

    def start(self, name: str) -> subprocess.Popen[str]:
        tcp = ["--tcp"] if self._args.path == "link" else []
        command = [sys.executable, "-m", "benchmarks.newcomer", *sys.argv[1:], *tcp]
        child = subprocess.Popen(
            [*command, f"--peer={name}", f"--broker={self._broker}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(child.kill)
        return child

    def bare(self) -> Times:
        """Returns the bytes a second of the copies that the transfer is compared with."""
        if self._bare_loop is not None:
            return {"the link": bare_figures(self._bare_loop, 0.3)["64 MB, GB/s"] * 1e9}
        return memcpy(self._args.megabytes << 20)

    def close(self) -> None:
        self._stack.close()


class TwoHosts:
    """Both trainers on one host, the newcomers on another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._hosts = Hosts(2, f"{args.rate:g}mbit")
        self._broker = f"{self._hosts.address(0)}:{BROKER_PORT}"
        self._hosts.start(0, "moolink.broker", self._broker, "--first", stdout=subprocess.DEVNULL)

    def start(self, name: str) -> subprocess.Popen[str]:
        more = [*sys.argv[1:], f"--peer={name}", f"--broker={self._broker}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        place = 0 if name in TRAINERS else 1
        child: subprocess.Popen[str] = self._hosts.start(
            place, "benchmarks.newcomer", *more, **pipes
        )
        return child

    def bare(self) -> Times:
        size = self._args.megabytes << 20
        return {"the link": self._args.rate * 1e6 / 8, "sockets": size / bare(self._hosts, size)}

    def close(self) -> None:
        self._hosts.close()


def memcpy(size: int) -> Times:
    """Returns the bytes a second of copies into written memory and into new memory."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    speeds = {}
    for name in ("memcpy", "new"):
        if name == "new":
            target = np.empty(size, np.uint8)
        begin = time.monotonic()
        np.copyto(target, source)
        speeds[name] = size / (time.monotonic() - begin)
    return speeds


@contextlib.contextmanager
def place_of(args: argparse.Namespace) -> Iterator[OneMachine | TwoHosts]:
    if args.path == "link":
        os.environ["MOOLINK_INSECURE"] = "1"  # the bare sockets do not encrypt either
        if reason := why_not():
            print(f"TCP over loopback, because {reason}")
    place = OneMachine(args) if args.path == "shm" or why_not() else TwoHosts(args)
    try:
        yield place
    finally:
        place.close()


# --- results


def one_newcomer(place: OneMachine | TwoHosts, number: int, limit: float) -> dict[str, Any] | None:
    """Runs one newcomer; returns its times and the bare speeds. None: it had no turn in time."""
    child = place.start(f"newcomer-{number}")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    speeds = place.bare()
    try:
        output, _ = child.communicate("join\n", timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        return None
    assert child.returncode == 0
    return {**json.loads(output), "bare": speeds}


def phases(newcomer: dict[str, Any], trainers: list[dict[str, Any]]) -> Times:
    """Returns the seconds of each phase of one newcomer."""
    join, (arrived, installed), turn = (newcomer[k] for k in ("join", "installed", "turn"))
    copies = sorted(g for t in trainers for g in t["given"] if join < g[0] < arrived)
    begin, (last, captured) = copies[0][0], copies[-1]
    return {
        "before": begin - join,
        "given up": last - begin,
        "copy": captured - last,
        "way": arrived - captured,
        "install": installed - arrived,
        "turn": turn - installed,
        "transfer": turn - begin,
        "begin": begin,
        "copies": len(copies),
    }


def pauses(trainers: list[dict[str, Any]], begin: float, end: float) -> list[list[float]]:
    """Returns the pauses of each trainer that overlap this time, in seconds."""
    return [
        [
            after - before
            for before, after in zip(t["rounds"], t["rounds"][1:], strict=False)
            if after > begin and before < end
        ]
        for t in trainers
    ]


def report(
    args: argparse.Namespace, newcomers: list[dict[str, Any]], trainers: list[dict[str, Any]]
) -> None:
    size = args.megabytes << 20
    times = [phases(newcomer, trainers) for newcomer in newcomers]
    print(f"{args.megabytes} MB, {len(times)} newcomers, medians in ms; copies: the maximum")
    print(" ".join(f"{name:>9}" for name in PHASES) + "    copies")
    for name in PHASES:
        print(f"{1e3 * statistics.median(t[name] for t in times):9.0f}", end=" ")
    print(f"{max(t['copies'] for t in times):9.0f}")
    text = f"GB/s: transfer {statistics.median(size / t['transfer'] for t in times) / 1e9:.3f}"
    for name in newcomers[0]["bare"]:
        text += f", {name} {statistics.median(n['bare'][name] for n in newcomers) / 1e9:.3f}"
    print(text)
    fewest = report_rounds(times, newcomers, trainers)
    name = next(iter(newcomers[0]["bare"]))
    quotient = statistics.median(
        size / t["transfer"] / n["bare"][name] for t, n in zip(times, newcomers, strict=True)
    )
    verdict = "met" if quotient >= BAR and fewest > 0 else "MISSED"
    print(f"bar: {quotient:.2f} of {name}, at least {BAR} while rounds continue: {verdict}")


def report_rounds(
    times: list[Times], newcomers: list[dict[str, Any]], trainers: list[dict[str, Any]]
) -> int:
    """Prints the rounds during the transfers; returns the smallest number of a transfer."""
    calm = [pauses(trainers, n["join"] - 1, n["join"]) for n in newcomers]
    usual = [pause for trial in calm for one in trial for pause in one]
    during = [pauses(trainers, t["begin"], t["begin"] + t["transfer"]) for t in times]
    rounds = [min(len(one) - 1 for one in trial) for trial in during]
    longest = [max(pause for one in trial for pause in one) for trial in during]
    print(
        f"rounds during a transfer: {statistics.median(rounds):g} (median; fewest {min(rounds)}); "
        f"longest pause {1e3 * statistics.median(longest):.0f} ms (median; of all "
        f"{1e3 * max(longest):.0f}), usual {1e3 * statistics.median(usual):.1f} ms"
    )
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024, help="of the model")
    parser.add_argument("--path", choices=("shm", "link"), default="shm")
    parser.add_argument("--rate", type=float, default=1000, help="of the link, Mbit/s")
    parser.add_argument("--trained", type=int, default=256, help="KB of parameters in each round")
    parser.add_argument("--compute", type=float, default=5, help="ms of computing a contribution")
    parser.add_argument("--trials", type=int, default=5, help="newcomers, one after another")
    parser.add_argument("--limit", type=float, default=30, help="seconds for each newcomer")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--broker", help=argparse.SUPPRESS)
    parser.add_argument("--tcp", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args)
        return
    with place_of(args) as place:
        children = [place.start(name) for name in TRAINERS]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "trains\n"
        newcomers: list[dict[str, Any]] = []
        for number in range(args.trials):
            if (newcomer := one_newcomer(place, number, args.limit)) is None:
                break
            newcomers.append(newcomer)
        for child in children:
            print("end", file=child.stdin, flush=True)
        trainers = [json.loads(child.stdout.readline()) for child in children if child.stdout]
    if len(newcomers) == args.trials:
        report(args, newcomers, trainers)
    else:
        print(
            f"bar: newcomer {len(newcomers)} had no turn within {args.limit:g} s, and the leader "
            f"copied the state {sum(len(t['given']) for t in trainers)} times in all: MISSED"
        )


if __name__ == "__main__":
    main()
