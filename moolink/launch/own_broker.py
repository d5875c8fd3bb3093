"""The broker of a job whose launcher starts none: a child of the job's first process, or in a
process that is alone a part of it."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from moolink._core import Lock
from moolink.errors import Error
from moolink.internal.addresses import is_loopback
from moolink.internal.processes import ends_with_parent

if TYPE_CHECKING:
    from moolink.group.broker_peer import Broker

_PORT_TIMEOUT = 15.0  # seconds until the broker of a process that was restarted has gone
_START_TIMEOUT = 30.0  # seconds; imports included, on a machine busy with other work
_PAUSE = 0.1

_started: tuple[str, int, subprocess.Popen[bytes]] | None = None  # address, our pid, the child
_alone: tuple[str, int, Broker] | None = None  # address, our pid
_lock = Lock()


def _forked() -> None:
    global _lock
    _lock = Lock()  # a thread that the child does not have may hold the other


os.register_at_fork(after_in_child=_forked)


def of_this_process() -> str:
    """Returns the address of the broker in this process, which the first call makes.

    Raises:
        moolink.Error: it cannot listen.
    """
    global _alone
    with _lock:
        if _alone is None or _alone[1] != os.getpid():
            from moolink.group.broker_peer import Broker

            broker = Broker(first=True)
            address = broker.listen("127.0.0.1:0")[0].removeprefix("tcp://")
            atexit.register(_close, broker, os.getpid())
            _alone = (address, os.getpid(), broker)
        return _alone[0]


def _close(broker: Broker, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no broker to close
        broker.close()


def start(address: str) -> None:
    """Starts a broker that listens at the port of `address`; a second call starts none.

    Raises:
        moolink.Error: it cannot listen.
    """
    with _lock:
        _start(address)


def _start(address: str) -> None:
    global _started
    mine = _started is not None and _started[:2] == (address, os.getpid())
    if mine and _started is not None and _started[2].poll() is None:
        return
    host, _, port = address.rpartition(":")
    interface = host if is_loopback(host) else ("[::]" if ":" in host else "0.0.0.0")
    listened = f"{interface}:{port}"
    _wait_until_free(interface, int(port))
    read_fd, write_fd = os.pipe()
    try:
        options = ["--first", "--announce-fd", str(write_fd), "--log-level", "warning"]
        child = subprocess.Popen(
            ends_with_parent([sys.executable, "-m", "moolink.broker", listened, *options]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the user reads only the process's own output
            pass_fds=(write_fd,),
            # Ctrl-C goes to all processes of a terminal; the broker ends with this one, after it.
            process_group=0,
        )
        os.close(write_fd)
        ready, _, _ = select.select([read_fd], [], [], _START_TIMEOUT)
        if not ready or not os.read(read_fd, 4096):
            child.kill()
            child.wait()
            raise Error(
                f"the job's broker could not be started on {listened}: see above, or start one "
                "(`moolink-broker`) and give all processes its address in MOOLINK_BROKER"
            )
    finally:
        os.close(read_fd)
    _started = (address, os.getpid(), child)


def _wait_until_free(interface: str, port: int) -> None:
    """Waits for the end of the broker that a process before this one had."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    deadline = time.monotonic() + _PORT_TIMEOUT
    while True:
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((interface.strip("[]"), port))
            return
        if time.monotonic() > deadline:
            raise Error(
                f"port {port} of this host, which is the job's for its broker, is in use by "
                "another program: end that program, or start a broker (`moolink-broker`) on "
                "another port and give all processes its address in MOOLINK_BROKER"
            )
        time.sleep(_PAUSE)
