"""A server and a friend of it, each in a process of its own, for tests that attack the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import PROCESS_LIMIT

Self = TypeVar("Self", bound="Process")

SERVER = """
    import sys, moolink
    rpc = moolink.Rpc("server", transports=["shm", "tcp"])
    ran = []
    rpc.define("echo", lambda value: value)
    rpc.define("note", ran.append)
    rpc.define("ran", lambda: len(ran))
    print(*rpc.listen("127.0.0.1:0"), *rpc.listen("shm://"), flush=True)
    sys.stdin.read()
    """

# Calls until it is told to stop; its connections to the server come and go.
FRIEND = """
    import json, sys, threading, time, moolink
    address, transport = sys.argv[1:3]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    seconds, errors, connections = [], [], 0
    while not stop.is_set() or not connections:
        with moolink.Rpc(f"friend-{connections}", timeout=20, transports=[transport]) as rpc:
            rpc.connect(address)
            rpc.sync("server", "echo", 0)
            if not connections:
                print("ready", flush=True)
            connections += 1
            for number in range(500):
                begun = time.perf_counter()
                try:
                    assert rpc.sync("server", "echo", number) == number
                except Exception as e:
                    errors.append(repr(e))
                seconds.append(time.perf_counter() - begun)
                if stop.is_set():
                    break
    print(json.dumps(
        {"seconds": seconds, "errors": errors, "connections": connections}), flush=True)
    """


class Process:
    """A Python program whose standard input is open as long as it is to go on."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_line = self.line()

    def line(self) -> str:
        """The next line of its output; it must have one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return line.strip()

    def stop(self) -> str:
        """Tells it to end; the rest of its output."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        # Not communicate(): that looks past what was read ahead with an earlier line.
        with self.process.stdout as stream:
            output = stream.read()
        self.process.wait(timeout=PROCESS_LIMIT)
        return output

    def resident(self) -> int:
        """Bytes of memory that it holds."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        with suppress(ValueError):  # its streams are closed: stop() was called
            self.process.communicate()


@dataclass
class Under:
    """What a friend saw while the server was attacked."""

    seconds: list[float]  # of each call
    errors: list[str]
    connections: int

    def percentile(self, share: float) -> float:
        """Seconds that this share of the calls took at most."""
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


class Server(Process):
    """The server under attack."""

    def __init__(self) -> None:
        super().__init__(SERVER)
        self.tcp, self.shm = self.first_line.split()

    @property
    def port(self) -> int:
        return int(self.tcp.rsplit(":", 1)[1])

    @property
    def unix_name(self) -> str:
        """The abstract name of its Unix socket."""
        return "\0" + self.shm.rsplit("/", 1)[1]

    def lives(self) -> bool:
        return self.process.poll() is None

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @contextmanager
    def serving(self, transport: str = "tcp") -> Iterator[Under]:
        """A friend calls meanwhile; what it saw is known afterwards."""
        under = Under([], [], 0)
        friend = Process(FRIEND, self.tcp if transport == "tcp" else self.shm, transport)
        try:
            yield under
            said: dict[str, Any] = json.loads(friend.stop())
        finally:
            friend.kill()
        under.seconds, under.errors = said["seconds"], said["errors"]
        under.connections = said["connections"]


def wait_for(done: Any, what: str, timeout: float = 60.0) -> None:
    """Waits for something that the server brings about."""
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
