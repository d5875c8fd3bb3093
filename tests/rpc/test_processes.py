"""Peers in processes of their own: death, fork, exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

import moolink
from tests import descriptors
from tests.rpc.conftest import Start
from tests.waiting import PROCESS_LIMIT, until

SERVER = """
    import moolink, sys, time
    server = moolink.Rpc("server", transports={transports!r})
    server.define("echo", lambda x: x)
    server.define("pid", __import__("os").getpid)
    server.define("sleep", time.sleep)
    print(server.listen("127.0.0.1:{port}")[0], flush=True)
    sys.stdin.read()
    """

TRANSPORTS = pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"]])


def start_server(
    start: Start, transports: list[str], port: int = 0
) -> tuple[subprocess.Popen[str], str]:
    process = start(SERVER.format(transports=transports, port=port))
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@TRANSPORTS
def test_a_killed_peer_fails_pending_calls_at_once(start: Start, transports: list[str]) -> None:
    process, address = start_server(start, transports)
    with moolink.Rpc("client", transports=transports, timeout=60) as client:
        client.connect(address)
        assert client.sync("server", "pid") == process.pid
        pending = [client.async_("server", "sleep", 60) for _ in range(3)]
        assert not pending[0].wait(0.2)
        process.kill()
        for future in pending:
            with pytest.raises(moolink.PeerLost, match="server") as caught:
                future.result(timeout=10)
            assert caught.value.peer == "server"
            assert caught.value.ran in ("maybe", "yes")


@TRANSPORTS
def test_a_restarted_peer_is_found_again(start: Start, transports: list[str]) -> None:
    process, address = start_server(start, transports)
    with moolink.Rpc("client", transports=transports, timeout=20) as client:
        client.connect(address)
        assert client.sync("server", "pid") == process.pid
        process.kill()
        process.wait()
        again, same_address = start_server(start, transports, int(address.rsplit(":", 1)[1]))
        assert same_address == address
        deadline = time.monotonic() + 20
        while True:
            try:
                assert client.sync("server", "pid") == again.pid
                break
            except moolink.PeerLost:
                assert time.monotonic() < deadline


def test_a_stopped_peer_is_not_lost_when_it_goes_on(start: Start) -> None:
    process, address = start_server(start, ["tcp"])
    with moolink.Rpc("client", timeout=60) as client:
        client.connect(address)
        assert client.sync("server", "echo", 1) == 1
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")
        future = client.async_("server", "echo", 2)
        assert not future.wait(1.5)
        process.send_signal(signal.SIGCONT)
        assert future.result(timeout=20) == 2


@pytest.mark.parametrize(
    "rest",
    [
        "rpc.async_('nobody', 'f')",  # a call in flight
        "rpc.async_('me', 'sleep', 0.3)",  # a handler running
        "rpc.async_('me', 'sleep', 60)",  # one that will not return in time
        "threading.Thread(target=rpc.sync, args=('nobody', 'f'), daemon=True).start()",
        "rpc.async_callback('me', 'sleep', print, 0.1)",
        "sys.exit()",
    ],
)
def test_exit_with_things_in_flight(start: Start, rest: str) -> None:
    process = start(f"""
        import moolink, sys, threading, time
        rpc = moolink.Rpc("me")
        rpc.listen("127.0.0.1:0")
        rpc.define("sleep", time.sleep)
        rpc.define("ready", lambda: None)
        rpc.sync("me", "ready")
        {rest}
        """)
    _, err = process.communicate(timeout=PROCESS_LIMIT)
    assert process.returncode == 0, err
    assert "terminate" not in err
    assert "Fatal" not in err


def test_exit_while_daemon_threads_call(start: Start) -> None:
    # They come back from waits into an interpreter that is being finalised.
    program = """
        import moolink, random, sys, threading, time
        sys.stderr = open("/dev/null", "w")  # the threads' own tracebacks
        server, client = moolink.Rpc("server"), moolink.Rpc("client")
        server.define("echo", lambda x: x)
        client.connect(server.listen("127.0.0.1:0")[0])

        def call_for_ever():
            while True:
                try:
                    client.sync("server", "echo", 1)
                except moolink.Closed:
                    pass

        for _ in range(3):
            threading.Thread(target=call_for_ever, daemon=True).start()
        client.sync("server", "echo", 1)
        """
    for _ in range(10):
        process = start(program)
        process.communicate(timeout=PROCESS_LIMIT)
        assert process.returncode == 0


def test_a_forked_child_cannot_use_the_parents_peer_but_can_make_its_own(start: Start) -> None:
    process, address = start_server(start, ["tcp"])
    with moolink.Rpc("parent", timeout=20) as rpc:
        rpc.connect(address)
        assert rpc.sync("server", "echo", 1) == 1
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(rpc, address, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert pipe.read() == "closed, 2"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rpc.sync("server", "echo", 3) == 3  # the child took nothing away
    process.kill()


def _in_child(rpc: moolink.Rpc, address: str, write: int) -> None:
    """Reports through the pipe and never returns."""
    report = "nothing"
    try:
        try:
            rpc.sync("server", "echo", 1)
            report = "not refused"
        except moolink.Closed as e:
            report = "closed" if "fork" in str(e) else str(e)
        rpc.close()
        with moolink.Rpc("child", timeout=20) as own:
            own.connect(address)
            report += f", {own.sync('server', 'echo', 2)}"
    except BaseException as e:  # noqa: BLE001 - reported to the parent, which fails the test
        report += f", {e!r}"
    finally:
        os.write(write, report.encode())
        os._exit(0)


def _double_in_child(address: str) -> int:
    with moolink.Rpc(timeout=20) as rpc:
        rpc.connect(address)
        return 2 * int(rpc.sync("server", "echo", 21))


def test_multiprocessing_by_fork(start: Start) -> None:
    _, address = start_server(start, ["tcp"])
    with moolink.Rpc("parent") as rpc:
        rpc.connect(address)
        assert rpc.sync("server", "echo", 1) == 1
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(_double_in_child, [address] * 4) == [42] * 4


def test_a_forked_child_holds_no_descriptors_of_the_parents() -> None:
    with moolink.Rpc("parent") as rpc:
        rpc.listen("127.0.0.1:0")
        before = descriptors.of_moolink()
        assert before
        assert descriptors.are_gone_in_a_forked_child(before)


def test_descriptors_and_threads_go_with_the_peer() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with moolink.Rpc():
        pass  # the context stays
    before = count()
    for _ in range(10):
        with moolink.Rpc("a", timeout=20) as a, moolink.Rpc("b") as b:
            b.define("f", lambda: 1)
            a.connect(b.listen("127.0.0.1:0")[0])
            assert a.sync("b", "f") == 1
    deadline = time.monotonic() + 10
    while count() > before:  # a closed connection lingers for a moment
        assert time.monotonic() < deadline
        time.sleep(0.02)


@TRANSPORTS
def test_who_may_open_no_more_files_says_so_and_goes_on(
    start: Start, transports: list[str]
) -> None:
    process = start(
        f"""
        import logging, resource, sys, moolink
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        server = moolink.Rpc("server", transports={transports!r})
        server.define("echo", lambda x: x)
        address = server.listen("127.0.0.1:0")[0]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        print(address, flush=True)
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sys.stdin.read()
        """
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with moolink.Rpc("client", transports=transports, timeout=30) as client:
        client.connect(process.stdout.readline().strip())
        call = client.async_("server", "echo", 5)
        told = process.stdout.readline()
        assert told.startswith("WARNING a connection waits")
        assert "Too many open files" in told
        assert "ulimit -n" in told
        process.stdin.write("\n")
        process.stdin.flush()
        assert call.result() == 5


def test_importing_moolink_starts_nothing() -> None:
    program = "import moolink, os; moolink.Rpc; print(len(os.listdir('/proc/self/task')))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=True,
    )
    assert result.stdout == "1\n"


def test_a_call_that_runs_when_the_interpreter_exits_is_answered(start: Start) -> None:
    process = start(
        """
        import threading, moolink
        guard, server = moolink.Rpc("guard"), moolink.Rpc("server")
        guarded, exiting = threading.Event(), threading.Event()
        kept = []

        def guard_exit(deferred):
            kept.append(deferred)
            deferred.add_cancel_callback(exiting.set)  # this peer is closed before the server
            guarded.set()

        def f():
            print("running", flush=True)
            exiting.wait()
            return 5

        guard.define_deferred("guard_exit", guard_exit)
        server.define("f", f)
        call = guard.async_("guard", "guard_exit")
        guarded.wait()
        print(server.listen("127.0.0.1:0")[0], flush=True)
        input()
        """
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with moolink.Rpc("client", timeout=20) as client:
        client.connect(process.stdout.readline().strip())
        future = client.async_("server", "f")
        assert process.stdout.readline() == "running\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert future.result() == 5
    _, err = process.communicate(timeout=PROCESS_LIMIT)
    assert err == ""


def test_a_timer_set_while_the_interpreter_exits_is_no_error() -> None:
    program = """
        import atexit

        def late():  # after moolink's own
            import moolink._core
            moolink._core.call_later(0.0, print)
            with moolink._core.LentSlot():
                pass

        atexit.register(late)
        import moolink
        rpc = moolink.Rpc("alone")
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=True,
    )
    assert result.stderr == ""
