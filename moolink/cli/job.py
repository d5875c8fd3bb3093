"""The processes of one ``moolink run`` job, from their start to the last one's end.

One thread and one selector: pidfds tell of ends, pipes carry output, a wake-up descriptor tells of
signals. Each peer is the leader of its own process group, so that whatever it started ends with it.
"""

from __future__ import annotations

import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Self

from moolink.accumulate import run_record
from moolink.cli.output import PrefixedStream, Screen
from moolink.internal.processes import describe_exit, ends_with_parent, exit_status, share_cores

if TYPE_CHECKING:
    from moolink.cli.run import RunOptions

_GUARD = str(pathlib.Path(__file__).with_name("guard.py"))
_BROKER_START_TIMEOUT = 20.0  # seconds; imports included, on a machine busy with other work
_BROKER_RESTARTS = 3
_BROKER_GRACE = 0.3  # seconds between SIGTERM and SIGKILL; it holds soft state only
_DRAIN_TIME = 0.5  # seconds that output is still read after a process ended
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_FAULT_HANDLER = {"PYTHONFAULTHANDLER": "1"}  # a peer that crashes prints its Python stacks
_LAST_WORDS = 40  # lines of a failed peer's stderr that are repeated at the end


class JobError(Exception):
    """The job cannot run or go on; the text says why and what to do."""


class Child:
    """One process of the job with its output streams."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], screen: Screen) -> None:
        prefix = f"[{name}] ".encode()
        self.name = name
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.stdout = PrefixedStream(screen, "stdout", prefix)
        self.stderr = PrefixedStream(screen, "stderr", prefix)
        self.open_pipes = 2
        self.drain_until: float | None = None  # set when the process ended

    def describe(self) -> str:
        """Names the process as the user knows it."""
        kind = f"peer {self.name}" if self.name.isdigit() else self.name
        return f"{kind} (pid {self.process.pid})"

    def last_words(self) -> list[bytes]:
        """Returns the last traceback on stderr, or else the last lines written."""
        lines = list(self.stderr.tail) or list(self.stdout.tail)
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].startswith(b"Traceback (most recent call last)"):
                return lines[index:]
        return lines[-_LAST_WORDS:]


class Job:
    """A broker and its peers, run to their end."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._screen = Screen(sys.stdout.buffer, sys.stderr.buffer)
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, Child] = {}
        self._draining: list[Child] = []
        self._broker: Child | None = None
        self._broker_address = options.connect or ""
        self._broker_restarts = 0
        self._restarts_left = options.restarts
        self._directory = tempfile.TemporaryDirectory(prefix="moolink-run-")
        self._cores = share_cores(options.cores, options.peers)
        self._guard: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None
        self._failed: Child | None = None
        self._status = 0
        self._stopping = False
        self._kill_at: float | None = None

    def run(self) -> int:
        """Starts everything, serves until the last peer ended, returns the job's exit status."""
        with _SignalPipe(self._on_signal) as signals:
            self._selector.register(signals.read_fd, selectors.EVENT_READ, signals.dispatch)
            try:
                self._start_guard()
                if self._options.connect is None:
                    self._broker_address = self._start_announcing_broker()
                for index in range(self._options.peers):
                    if not self._stopping:
                        self._start_peer(index)
                while self._peers or self._draining:
                    self._serve()
            except JobError as error:
                self._say(str(error))
                self._status = self._status or 1
            finally:
                self._end_everything()
        self._report()
        return self._status

    # Starting.

    def _start_guard(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_inheritable(read_fd, True)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(read_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(read_fd,),
            start_new_session=True,
        )
        os.close(read_fd)
        self._guard_pipe = write_fd

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], pass_fds: tuple[int, ...]
    ) -> Child:
        process = subprocess.Popen(
            ends_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=pass_fds,
            process_group=0,
        )
        self._tell_guard("+", process.pid)
        child = Child(name, process, self._screen)
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe, stream in ((process.stdout, child.stdout), (process.stderr, child.stderr)):
            os.set_blocking(pipe.fileno(), False)
            reader = self._reader(child, pipe, stream)
            self._selector.register(pipe, selectors.EVENT_READ, reader)
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        return child

    def _start_peer(self, index: int, restarted: bool = False) -> None:
        cores = str(self._cores[index])
        defaults = dict.fromkeys(_THREAD_VARIABLES, cores) | _FAULT_HANDLER
        environment = defaults | os.environ
        environment |= self._options.security | {
            "MOOLINK_BROKER": self._broker_address,
            "MOOLINK_GROUP": self._options.group,
            "MOOLINK_PEER_INDEX": str(index),
            "MOOLINK_PEER_NAME": self._peer_name(index),
            "MOOLINK_NUM_PEERS": str(self._options.peers),
            "MOOLINK_CORES": cores,
            run_record.DIRECTORY: self._directory.name,
            run_record.RESTARTED: str(int(restarted)),
            "PYTHONUNBUFFERED": "1",  # A peer's lines must appear when they are written.
        }
        self._peers[index] = self._start(str(index), self._options.command, environment, ())

    def _peer_name(self, index: int) -> str:
        """A name for the peer: unique at our own broker, and at one that others use too."""
        if self._options.connect is None:
            return f"peer-{index}"
        return f"{socket.gethostname()}-{os.getpid()}-{index}"

    def _start_broker(self, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        command = [sys.executable, "-m", "moolink.broker", *arguments]
        environment = os.environ | self._options.security | {"PYTHONUNBUFFERED": "1"}
        self._broker = self._start("broker", command, environment, pass_fds)

    def _start_announcing_broker(self) -> str:
        """Starts a broker on a free port; returns the address it announced ("" if asked to end)."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        announced = b""

        def read() -> None:
            nonlocal announced
            data = os.read(read_fd, 4096)
            announced += data
            if not data:
                self._selector.unregister(read_fd)

        try:
            self._start_broker(
                "127.0.0.1:0", "--first", "--announce-fd", str(write_fd), pass_fds=(write_fd,)
            )
            os.close(write_fd)
            self._selector.register(read_fd, selectors.EVENT_READ, read)
            deadline = time.monotonic() + _BROKER_START_TIMEOUT
            while b"\n" not in announced and not self._stopping:
                if self._broker is None:
                    raise JobError("the broker ended before it announced its address")
                if time.monotonic() >= deadline:
                    raise JobError(f"the broker was not up within {_BROKER_START_TIMEOUT:g} s")
                self._serve(deadline)
        finally:
            if read_fd in self._selector.get_map():
                self._selector.unregister(read_fd)
            os.close(read_fd)
        return announced.split(b"\n")[0].decode().strip()

    # Serving.

    def _serve(self, deadline: float | None = None) -> None:
        """Waits for the next events and acts on them; acts on what has become due."""
        times = [child.drain_until for child in self._draining if child.drain_until is not None]
        times += [time_ for time_ in (deadline, self._kill_at) if time_ is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else None
        for key, _ in self._selector.select(timeout):
            key.data()
        now = time.monotonic()
        for child in list(self._draining):
            if child.open_pipes == 0 or now >= (child.drain_until or 0.0):
                self._close_output(child)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            running = [*self._peers.values(), *([self._broker] if self._broker else [])]
            for child in running:
                _kill_group(child.process.pid)

    def _reader(self, child: Child, pipe: IO[bytes], stream: PrefixedStream) -> Callable[[], None]:
        def read() -> None:
            data = os.read(pipe.fileno(), 65536)
            if data:
                stream.feed(data)
                return
            self._selector.unregister(pipe)
            pipe.close()
            child.open_pipes -= 1

        return read

    def _ended(self, child: Child) -> None:
        """A process ended: end what it started, and decide what its end means for the job."""
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        # Before the leader is reaped: until then nobody else can have its process group's number.
        _kill_group(child.process.pid)
        returncode = child.process.wait()
        self._tell_guard("-", child.process.pid)
        child.drain_until = time.monotonic() + _DRAIN_TIME
        self._draining.append(child)
        if child is self._broker:
            self._broker = None
            self._broker_ended(returncode)
        else:
            del self._peers[int(child.name)]
            self._peer_ended(child, returncode)

    def _peer_ended(self, child: Child, returncode: int) -> None:
        if returncode == 0 or self._stopping:
            return
        if self._restarts_left > 0 and run_record.any_ended(self._directory.name):
            self._say(
                f"{child.describe()} {describe_exit(returncode)}; it is not restarted, for the job "
                "has finished"
            )
            self._status = exit_status(returncode)
            return
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._say(f"{child.describe()} {describe_exit(returncode)}; restarting it")
            self._start_peer(int(child.name), restarted=True)
            return
        self._failed = child
        self._status = exit_status(returncode)
        self._stop()

    def _broker_ended(self, returncode: int) -> None:
        if self._stopping or not self._broker_address:
            return  # We ended it, or it never came up, which _start_announcing_broker reports.
        how = describe_exit(returncode)
        if self._broker_restarts >= _BROKER_RESTARTS:
            self._status = 1
            self._say(f"the broker {how} after {_BROKER_RESTARTS} restarts; ending the job")
            self._stop()
            return
        self._broker_restarts += 1
        self._say(f"the broker {how}; restarting it on {self._broker_address}")
        self._start_broker(self._broker_address)

    def _close_output(self, child: Child) -> None:
        """Stops reading an ended process's output: all was read, or another holds it open."""
        self._draining.remove(child)
        for pipe in (child.process.stdout, child.process.stderr):
            if pipe is not None and not pipe.closed:
                self._selector.unregister(pipe)
                pipe.close()
        child.stdout.close()
        child.stderr.close()

    # Ending.

    def _on_signal(self, number: int) -> None:
        if self._stopping:
            self._kill_at = time.monotonic()  # Asked twice: no more grace.
            return
        self._signal = number
        self._status = 128 + number
        self._stop()

    def _stop(self) -> None:
        """Asks every peer to end; those that do not are killed when the grace is over."""
        if self._stopping:
            return
        self._stopping = True
        self._kill_at = time.monotonic() + self._options.grace
        for child in self._peers.values():
            # The peer alone: it ends its own workers, which it may need to save its state.
            signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)

    def _end_everything(self) -> None:
        """Ends what still runs, the broker last: peers may say farewell to it."""
        self._stop()
        while self._peers:
            self._serve()
        if self._broker is not None:
            self._kill_at = time.monotonic() + _BROKER_GRACE
            signal.pidfd_send_signal(self._broker.pidfd, signal.SIGTERM)
        while self._broker is not None or self._draining:
            self._serve()
        if self._guard is not None:
            os.close(self._guard_pipe)
            self._guard.wait()
        self._selector.close()
        self._directory.cleanup()

    def _report(self) -> None:
        """Says why the job ended before its time, with the failed peer's own error last."""
        if self._signal is not None:
            self._say(f"ended by {signal.Signals(self._signal).name}")
        if self._failed is not None:
            child = self._failed
            words = child.last_words()
            how = describe_exit(child.process.returncode)
            last = "; its last words:" if words else " without a word"
            self._say(f"{child.describe()} {how} and ended the job{last}")
            for line in words:
                self._screen.line("stderr", f"[{child.name}] ".encode() + line)

    def _say(self, text: str) -> None:
        self._screen.line("stderr", f"moolink run: {text}".encode())

    def _tell_guard(self, action: str, group: int) -> None:
        try:
            os.write(self._guard_pipe, f"{action}{group}\n".encode())
        except BrokenPipeError:
            # Somebody killed the guard; PR_SET_PDEATHSIG still ends the peers with us.
            return


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles a signal by nothing: the byte in the wake-up pipe is what counts."""


class _SignalPipe:
    """Turns the signals that end a job into calls from the selector loop."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self.read_fd, self._write_fd = os.pipe()

    def __enter__(self) -> Self:
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, _ignore) for number in _ENDING_SIGNALS}
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.read_fd)
        os.close(self._write_fd)

    def dispatch(self) -> None:
        """Reads the signal numbers that arrived and acts on them."""
        for number in os.read(self.read_fd, 64):
            if number in _ENDING_SIGNALS:
                self._on_signal(number)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # It ended by itself.
