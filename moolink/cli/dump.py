"""``moolink dump PID``: the state of another process of this user.

Every process that uses moolink has an abstract Unix socket for each of its contexts,
``@moolink-dump-<uid>-<pid>-<number>``, and sends its state to a process that connects: see
cpp/runtime/engine/dump_server.h.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import socket
import struct
import sys
import time
from collections.abc import Sequence

_SOCKETS = pathlib.Path("/proc/net/unix")
_TIMEOUT = 5.0  # seconds


class DumpError(Exception):
    """Why a process cannot be shown."""


def main(argv: Sequence[str]) -> int:
    """Prints the state of a process, or without PID which ones there are; returns the status."""
    parser = argparse.ArgumentParser(
        prog="moolink dump",
        description="Show the state of a process of this user, even if Python hangs there: "
        "peers and paths, calls that wait, handlers that run, groups, threads, and the last "
        "events. Without PID: which processes there are.",
    )
    parser.add_argument("pid", nargs="?", type=int, metavar="PID")
    options = parser.parse_args(argv)
    try:
        if options.pid is None:
            _print_processes()
        else:
            sys.stdout.write(dump(options.pid))
    except (DumpError, OSError) as error:
        print(f"moolink dump: {error}", file=sys.stderr)
        return 1
    return 0


def processes() -> dict[int, list[str]]:
    """Processes of this user that use moolink here, with the names of their sockets."""
    found: dict[int, set[str]] = {}
    pattern = re.compile(rf"@(moolink-dump-{os.geteuid()}-(\d+)-\d+)$")
    for line in _SOCKETS.read_text().splitlines():
        if match := pattern.search(line):
            found.setdefault(int(match[2]), set()).add(match[1])
    return {pid: sorted(names) for pid, names in found.items()}


def dump(pid: int) -> str:
    """Returns the process's own report; raises DumpError if it cannot be asked."""
    names = processes().get(pid)
    if names is None:
        raise DumpError(_why_not_there(pid))
    try:
        return "".join(_ask(pid, name) for name in names)
    except (ConnectionError, TimeoutError, BlockingIOError) as error:
        raise DumpError(_why_silent(pid, error)) from error


def _ask(pid: int, name: str) -> str:
    deadline = time.monotonic() + _TIMEOUT
    pieces = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # The kernel's limit: with Python's, a socket that others queue for would fail at once.
        limit = struct.pack("ll", math.ceil(_TIMEOUT), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(f"\0{name}")
        connection.settimeout(_TIMEOUT)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            raise DumpError(f"the socket @{name} is not of process {pid} but of user {uid}")
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    return b"".join(pieces).decode(errors="replace")


def _why_not_there(pid: int) -> str:
    try:
        owner = pathlib.Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return f"there is no process {pid}"
    if owner != os.geteuid():
        return f"process {pid} belongs to user {owner}: only that user may ask it"
    return (
        f"process {pid} does not use moolink (it has made no Rpc), or is in another network "
        "namespace: run moolink dump in its container"
    )


def _why_silent(pid: int, error: OSError) -> str:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return f"process {pid} has ended"
    if state in "Tt":
        return f"process {pid} is stopped (SIGCONT lets it go on): it cannot answer"
    return f"process {pid} did not answer within {_TIMEOUT:g} s: {error}"


def _print_processes() -> None:
    found = processes()
    if not found:
        print("no process of this user uses moolink here")
    for pid in sorted(found):
        try:
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue  # It has just ended.
        words = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        print(f"{pid:8}  {words}")
