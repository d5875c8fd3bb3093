"""Processes of this machine: their start, their output, their end.

One loop: pidfds tell of ends, pipes carry output. Each process is the leader of its own process
group, so that whatever it started ends with it; all end with the process that started them.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from moolink.internal.processes import ends_with_parent
from moolink.launch.loop import READ, Loop
from moolink.launch.run_folder import RunFolder

_GUARD = str(pathlib.Path(__file__).with_name("guard.py"))
_DRAIN_TIME = 0.5  # seconds that output is still read after a process ended


class Watcher(Protocol):
    """The events of a process, called by the loop."""

    def output(self, stream: str, data: bytes) -> None:
        """It wrote to "stdout" or "stderr"."""

    def announced(self, text: str) -> None:
        """It wrote a line to the descriptor it was given for that."""

    def ended(self, returncode: int) -> None:
        """It ended, as `subprocess` numbers it. Output may still come."""

    def drained(self) -> None:
        """No more output comes; nothing at all comes after this."""


class LocalProcess:
    """A process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], watcher: Watcher) -> None:
        self.watcher = watcher
        self.popen = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.open_pipes: set[IO[bytes]] = set()
        self.has_ended = False
        self.is_drained = False

    def terminate(self) -> None:
        """Sends SIGTERM to the process alone: it ends its own workers, which it may need to save
        its state."""
        if not self.has_ended:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Kills it with all that it started."""
        if not self.has_ended:
            _kill_group(self.pid)


class Machine:
    """This machine: starts processes, and ends with all of them.

    Attributes:
        directory: a folder that only this user can read, removed in the end.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._folder = RunFolder()
        self.directory = self._folder.path
        self._processes: set[LocalProcess] = set()
        self._is_paused = False
        read_fd, self._guard_pipe = os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(read_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(read_fd,),
            start_new_session=True,
        )
        os.close(read_fd)
        self._tell_guard(self.directory)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        watcher: Watcher,
        announces: bool = False,
        has_stdin: bool = False,
    ) -> LocalProcess:
        """Starts a process.

        Args:
            command: the program and its arguments.
            environment: all of it.
            watcher: is told of its output and its end.
            announces: whether it gets ``--announce-fd FD`` as last arguments, for a line.
            has_stdin: whether its standard input is a pipe, ``popen.stdin``.

        Raises:
            OSError: there is no such program, or it cannot be started.
        """
        stdin = subprocess.PIPE if has_stdin else subprocess.DEVNULL
        if not announces:
            process = _start(command, environment, stdin, watcher)
        else:
            read_fd, write_fd = os.pipe()
            try:
                announcing = [*command, "--announce-fd", str(write_fd)]
                process = _start(announcing, environment, stdin, watcher, (write_fd,))
            except BaseException:
                os.close(read_fd)
                raise
            finally:
                os.close(write_fd)
            self._read_announcement(read_fd, watcher)
        self._tell_guard(f"+{process.pid}")
        self._processes.add(process)
        for name, pipe in (("stdout", process.popen.stdout), ("stderr", process.popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            process.open_pipes.add(pipe)
            if not self._is_paused:
                self._watch_pipe(process, name, pipe)
        self._loop.watch(process.pidfd, READ, lambda: self._ended(process))
        return process

    def pause(self, is_paused: bool) -> None:
        """Stops reading output, so that processes that write much have to wait, or resumes it."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for process in self._processes:
            for name in ("stdout", "stderr"):
                pipe = getattr(process.popen, name)
                if pipe in process.open_pipes:
                    if is_paused:
                        self._loop.unwatch(pipe.fileno())
                    else:
                        self._watch_pipe(process, name, pipe)

    def close(self) -> None:
        """Called when all processes have ended: removes the folder."""
        os.close(self._guard_pipe)
        self._guard.wait()
        self._folder.close()

    def _watch_pipe(self, process: LocalProcess, name: str, pipe: IO[bytes]) -> None:
        def read() -> None:
            data = os.read(pipe.fileno(), 65536)
            if data:
                process.watcher.output(name, data)
                return
            self._close_pipe(process, pipe)
            if process.has_ended and not process.open_pipes:
                self._drained(process)

        self._loop.watch(pipe.fileno(), READ, read)

    def _read_announcement(self, descriptor: int, watcher: Watcher) -> None:
        text = b""

        def read() -> None:
            nonlocal text
            data = os.read(descriptor, 4096)
            text += data
            if not data:  # the process closed it, or ended
                self._loop.unwatch(descriptor)
                os.close(descriptor)
                if text:
                    watcher.announced(text.split(b"\n")[0].decode().strip())

        self._loop.watch(descriptor, READ, read)

    def _close_pipe(self, process: LocalProcess, pipe: IO[bytes]) -> None:
        process.open_pipes.discard(pipe)
        self._loop.unwatch(pipe.fileno())
        pipe.close()

    def _ended(self, process: LocalProcess) -> None:
        self._loop.unwatch(process.pidfd)
        os.close(process.pidfd)
        # This comes before the leader is reaped: until then no other group can have its number.
        _kill_group(process.pid)
        returncode = process.popen.wait()
        process.has_ended = True
        self._tell_guard(f"-{process.pid}")
        if process.popen.stdin is not None and not process.popen.stdin.closed:
            self._loop.unwatch(process.popen.stdin.fileno())
            process.popen.stdin.close()
        process.watcher.ended(returncode)
        if process.open_pipes:
            self._loop.after(_DRAIN_TIME, lambda: self._drained(process))
        else:
            self._drained(process)

    def _drained(self, process: LocalProcess) -> None:
        """All was read, or another process holds the output open."""
        if process.is_drained:
            return
        if process.open_pipes and self._is_paused:
            self._loop.after(_DRAIN_TIME, lambda: self._drained(process))  # not read to its end
            return
        process.is_drained = True
        for pipe in list(process.open_pipes):
            self._close_pipe(process, pipe)
        self._processes.discard(process)
        process.watcher.drained()

    def _tell_guard(self, line: str) -> None:
        try:
            os.write(self._guard_pipe, os.fsencode(f"{line}\n"))
        except BrokenPipeError:
            # The guard was killed; PR_SET_PDEATHSIG still ends the peers with us.
            return


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    watcher: Watcher,
    pass_fds: tuple[int, ...] = (),
) -> LocalProcess:
    popen = subprocess.Popen(
        ends_with_parent(command),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        pass_fds=pass_fds,
        process_group=0,
    )
    try:
        return LocalProcess(popen, watcher)
    except OSError:  # too many files are open: its end would not be noticed
        with popen:  # closes its pipes
            _kill_group(popen.pid)
        raise


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the GPUs that processes here may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    devices = pathlib.Path("/dev").glob("nvidia[0-9]*")
    return [str(number) for number in range(len(list(devices)))]


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # It ended by itself.
