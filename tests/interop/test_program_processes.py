"""Compiled steps of processes, of which one is killed, and Ctrl-C while one waits."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import killed_at_the_end, start_python

pytest.importorskip("jax")
MEMBER = Path(__file__).with_name("program_member.py")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python with arguments; what is left is killed with the test."""
    with killed_at_the_end() as processes:

        def start_one(*arguments: object) -> subprocess.Popen[str]:
            processes.append(start_python(*arguments))
            return processes[-1]

        yield start_one


def lines_until(process: subprocess.Popen[str], first: str) -> list[str]:
    """Reads lines up to one that begins so."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(first):
            return lines
    raise AssertionError(process.communicate()[1])


def test_a_killed_member_fails_the_step_and_the_next_goes_on(
    start: Start, broker_address: str
) -> None:
    a = start(MEMBER, "a", broker_address, 100_000)
    b = start(MEMBER, "b", broker_address, 100_000)
    lines_until(a, "2 ")
    lines_until(b, "2 ")
    b.kill()
    lines_until(a, "1 ")
    c = start(MEMBER, "c", broker_address, 100_000)
    lines_until(c, "2 ")
    lines_until(c, "2 3.000")
    assert lines_until(a, "2 3.000"), "both have learned the slope"


WAITS = """
    import contextlib, signal, sys, threading
    import jax, jax.numpy as jnp
    import moolink, moolink.jax as mj
    from tests.waiting import until

    def stop(*_):
        raise SystemExit("stopped")

    rpc = moolink.Rpc(sys.argv[1])
    rpc.connect(sys.argv[2])
    group = moolink.Group(rpc, "group")
    group.wait_for_members(2)
    if sys.argv[1] == "b":
        print("ready", flush=True)
        sys.stdin.read()

    def watch():  # while the main thread is in the program
        until(lambda: "waits for: 'b'" in moolink.dump(), "this program to wait for b")
        print("waits", flush=True)

    signal.signal(signal.SIGTERM, stop)
    program = jax.jit(lambda x: mj.all_reduce(group, "x", x))
    threading.Thread(target=watch).start()
    try:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(program(jnp.ones(3)))
        while True:  # what the handler has raised comes when Python runs again
            pass
    except (KeyboardInterrupt, SystemExit) as error:
        print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")]
)
def test_a_signal_ends_the_wait(
    start: Start, broker_address: str, number: signal.Signals, raised: str
) -> None:
    """What the signal's handler raises is what the program's caller gets."""
    code = textwrap.dedent(WAITS)
    a, b = start("-c", code, "a", broker_address), start("-c", code, "b", broker_address)
    lines_until(b, "ready")
    lines_until(a, "waits")
    a.send_signal(number)
    lines_until(a, raised)
