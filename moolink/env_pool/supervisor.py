"""The pool's side of its processes: starts them, hears of their failures, ends them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import pickle
import select
import socket
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

from moolink._core import Lock
from moolink.env_pool import channel, starting
from moolink.env_pool.board import Command
from moolink.env_pool.memory import PoolMemory, PoolShape, rows_of
from moolink.env_pool.options import PoolOptions
from moolink.env_pool.spaces import keys
from moolink.errors import Closed, EnvError, Error, TimeoutError
from moolink.internal import deadlines, forks, logs
from moolink.internal.processes import describe_exit
from moolink.metrics import sources
from moolink.metrics.sources import Value

_GRACE = 2.0  # seconds that workers have to close their environments
_FAILED_GRACE = 0.2  # the same, when the pool has failed
_SERVER_GRACE = 3.0  # further seconds that the server has to end
_FRUITLESS_RESTARTS = 3  # restarts of a worker that finishes no step between them

_pools = itertools.count()


class Supervisor:
    """Owns the fork server, the descriptors shared with the workers, and the shared memory.

    Attributes:
        lock: guards the state of the processes, and requests.
        memory: the shared memory.
        bells: one descriptor a batch.
        alarms: a descriptor, readable when a process has something to tell.
        spaces: for each worker, the pickle of its environments' spaces; empty if they cannot be
            pickled.
        face: pickle of the first environment's `channel.Face`.
        rows: rows that are stepped together: those of a vector environment, else 1.
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
        self._in_child = False
        self.lock = Lock()
        forks.changes_in_children(self)
        self._failure: dict[str, Any] | None = None
        self._closed = False
        workers = options.workers
        self._lives = [0] * workers
        self._steps = 0  # that were asked for, of all environments
        self._labels = {"pool": str(next(_pools))}
        self._id: str | None = None  # of its environments; None: not read yet
        self._progress = [-1] * workers
        self._fruitless = [0] * workers
        self._making: list[channel.Making | None] = [None] * workers
        self._made: list[channel.Made | None] = [None] * workers
        self._ready = False
        self._results = channel.Results()
        self._received = [0] * workers
        # Arguments of requests that are not known to be served, for a worker's next life.
        self._arguments: list[collections.deque[tuple[int, bytes]]] = [
            collections.deque() for _ in range(workers)
        ]
        setup = _setup(options)  # Before anything is open that would have to be closed.
        self._memory_fd = os.memfd_create("moolink-env-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(workers)]
        plain = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.bells = [os.eventfd(0, plain) for _ in range(options.batches)]
        pairs = [socket.socketpair() for _ in range(workers)]
        self._links = [channel.Channel(ours) for ours, _ in pairs]
        setup = dataclasses.replace(
            setup,
            memory=self._memory_fd,
            doorbells=self._doorbells,
            bells=self.bells,
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
        sources.add(self)

    def _forked(self) -> None:
        self.lock = Lock()
        self._in_child = True

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
        """Names the workers that have not made their environments."""
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

    # Requests.

    def push(self, parts: list[tuple[int, int, int]], command: Command) -> None:
        """Makes requests without arguments: (worker, first row, number of rows) of each.

        The caller holds the lock, and actions are in place.
        """
        push = self.memory.board.push
        if command == Command.STEP:
            self._steps += sum(part[2] for part in parts)
        asleep = {part[0] for part in parts if push(*part, command)}
        # When all are made: a worker that is woken may take the core that this process runs on.
        for worker in asleep:
            os.eventfd_write(self._doorbells[worker], 1)

    def push_with(self, part: tuple[int, int, int], command: Command, arguments: bytes) -> None:
        """Makes a request with `channel.Arguments`, encoded; the caller holds the lock."""
        board, worker = self.memory.board, part[0]
        kept = self._arguments[worker]
        position = board.position(worker)
        while kept and kept[0][0] < position:
            kept.popleft()
        kept.append((board.pushed(worker), arguments))
        # Awake before they are sent, as long arguments need one to read them.
        self.push([part], command)
        if self._made[worker] is not None:
            self._send(worker, arguments)  # Otherwise it is told when it is there again.

    def _send(self, worker: int, arguments: bytes) -> None:
        """Sends arguments to a worker, which may itself be waiting for us to read its results."""
        life, link = self._lives[worker], self._links[worker]
        poll = select.poll()
        poll.register(link.fileno(), select.POLLOUT)
        poll.register(self.alarms, select.POLLIN)

        def full() -> bool:
            poll.poll()
            self.handle_alarms()
            # Its next life gets them from `_on_made`.
            return self._failure is None and self._lives[worker] == life

        link.send_encoded(arguments, full)

    def results(self, rows: Iterable[int]) -> channel.Results:
        """Takes the results that have come in messages about `rows`."""
        board = self.memory.board
        with self.lock:
            for worker, received in enumerate(self._received):
                if board.sent(worker) != received and self._failure is None:
                    self._listen_to_worker(worker)
            return self._results.take(rows)

    def spaces_of_rows(self) -> list[tuple[Any, Any]]:
        """Returns the observation and the action space of each environment, of a pool of one batch.

        Raises:
            Error: they cannot be pickled.
        """
        options, found = self._options, []
        for worker, data in enumerate(self.spaces):
            if not data:
                raise Error("the environments' spaces cannot be pickled")
            pairs = pickle.loads(data)
            count = len(rows_of(worker, options.workers, options.batch_size))
            found += pairs if len(pairs) > 1 else pairs * count
        return found

    # Failures.

    def raise_failure(self) -> None:
        """Raises the pool's failure, if there is one."""
        if self._failure is not None:
            raise EnvError(**self._failure)
        if self._closed:
            raise Closed("the EnvPool is closed")
        if self._in_child:
            raise Closed("this EnvPool belongs to the process that made it, not to its fork")

    def state(self) -> str:
        """Says how the pool stands in one word."""
        return "failed" if self._failure is not None else "closed" if self._closed else "open"

    def handle_alarms(self) -> None:
        """Acts on the processes' messages; `raise_failure` raises a fatal one."""
        with self.lock:
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
            if isinstance(message, channel.Results):
                self._received[worker] += 1
                self._results.add(message)
            elif isinstance(message, channel.Making):
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
                    worker_pid=self.pid(worker),
                    remote_traceback=message.traceback,
                )

    def _on_made(self, worker: int, made: channel.Made) -> None:
        self._made[worker] = made
        if self._ready:
            self._require_same_layout(made)
            self._links[worker].send(channel.Mapped(self.shape))
            position, life = self.memory.board.position(worker), self._lives[worker]
            for number, arguments in self._arguments[worker]:
                if number >= position and self._lives[worker] == life:
                    self._send(worker, arguments)
        elif all(self._made):
            self._map()

    def _map(self) -> None:
        """All environments exist for the first time: makes the memory that they need."""
        options, first = self._options, self._made[0]
        assert first is not None
        self.shape = PoolShape(
            options.workers,
            options.batches,
            options.batch_size,
            first.observation,
            first.action,
            options.final_obs,
            options.reward,
        )
        self.face = first.face
        self.rows = first.rows or 1
        self.spaces = []
        if first.warning:
            logs.logger.warning("%s", first.warning)
        for other in self._made:
            assert other is not None
            self._require_same_layout(other)
            self.spaces.append(other.spaces)
        self.memory = PoolMemory(self.shape, self._memory_fd, create=True)
        for link in self._links:
            link.send(channel.Mapped(self.shape))
        self._ready = True

    def _require_same_layout(self, made: channel.Made) -> None:
        bounds = self._options.behaviour.compare == "spaces"
        ours, theirs = (
            [keys(tree, bounds=bounds) for tree in (has.observation, has.action)]
            for has in (self.shape, made)
        )
        if (made.rows or 1) != self.rows:
            self._fail(
                f"all environments of a pool need as many rows, but those of worker {made.pid} "
                f"have {made.rows or 1}; others have {self.rows}"
            )
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
        running = self.memory.board.current(worker) if self._ready else None
        where = "with" if running is None else f"while it ran environment {running}; it had"
        first, last = environments[0], environments[-1]
        text = (
            f"worker {worker} of the EnvPool (pid {died.pid}) {describe_exit(died.returncode)} "
            f"{where} environments {first} to {last} of each batch"
        )
        if self._options.on_crash == "restart" and self._may_restart(worker):
            logs.logger.warning("%s; restarting it", text)
            self._restart_worker(worker)
            return
        self._fail(
            text,
            environments=tuple(environments) if running is None else (running,),
            worker_pid=died.pid,
            returncode=died.returncode,
        )

    def _may_restart(self, worker: int) -> bool:
        """Tells whether `worker` may be restarted: not for ever without a step in between."""
        if not self._ready:
            return False
        progress = self.memory.board.position(worker)
        fruitless = progress == self._progress[worker]
        self._fruitless[worker] = self._fruitless[worker] + 1 if fruitless else 0
        self._progress[worker] = progress
        return self._fruitless[worker] < _FRUITLESS_RESTARTS

    def _restart_worker(self, worker: int) -> None:
        self._lives[worker] += 1
        self._making[worker] = self._made[worker] = None
        self.memory.board.revive(worker, self._received[worker])
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

    def pid(self, worker: int) -> int | None:
        """Returns a worker's process id, None while it is being started."""
        making = self._making[worker]
        return None if making is None else making.pid

    # Starting and ending.

    def _start_server(self, setup: channel.Setup) -> None:
        ours, theirs = socket.socketpair()
        parent = os.pidfd_open(self._owner)
        options = self._options
        self._server = starting.start_server(
            options.start, setup, options.create_env, theirs.fileno(), parent
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

    @property
    def environment(self) -> str:
        """The id of its environments, for the dashboard; "": they have none."""
        if self._id is None and self.face:
            try:
                spec = pickle.loads(self.face).spec
                self._id = str(getattr(spec, "id", None) or "")
            except Exception:  # noqa: BLE001 - the user's classes; a report does without the id
                self._id = ""
        return self._id or ""

    def _metrics(self) -> Iterator[Value]:
        if not self._closed and not self._in_child:
            rows = self._options.batch_size * self._options.batches
            yield "moolink_environments", self._labels, rows
            yield "moolink_environment_steps_total", self._labels, self._steps
            yield "moolink_environment_restarts_total", self._labels, sum(self._lives)

    def close(self) -> None:
        """Ends all processes and closes all descriptors. Idempotent; does nothing in a fork."""
        if self._in_child:
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
            sources.remove(self)
            self._ring_all()
            if self._ready:
                self.memory.board.close()
            for doorbell in self._doorbells:
                os.eventfd_write(doorbell, 1)
        for link in self._links:
            link.close()
        if hasattr(self, "_control"):
            self._end_server()
        if hasattr(self, "_alarms"):
            self._alarms.close()
            os.close(self._server_pidfd)
        descriptors = (self._memory_fd, *self._doorbells, *self.bells)
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


def _setup(options: PoolOptions) -> channel.Setup:
    """Makes the part of the workers' setup that depends on the user's options."""
    if options.start == "fork":
        starting.require_forkable()
        create_env, main = b"", None
    else:
        create_env, main = starting.pickled(options.create_env)
    return channel.Setup(
        create_env=create_env,
        main=main,
        passes_index=starting.takes_index(options.create_env),
        workers=options.workers,
        batches=options.batches,
        batch_size=options.batch_size,
        seed=options.seed,
        behaviour=options.behaviour,
        recreates=options.on_crash == "restart",
        memory=-1,
        doorbells=[],
        bells=[],
        channels=[],
    )
