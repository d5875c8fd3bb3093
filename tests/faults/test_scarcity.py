"""A process that has too little memory, or may have no more threads, answers for that alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import moolink
from tests.processes import killed_at_the_end, start_python
from tests.waiting import PROCESS_LIMIT

SERVER = """
import os
import resource
import sys

import numpy as np

import moolink

def deny_threads():
    if os.getuid() == 0:  # whose threads are not counted
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))

def limit_memory(more):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

def free_memory():
    kept.clear()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

kept = []
rpc = moolink.Rpc("server", transports=sys.argv[2].split(","), timeout=20)
rpc.define("echo", lambda value: value)
rpc.define("keep", lambda value: kept.append(value))
rpc.define("nested", lambda: rpc.async_("server", "echo", 1).result(2))
print(rpc.listen("127.0.0.1:0")[0], flush=True)
if sys.argv[1] == "threads":
    deny_threads()
else:
    limit_memory(100 << 20)
print("limited", flush=True)
os.read(0, 1)
free_memory()
print("freed", flush=True)
os.read(0, 1)
"""


class Server:
    """A server that lacks ``what``, and a client that is connected to it."""

    def __init__(self, what: str, transports: list[str], client: moolink.Rpc) -> None:
        self.process = start_python("-c", SERVER, what, ",".join(transports))
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        assert self.process.stdout.readline() == "limited\n"
        client.connect(address)

    def free_memory(self) -> None:
        """Gives back what it keeps, and takes the limit away."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("x")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "freed\n"

    def end(self) -> str:
        """Returns what the server has written to its log."""
        _, errors = self.process.communicate(timeout=PROCESS_LIMIT)
        assert self.process.returncode == 0, errors
        return errors


def error_of(future: moolink.Future) -> moolink.Error | None:
    try:
        future.result(60)
    except moolink.Error as error:
        return error
    return None


@pytest.fixture(params=[["tcp"], ["shm", "tcp"]], ids=["tcp", "shm"])
def transports(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture
def client(transports: list[str]) -> Iterator[moolink.Rpc]:
    with moolink.Rpc("client", transports=transports, timeout=20) as rpc:
        yield rpc


def test_a_server_without_memory_for_many_calls_lives(
    transports: list[str], client: moolink.Rpc
) -> None:
    with killed_at_the_end() as processes:
        server = Server("memory", transports, client)
        processes.append(server.process)
        client.set_timeout(5)  # a server without any memory takes no new connection
        # Bytes: nanobind ends the process that has no memory for the owner of an array.
        values = (bytes([i % 7]) * (64 << 10) for i in range(3000))
        futures = [client.async_("server", "keep", value) for value in values]
        failures = [error for future in futures if (error := error_of(future))]
        assert failures, "there was memory for all of them"
        assert server.process.poll() is None
        server.free_memory()
        client.set_timeout(20)
        assert client.sync("server", "echo", "well") == "well"
        server.end()


def test_without_more_threads_calls_are_served_and_the_lack_is_logged(
    transports: list[str], client: moolink.Rpc
) -> None:
    with killed_at_the_end() as processes:
        server = Server("threads", transports, client)
        processes.append(server.process)
        assert client.sync("server", "echo", "well") == "well"
        for _ in range(3):  # the only thread would wait for what it is to run itself
            with pytest.raises(moolink.RemoteError, match="the system gives no thread for further"):
                client.sync("server", "nested")
        assert client.sync("server", "echo", "well") == "well"
        log = server.end()
        assert log.count("a handler or callback cannot wait inside moolink: 0 of this") == 1, log


SHORT_FILES = """
import resource

import moolink

with moolink.Rpc("server") as rpc, moolink.Publisher(rpc, "weights") as publisher:
    for what, limit in ((resource.RLIMIT_FSIZE, 1 << 20), (resource.RLIMIT_NOFILE, 3)):
        hard = resource.getrlimit(what)[1]
        soft = resource.getrlimit(what)[0]
        resource.setrlimit(what, (limit, hard))
        try:
            moolink.empty(10 << 20)
        except MemoryError as error:
            print(error)
        resource.setrlimit(what, (soft, hard))
    print(len(moolink.empty(10 << 20)))
"""


def test_a_limit_that_denies_memory_is_named() -> None:
    process = start_python("-c", SHORT_FILES)
    out, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert process.returncode == 0, errors
    size, descriptors, works = out.splitlines()
    assert "File too large" in size
    assert "Too many open files" in descriptors
    assert works == str(10 << 20)


# A member that can open no more files before it has met the other member.
SHORT_OF_FILES = """
import contextlib, os, resource, sys
import numpy as np
import moolink

with moolink.Rpc("short", transports=["tcp"]) as rpc, moolink.Group(rpc, "g") as group:
    rpc.connect(sys.argv[1])
    group.set_timeout(2)
    group.wait_for_members(1, 60)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(open(os.devnull))
    print("short", flush=True)
    group.wait_for_members(2, 60)
    try:
        group.all_reduce("x", np.ones(1000)).result()
    except moolink.TimeoutError as error:
        print(error, flush=True)
    sys.stdin.read()
"""


def test_a_member_that_can_open_no_more_files_says_so() -> None:
    with (
        moolink.Broker(first=True) as broker,
        moolink.Rpc("full", transports=["tcp"]) as rpc,
        moolink.Group(rpc, "g") as group,
        killed_at_the_end() as processes,
    ):
        address = broker.listen("127.0.0.1:0")[0]
        process = start_python("-c", SHORT_OF_FILES, address)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "short\n"
        rpc.connect(address)
        group.wait_for_members(2, 60)
        group.all_reduce("x", np.ones(1000))
        assert process.stdout.readline() == (
            "operation 'x' of group 'g' did not end in time; short waits for: full; a connection "
            "waits that cannot be accepted: Too many open files; allow this process more of them "
            "(see ulimit -n)\n"
        )
