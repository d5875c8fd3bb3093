"""The pool's side of its processes: starts them, hears of their failures, ends them."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import select
import socket
import subprocess
import sys
import threading
from typing import Any

from moolink import deadlines, logs
from moolink.env_pool import channel
from moolink.env_pool.memory import PoolMemory, PoolShape, rows_of
from moolink.env_pool.setup import PoolOptions, setup_of
from moolink.env_pool.spaces import keys
from moolink.errors import Closed, EnvError, TimeoutError
from moolink.processes import describe_exit

_GRACE = 2.0  # seconds that workers have to close their environments
_FAILED_GRACE = 0.2  # the same, when the pool has failed
_SERVER_GRACE = 3.0  # further seconds that the server has to end
_FRUITLESS_RESTARTS = 3  # restarts of a worker that finishes no step between them
# Whether a process sees another's stores in their order. Where it may not, only what was written
# before a bell rang is sure to be seen after it.
_STORES_IN_ORDER = platform.machine() == "x86_64"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Supervisor:
    """Owns the fork server, the descriptors shared with the workers, and the shared memory.

    Each batch has a bell, an eventfd that is rung when all workers have finished the batch's step,
    and when the pool fails or closes. It stays rung until the next step, so that everybody who
    waits sees it. It may ring too early after a crash: the `served` words are the truth. Whoever
    finishes takes one of the batch's tokens; the worker that finds none is the last, and rings.

    Attributes:
        memory: the shared memory.
        bells: one descriptor a batch.
        alarms: a descriptor, readable when a process has something to tell.
        spaces: pickle of the observation and the action space; empty if they cannot be pickled.
    """

    memory: PoolMemory
    shape: PoolShape

    def __init__(self, options: PoolOptions) -> None:
        """Starts the processes and waits until every environment exists.

        Raises:
            TimeoutError: that lasted longer than `start_timeout`.
            EnvError: an environment could not be made.
        """
        self._options = options
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._failure: dict[str, Any] | None = None
        self._closed = False
        self._steps = 0
        workers = options.workers
        self._lives = [0] * workers
        self._progress: list[list[int]] = [[] for _ in range(workers)]
        self._fruitless = [0] * workers
        self._making: list[channel.Making | None] = [None] * workers
        self._made: list[channel.Made | None] = [None] * workers
        self._ready = False
        setup = setup_of(options)  # Before anything is open that would have to be closed.
        self._memory_fd = os.memfd_create("moolink-env-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        plain = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(workers)]
        self.bells = [os.eventfd(0, plain) for _ in range(options.batches)]
        semaphore = plain | os.EFD_SEMAPHORE
        self._tokens = [os.eventfd(0, semaphore) for _ in range(options.batches)]
        pairs = [socket.socketpair() for _ in range(workers)]
        self._links = [channel.Channel(ours) for ours, _ in pairs]
        setup = dataclasses.replace(
            setup,
            memory=self._memory_fd,
            doorbells=self._doorbells,
            bells=self.bells,
            tokens=self._tokens,
            channels=[theirs.fileno() for _, theirs in pairs],
        )
        try:
            try:
                self._start_server(setup)
            finally:
                for _, theirs in pairs:
                    theirs.close()
            self._watch()
            for worker in range(workers):
                self._control.send(channel.Start(worker, 0))
            self._wait_until_made()
        except BaseException:
            self.close()
            raise

    def _wait_until_made(self) -> None:
        poll = select.poll()
        poll.register(self.alarms, select.POLLIN)
        timeout = self._options.start_timeout
        deadline = deadlines.after(timeout)
        while not self._ready:
            remaining = deadlines.left(deadline)
            if remaining == 0.0:
                raise TimeoutError(
                    f"the environments of the EnvPool were not made within {timeout:g} s: "
                    f"{self._unmade()}. If create_env needs longer, give a larger start_timeout"
                )
            poll.poll(None if remaining is None else math.ceil(remaining * 1000))
            self.handle_alarms()
            self.raise_failure()

    def _unmade(self) -> str:
        """Says who has not made its environments."""
        parts = []
        for worker, made in enumerate(self._made):
            making = self._making[worker]
            if made is None and making is None:
                parts.append(f"worker {worker} has not begun")
            elif made is None and making is not None:
                parts.append(
                    f"worker {worker} (pid {making.pid}) is in create_env of environment "
                    f"{making.environment}"
                )
        return ", ".join(parts)

    # Stepping.

    def request(self, batch: int) -> int:
        """Has the workers step `batch`, whose actions are in place; returns the step's number."""
        with self._lock:
            self.raise_failure()
            self._steps += 1
            _drain(self.bells[batch])
            if self._options.workers > 1:
                os.eventfd_write(self._tokens[batch], self._options.workers - 1)
            self.memory.requested[batch] = self._steps
            for doorbell in self._doorbells:
                os.eventfd_write(doorbell, 1)
            return self._steps

    def finished(self, batch: int, step: int) -> bool:
        """Tells whether every worker has finished `step`; raises if the pool failed or closed.

        Silences a bell that rang too early, so that the caller may wait for it again.
        """
        if self._failure is not None or self._closed:
            self.raise_failure()
        if _STORES_IN_ORDER and self._all_served(batch, step):
            return True
        with self._lock:
            self.raise_failure()
            rung = _drain(self.bells[batch])
            if self._all_served(batch, step) and (rung or _STORES_IN_ORDER):
                os.eventfd_write(self.bells[batch], 1)  # Others may wait for it.
                return True
        return False

    def duplicate_bell(self, batch: int) -> int:
        """Returns a descriptor of the bell that stays valid when the pool closes."""
        with self._lock:
            self.raise_failure()
            return os.dup(self.bells[batch])

    def unfinished(self, batch: int, step: int) -> str:
        """Says who has not finished `step`."""
        parts = []
        for worker, served in enumerate(self.memory.served[:, batch].tolist()):
            if served != step:
                running = int(self.memory.current[worker])
                what = f"is in environment {running - 1}" if running else "has not begun"
                parts.append(f"worker {worker} (pid {self._pid(worker)}) {what}")
        return ", ".join(parts)

    def _all_served(self, batch: int, step: int) -> bool:
        served = self.memory.served[:, batch].tolist()
        return bool(served.count(step) == len(served))

    # Failures.

    def raise_failure(self) -> None:
        """Raises what has befallen the pool, if anything has."""
        if self._failure is not None:
            raise EnvError(**self._failure)
        if self._closed:
            raise Closed("the EnvPool is closed")
        if os.getpid() != self._owner:
            raise Closed("this EnvPool belongs to the process that made it, not to its fork")

    def state(self) -> str:
        """Says how the pool stands in one word."""
        return "failed" if self._failure is not None else "closed" if self._closed else "open"

    def handle_alarms(self) -> None:
        """Acts on what the processes have told; what is fatal is raised by `raise_failure`."""
        with self._lock:
            if self._closed:
                return
            for descriptor, _ in self._alarms.poll(0):
                if descriptor == self._server_pidfd:
                    self._on_server_death()
                elif descriptor == self._control.fileno():
                    self._listen_to_server()
                else:
                    self._listen_to_worker(self._worker_of[descriptor])

    def _listen_to_server(self) -> None:
        try:
            messages = self._control.receive_available()
        except EOFError:
            self._ignore(self._control.fileno())  # Its pidfd tells the rest.
            return
        for message in messages:
            if isinstance(message, channel.Died):
                self._on_worker_death(message)
            else:
                self._fail("create_env cannot be loaded", remote_traceback=message.traceback)

    def _listen_to_worker(self, worker: int) -> None:
        try:
            messages = self._links[worker].receive_available()
        except EOFError:
            self._ignore(self._links[worker].fileno())  # The server has died.
            return
        for message in messages:
            if isinstance(message, channel.Making):
                self._making[worker] = message
            elif isinstance(message, channel.Made):
                self._on_made(worker, message)
            elif isinstance(message, channel.Recreated):
                logs.logger.warning(
                    "environment %d raised in %s and was made anew:\n%s",
                    message.environment,
                    message.doing,
                    message.traceback,
                )
            else:
                self._fail(
                    f"environment {message.environment} raised in {message.doing}: {message.error}",
                    environments=(message.environment,),
                    worker_pid=self._pid(worker),
                    remote_traceback=message.traceback,
                )

    def _on_made(self, worker: int, made: channel.Made) -> None:
        self._made[worker] = made
        if self._ready:
            self._require_same_spaces(self.shape, made)
            self._links[worker].send(channel.Mapped(self.shape))
        elif all(self._made):
            self._map(made)

    def _map(self, made: channel.Made) -> None:
        """All environments exist for the first time: make the memory for what they need."""
        options = self._options
        self.shape = PoolShape(
            options.workers,
            options.batches,
            options.batch_size,
            made.observation,
            made.action,
            options.terminal_observation,
        )
        self.spaces = made.spaces
        for other in self._made:
            assert other is not None
            self._require_same_spaces(self.shape, other)
        self.memory = PoolMemory(self.shape, self._memory_fd, create=True)
        for link in self._links:
            link.send(channel.Mapped(self.shape))
        self._ready = True

    def _require_same_spaces(self, shape: PoolShape, made: channel.Made) -> None:
        ours = keys(shape.observation), keys(shape.action)
        theirs = keys(made.observation), keys(made.action)
        if ours != theirs:
            self._fail(
                "all environments of a pool need the same spaces, but those of worker "
                f"{made.pid} have observation {theirs[0]} and action {theirs[1]}; "
                f"others have {ours[0]} and {ours[1]}"
            )

    def _on_worker_death(self, died: channel.Died) -> None:
        worker = died.worker
        self._listen_to_worker(worker)  # It may have told why.
        self._links[worker].discard_partial()
        if self._failure is not None:
            return
        options = self._options
        environments = rows_of(worker, options.workers, options.batch_size)
        running = int(self.memory.current[worker]) if self._ready else 0
        where = f"while it ran environment {running - 1}; it had" if running else "with"
        first, last = environments[0], environments[-1]
        text = (
            f"worker {worker} of the EnvPool (pid {died.pid}) {describe_exit(died.returncode)} "
            f"{where} environments {first} to {last} of each batch"
        )
        if self._options.restart and self._may_restart(worker):
            logs.logger.warning("%s; restarting it", text)
            self._restart_worker(worker)
            return
        self._fail(
            text,
            environments=(running - 1,) if running else tuple(environments),
            worker_pid=died.pid,
            returncode=died.returncode,
        )

    def _may_restart(self, worker: int) -> bool:
        """Tells whether `worker` may be restarted: not for ever without a step in between."""
        if not self._ready:
            return False
        progress = self.memory.served[worker].tolist()
        fruitless = progress == self._progress[worker]
        self._fruitless[worker] = self._fruitless[worker] + 1 if fruitless else 0
        self._progress[worker] = progress
        return self._fruitless[worker] < _FRUITLESS_RESTARTS

    def _restart_worker(self, worker: int) -> None:
        # Nobody knows whether the dead one took its tokens: take them all, so that every worker
        # that finishes from now on rings the bell, and ring it for those that have finished.
        for tokens, bell in zip(self._tokens, self.bells, strict=True):
            while _drain(tokens):
                continue
            os.eventfd_write(bell, 1)
        self._lives[worker] += 1
        self.memory.current[worker] = 0
        self._control.send(channel.Start(worker, self._lives[worker]))

    def _on_server_death(self) -> None:
        self._listen_to_server()
        returncode = self._server.wait()
        self._ignore(self._server_pidfd)
        self._fail(
            f"the fork server of the EnvPool (pid {self._server.pid}) {describe_exit(returncode)}",
            worker_pid=self._server.pid,
            returncode=returncode,
        )

    def _ignore(self, descriptor: int) -> None:
        if descriptor in self._watched:
            self._watched.discard(descriptor)
            self._alarms.unregister(descriptor)

    def _fail(self, message: str, **details: Any) -> None:
        if self._failure is None:
            self._failure = {"message": message, **details}
        self._ring_all()

    def _ring_all(self) -> None:
        for bell in self.bells:
            os.eventfd_write(bell, 1)

    def _pid(self, worker: int) -> int | None:
        making = self._making[worker]
        return None if making is None else making.pid

    # Starting and ending.

    def _start_server(self, setup: channel.Setup) -> None:
        ours, theirs = socket.socketpair()
        parent = os.pidfd_open(self._owner)
        shared = [setup.memory, *setup.doorbells, *setup.bells, *setup.tokens, *setup.channels]
        # sys.path goes along, so that the server finds moolink and create_env where we found them.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from moolink.env_pool.server import main; "
            f"main({theirs.fileno()}, {parent}, {shared})"
        )
        # A worker is meant to use one core.
        environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, "1")
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), parent, *shared),
        )
        theirs.close()
        os.close(parent)
        self._control = channel.Channel(ours)
        self._control.send(setup)

    def _watch(self) -> None:
        self._server_pidfd = os.pidfd_open(self._server.pid)
        self._worker_of = {link.fileno(): worker for worker, link in enumerate(self._links)}
        self._alarms = select.epoll()
        self.alarms = self._alarms.fileno()
        self._watched = {self._server_pidfd, self._control.fileno(), *self._worker_of}
        for descriptor in self._watched:
            self._alarms.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Ends all processes and closes all descriptors. Idempotent; does nothing in a fork."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ring_all()
            if self._ready:
                self.memory.closing[0] = 1
            for doorbell in self._doorbells:
                os.eventfd_write(doorbell, 1)
        for link in self._links:
            link.close()
        if hasattr(self, "_control"):
            self._end_server()
        if hasattr(self, "_alarms"):
            self._alarms.close()
            os.close(self._server_pidfd)
        descriptors = (self._memory_fd, *self._doorbells, *self.bells, *self._tokens)
        for descriptor in descriptors:
            os.close(descriptor)

    def _end_server(self) -> None:
        grace = _GRACE if self._ready and self._failure is None else _FAILED_GRACE
        try:
            self._control.send(channel.Close(grace))
        except (BrokenPipeError, ConnectionResetError):
            logs.logger.debug("the fork server had ended before it was told to")
        try:
            self._server.wait(grace + _SERVER_GRACE)
        except subprocess.TimeoutExpired:
            self._server.kill()  # Its workers die with it.
            self._server.wait()
        self._control.close()


def _drain(descriptor: int) -> bool:
    """Reads a non-blocking eventfd; tells whether there was something to read."""
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return False
    return True
