"""Programs that are started with a signal ignored, as by nohup and by a script's `&`: the signal
stays ignored there, and in the processes that they start."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

import moolink
from tests.waiting import PROCESS_LIMIT, until

STARTED_WITH = {signal.SIGINT, signal.SIGHUP}

# Prints the signals that it ignores, and ends once the file exists.
PEER = """
import pathlib, signal, sys, time
ignored = [s.name for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
           if signal.getsignal(s) == signal.SIG_IGN]
print(*ignored, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""

# An environment whose program reports the signals that it ignores, as a bit mask.
POOL = """
import signal, subprocess, sys
import numpy as np
from moolink.env_pool import EnvPool

class Env:
    def reset(self):
        text = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True).stdout
        own = open("/proc/self/status").read().partition("SigIgn:")[2].split()[0]
        return {"own": np.int64(int(own, 16)), "program": np.int64(int(text.split()[1], 16))}
    def step(self, action):
        return self.reset(), 0.0, False, {}

if __name__ == "__main__":
    with EnvPool(Env, 1, 1, start=sys.argv[1]) as pool:
        seen = pool.step(0, np.zeros(1, int)).result()
        print(int(seen["own"][0]), int(seen["program"][0]))
"""


def ignoring(command: Sequence[object], signals: Sequence[signal.Signals]) -> list[str]:
    """The command, started by a program that ignores these signals and no other of STARTED_WITH."""
    stub = (
        "import os, signal, sys\n"
        f"for number in {[int(each) for each in STARTED_WITH]}:\n"
        f"    ignored = number in {[int(each) for each in signals]}\n"
        "    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", stub, *map(str, command)]


@contextmanager
def started(*command: object, signals: Sequence[signal.Signals]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        ignoring(command, signals), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ignored(pid: int) -> set[signal.Signals]:
    """Of the two signals, those that the process ignores; one that is blocked can be waited for."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    masks = [int(status.partition(f"{name}:")[2].split()[0], 16) for name in ("SigIgn", "SigBlk")]
    return {each for each in STARTED_WITH if (masks[0] & ~masks[1]) >> (each - 1) & 1}


@pytest.mark.parametrize("which", ["run", "launch"])
def test_a_job_lives_through_signals_that_are_ignored(which: str, tmp_path: pathlib.Path) -> None:
    script, end = tmp_path / "peer.py", tmp_path / "end"
    script.write_text(PEER)
    command = ("-m", "moolink", which, script, end)
    with started(*command, signals=tuple(STARTED_WITH)) as launcher:
        assert launcher.stdout is not None
        while not (line := launcher.stdout.readline()).startswith("[0]"):
            assert line, launcher.communicate()
        assert line.split() == ["[0]", "SIGHUP", "SIGINT"]
        assert ignored(launcher.pid) == STARTED_WITH
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGINT)
        end.touch()
        output, errors = launcher.communicate(timeout=PROCESS_LIMIT)
        assert launcher.returncode == 0, output + errors


@pytest.mark.parametrize("which", ["moolink.broker", "moolink replay"])
def test_a_server_lives_through_signals_that_are_ignored(
    which: str, tmp_path: pathlib.Path
) -> None:
    tables = tmp_path / "tables.toml"
    tables.write_text('[[table]]\nname = "t"\nmax_size = 10\n')
    command = (
        ["-m", "moolink.broker", "127.0.0.1:0"]
        if which == "moolink.broker"
        else ["-m", "moolink", "replay", tables]
    )
    with started(*command, signals=tuple(STARTED_WITH)) as server, moolink.Rpc() as rpc:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        assert ignored(server.pid) == STARTED_WITH
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGHUP)
        rpc.connect(address)
        until(lambda: any(peer["connected"] for peer in rpc.peers()), "a connection")
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PROCESS_LIMIT)
        assert server.returncode == 0, errors


def test_an_agent_lives_through_signals_that_are_ignored() -> None:
    process = subprocess.Popen(
        ignoring(["-m", "moolink.launch.agent"], tuple(STARTED_WITH)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        process.stdout.readline()  # the greeting
        process.stdout.read(1)  # of a heartbeat: the loop runs
        assert ignored(process.pid) == STARTED_WITH
        process.stdin.close()
        assert process.wait(PROCESS_LIMIT) == 0


@pytest.mark.parametrize("signals", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGHUP)])
@pytest.mark.parametrize("start", ["program", "fork"])
def test_programs_of_environments_ignore_what_the_pools_program_does(
    start: str, signals: tuple[signal.Signals, ...], tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    with started(script, start, signals=signals) as process:
        output, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert process.returncode == 0, errors
    for mask in map(int, output.split()):
        seen = {each for each in STARTED_WITH if mask >> (each - 1) & 1}
        assert seen == set(signals)


def test_leaving_on_signals_leaves_an_ignored_one_alone() -> None:
    code = (
        "import signal\n"
        "from moolink.launch import leave_on_signals\n"
        "leave_on_signals(signal.SIGINT, signal.SIGTERM)\n"
        "print(*(signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)))"
    )
    with started("-c", code, signals=(signal.SIGINT,)) as process:
        output, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert output.split() == ["True", "False"], errors
