"""``moolink dump PID`` on processes that work, hang, and are none of ours."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import moolink
from moolink.cli import dump
from moolink.cli.main import main
from tests.waiting import until

# The handler counts in one bytecode, for ever and with the GIL: no Python thread runs any more. The
# main thread gives the GIL up only once it waits.
STUCK = """
    import moolink, sys
    sys.setswitchinterval(60)
    server = moolink.Rpc("server", timeout=60)
    address = server.listen("127.0.0.1:0")[0]

    def stuck():
        print(address, flush=True)
        sum(range(10**12))

    server.define("stuck", stuck)
    server.async_("server", "stuck").result()
    """


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def complaint(pid: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["dump", str(pid)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("moolink dump: ")
    return printed.err


def test_a_process_that_hangs_with_the_gil_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with program(STUCK) as process, moolink.Rpc("client", timeout=60) as client:
        client.connect(line_of(process))
        pending = client.async_("server", "stuck")
        until(lambda: "handler of 'stuck' for 'client'" in dump.dump(process.pid), "the call")
        assert main(["dump", str(process.pid)]) == 0
        shown = capsys.readouterr().out
        assert not pending.done()
    for words in (
        f"moolink in process {process.pid}",
        "peer 'server' (",
        "peer 'client': connected over",
        "call 1 of 'stuck' at 'server' waits for",
        "handler of 'stuck' for 'server' (its call 1) since",
        "runs since",
        "waits for a worker or the interpreter",
        "waits for call 1 since",
        "handler 1  client  stuck",
    ):
        assert words in shown, (words, shown)


def test_without_a_pid_the_processes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with program(STUCK) as process:
        line_of(process)
        assert main(["dump"]) == 0
        (line,) = [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.split()[:1] == [str(process.pid)]
        ]
        assert "import moolink" in line or sys.executable in line


def test_a_process_that_does_not_use_moolink(capsys: pytest.CaptureFixture[str]) -> None:
    with program("import moolink; print(1, flush=True); input()") as process:
        line_of(process)
        assert "does not use moolink" in complaint(process.pid, capsys)


def test_a_wrong_pid(capsys: pytest.CaptureFixture[str]) -> None:
    with program("pass") as process:
        process.wait()
        assert f"there is no process {process.pid}" in complaint(process.pid, capsys)
    with pytest.raises(SystemExit) as ended:
        main(["dump", "moolink"])
    assert ended.value.code == 2


def test_a_stopped_process_is_called_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "_TIMEOUT", 0.3)
    with program(STUCK) as process:
        line_of(process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"process {process.pid} is stopped" in complaint(process.pid, capsys)


def test_a_forked_child_has_a_dump_of_its_own_or_none() -> None:
    with moolink.Rpc("parent"):
        names = dump.processes()[os.getpid()]
        child = os.fork()
        if child == 0:
            before = os.getpid() not in dump.processes()
            with moolink.Rpc("child"):
                after = dump.dump(os.getpid())
            os._exit(0 if before and "peer 'child'" in after else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert dump.processes()[os.getpid()] == names
        assert "peer 'parent'" in dump.dump(os.getpid())


def test_readers_that_do_not_read_are_dropped() -> None:
    with moolink.Rpc("patient"):
        (name,) = dump.processes()[os.getpid()]
        idle = []
        for _ in range(20):
            reader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            reader.connect(f"\0{name}")
            idle.append(reader)
        assert "peer 'patient'" in dump.dump(os.getpid())
        for reader in idle:
            reader.close()


def test_doctor_tells_what_can_be_dumped_and_what_peers_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOOLINK_INTERFACE", raising=False)
    with moolink.Rpc("somebody"):
        main(["doctor"])
        shown = capsys.readouterr().out
        assert str(os.getpid()) in shown.split("moolink dump can show: ")[1].splitlines()[0]
        assert "peers are told 127.0.0.1" in shown
        monkeypatch.setenv("MOOLINK_INTERFACE", "no-such-interface")
        assert main(["doctor"]) == 1
        assert "MOOLINK_INTERFACE is 'no-such-interface'" in capsys.readouterr().out
