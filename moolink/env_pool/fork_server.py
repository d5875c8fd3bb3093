"""The fork server of a pool: loads create_env once and forks the workers.

It is a fresh program with one thread, so no thread, lock or device state of the pool's process is
forked; or, if the user wants it, a fork of that process, whose create_env and globals it has. It
ends when the pool closes or its process dies, and its workers die with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from moolink.env_pool import channel, generators, worker
from moolink.errors import Error
from moolink.internal.end_with_parent import end_with_parent
from moolink.internal.signals import not_ignored

# True while the user's main module is loaded again in this process.
_loading_main = False


def require_loaded_main(pool: str) -> None:
    """Raises if this process is a server that loads the user's main module: it makes no pool."""
    if _loading_main:
        raise Error(
            f"this {pool} is made while a worker process loads the main script again: put what the "
            "script does under `if __name__ == '__main__':`, or define create_env in a module of "
            "its own"
        )


class Server:
    """Starts workers on demand and reports their deaths."""

    def __init__(
        self, control: channel.Channel, parent: int, create_env: Callable[..., Any] | None
    ) -> None:
        self._control = control
        self._create_env = create_env
        self._parent = parent
        self._workers: dict[int, tuple[int, int]] = {}  # pidfd -> (worker, pid)
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(parent, select.POLLIN)

    def run(self) -> None:
        """Serves until the pool closes or its process is gone."""
        self._setup: channel.Setup = self._control.receive()
        try:
            if self._create_env is None:
                self._create_env = _load(self._setup)
        except BaseException as error:  # noqa: BLE001 - the user's modules; the pool reports it
            self._control.send(channel.Unusable("".join(traceback.format_exception(error))))
            return
        self._generators = generators.drawn_from_the_system()
        gc.collect()
        gc.freeze()  # Forked workers then share these objects' pages for longer.
        if not self._obey():  # Commands may have arrived together with the setup.
            return
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._parent:
                    return
                if descriptor in self._workers:
                    self._reap(descriptor)
                elif descriptor == self._control.fileno() and not self._obey():
                    return

    def _obey(self) -> bool:
        """Carries out the pool's commands; returns whether to go on."""
        for command in self._control.receive_available():
            if isinstance(command, channel.Close):
                self._wait_for_workers(command.grace)
                return False
            self._start(command)
        return True

    def _start(self, start: channel.Start) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(server)
            self._control.close()
            link = channel.Channel(socket.socket(fileno=self._setup.channels[start.worker]))
            assert self._create_env is not None
            generators.branch(self._generators, start.worker, start.life)
            worker.main(self._setup, start, self._create_env, link)
        descriptor = os.pidfd_open(pid)
        self._workers[descriptor] = (start.worker, pid)
        self._poll.register(descriptor, select.POLLIN)

    def _reap(self, descriptor: int) -> None:
        index, pid = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        returncode = os.waitstatus_to_exitcode(status)
        try:
            self._control.send(channel.Died(index, pid, returncode))
        except BrokenPipeError:
            return  # The pool is gone, which the loop is about to see.

    def _wait_for_workers(self, grace: float) -> None:
        """Waits for the workers, which know of the close; kills those that take too long."""
        deadline = time.monotonic() + grace
        poll = select.poll()
        poll.register(self._parent, select.POLLIN)
        for descriptor in self._workers:
            poll.register(descriptor, select.POLLIN)
        while self._workers:
            remaining = deadline - time.monotonic()
            ready = poll.poll(remaining * 1000) if remaining > 0 else []
            if not ready or any(descriptor == self._parent for descriptor, _ in ready):
                break
            for descriptor, _ in ready:
                _, pid = self._workers.pop(descriptor)
                poll.unregister(descriptor)
                os.waitpid(pid, 0)
        for descriptor, (_, pid) in self._workers.items():
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.waitpid(pid, 0)


def _load(setup: channel.Setup) -> Callable[..., Any]:
    global _loading_main
    if setup.main is not None:
        _loading_main = True
        try:
            spawn.prepare(setup.main)
        finally:
            _loading_main = False
    create_env: Callable[..., Any] = pickle.loads(setup.create_env)
    return create_env


def main(
    control: int,
    parent: int,
    descriptors: list[int],
    create_env: Callable[..., Any] | None = None,
) -> None:
    """Runs the server: `control` is its channel, `parent` a pidfd of the pool's process.

    `create_env` is there in a fork of the pool's process; other servers load it.
    """
    # The pool handles Ctrl-C, and ends this process later. SIG_IGN would be inherited by programs
    # that environments start.
    for number in not_ignored((signal.SIGINT,)):
        signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
    for descriptor in (control, parent, *descriptors):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError):  # The pool's process is gone.
        Server(channel.Channel(socket.socket(fileno=control)), parent, create_env).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Dying here kills the workers that are left: they asked the kernel for it.
    os._exit(0)
