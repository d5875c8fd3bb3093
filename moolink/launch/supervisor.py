"""A job from its start to the end of its last process: restarts, output, signals, exit status.

One thread and one loop. The supervisor decides; hosts start processes and tell of their ends.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from moolink.accumulate import run_record
from moolink.internal.processes import THREAD_VARIABLES, describe_exit, exit_status
from moolink.launch.description import Role
from moolink.launch.host import Host, JobError, Running, Task
from moolink.launch.loop import Loop, Signals, Timer
from moolink.launch.output import PrefixedStream, Screen
from moolink.launch.plan import Plan
from moolink.launch.shares import Seat, share_out

_BROKER_START_TIMEOUT = 20.0  # seconds; imports included, on a machine busy with other work
_BROKER_RESTARTS = 3
_BROKER_GRACE = 0.3  # seconds between SIGTERM and SIGKILL; it holds soft state only
_HOST_GRACE = 5.0  # seconds for a host's agent to end after the last of its processes
_WAIT_FOR_HOSTS = 60.0  # seconds that peers wait for lost hosts once nothing else runs
_FAULT_HANDLER = {"PYTHONFAULTHANDLER": "1"}  # a peer that crashes prints its Python stacks
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # lines must appear when they are written
_REPEATED_LINES = 40  # lines of a failed peer's stderr that are repeated at the end


class Process:
    """One process of the job: a peer's, or the broker. A peer that is restarted has another."""

    def __init__(self, supervisor: Supervisor, host: Host, seat: Seat | None, prefix: str) -> None:
        self._supervisor = supervisor
        self.host = host
        self.seat = seat  # None: the broker
        self.prefix = f"[{prefix}] ".encode()
        screen = supervisor.screen
        self.stdout = PrefixedStream(screen, "stdout", self.prefix)
        self.stderr = PrefixedStream(screen, "stderr", self.prefix)
        self.running: Running | None = None
        self.pid: int | None = None
        self.how = ""  # it ended

    def describe(self) -> str:
        """Names the process as the user knows it."""
        kind = f"{self.seat.role.name} {self.seat.index}" if self.seat else "broker"
        pid = "" if self.pid is None else f"pid {self.pid}"
        where = f"on {self.host.label}" if self.host.label else ""
        both = " ".join(part for part in (pid, where) if part)
        return f"{kind} ({both})" if both else kind

    def last_lines(self) -> list[bytes]:
        """Returns the last traceback on stderr, or else the last lines written."""
        lines = list(self.stderr.tail) or list(self.stdout.tail)
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].startswith(b"Traceback (most recent call last)"):
                return lines[index:]
        return lines[-_REPEATED_LINES:]

    # Events from its host.

    def started(self, pid: int) -> None:
        """It runs."""
        self.pid = pid

    def output(self, stream: str, data: bytes) -> None:
        """It wrote something."""
        (self.stdout if stream == "stdout" else self.stderr).feed(data)

    def announced(self, text: str) -> None:
        """The broker told its address."""
        if self.seat is None:
            self._supervisor.broker_announced(text)

    def ended(self, returncode: int) -> None:
        """It ended."""
        self.how = describe_exit(returncode)
        self._supervisor.ended(self, exit_status(returncode))

    def drained(self) -> None:
        """Nothing more comes from it."""
        self.stdout.close()
        self.stderr.close()
        self._supervisor.drained(self)

    def refused(self, why: str) -> None:
        """It could not be started."""
        self.how = f"could not be started: {why}"
        self._supervisor.ended(self, 127)
        self.drained()

    def lost(self, why: str) -> None:
        """Its host was lost."""
        self.how = f"is lost with its host: {why}"
        self._supervisor.ended(self, 1, with_host=True)
        self.drained()


class Supervisor:
    """A broker and the peers of all roles, run to their end."""

    def __init__(self, loop: Loop) -> None:
        self.screen = Screen(sys.stdout.buffer, sys.stderr.buffer)
        self._loop = loop
        self._peers: dict[tuple[str, int], Process] = {}  # those that run
        self._waiting: dict[tuple[str, int], Seat] = {}  # for their host
        self._open: set[Process] = set()  # whose output may still come
        self._broker: Process | None = None
        self._broker_port = 0  # 0: it has not announced one
        self._broker_restarts = 0
        self._broker_is_waiting = False
        self._signal: int | None = None
        self._failed: Process | None = None
        self._status = 0
        self._is_stopping = False
        self._is_giving_up = False
        self._kill_timer: Timer | None = None
        self._waiting_timer: Timer | None = None

    def run(self, plan: Plan, connect: Callable[[], None] = lambda: None) -> int:
        """Starts everything, serves until the job has ended, returns its exit status.

        Args:
            plan: the job and its hosts.
            connect: brings the hosts up.
        """
        self._plan = plan
        self._restarts_left = {role.name: role.restarts for role in plan.job.roles}
        self._all_elastic = all(role.elastic for role in plan.job.roles)
        with Signals(self._loop, self._on_signal):
            try:
                connect()
                self._start_all()
                while not self._is_over():
                    self._loop.turn()
            except JobError as error:
                self.say(str(error))
                self._status = self._status or 1
            finally:
                self._end_everything()
        self._report()
        return self._status

    def wait_until(self, done: Callable[[], bool], seconds: float, late: str) -> None:
        """Serves until something is done, or the job is to end.

        Raises:
            JobError: it took longer; the text is `late`.
        """
        timer = self._loop.after(seconds, lambda: None)
        while not done() and not self._is_stopping:
            if timer.is_cancelled:
                raise JobError(late)
            self._loop.turn()
        timer.cancel()

    @property
    def is_stopping(self) -> bool:
        """Whether the job has been asked to end."""
        return self._is_stopping

    def say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        self.screen.line("stderr", f"{self._plan.program}: {text}".encode())

    # Starting.

    def _start_all(self) -> None:
        if self._is_stopping:
            return
        share_out(self._plan.seats)
        if self._plan.broker is not None:
            self._start_broker(self._plan.broker.listen(), "--first", announces=True)
            self.wait_until(
                lambda: self._broker_port != 0 or self._broker is None,
                _BROKER_START_TIMEOUT,
                f"the broker was not up within {_BROKER_START_TIMEOUT:g} s",
            )
            if self._broker is None and not self._is_stopping:
                raise JobError("the broker ended before it announced its address")
        for seat in self._plan.seats:
            if not self._is_stopping:
                self._start_peer(seat)

    def _start_peer(self, seat: Seat, is_restarted: bool = False) -> None:
        role, job = seat.role, self._plan.job
        if not seat.host.is_up:
            self._waiting[role.name, seat.index] = seat
            return
        environment = {
            **_UNBUFFERED,
            **role.env,
            **self._plan.security,
            "MOOLINK_BROKER": self._broker_address(seat.host),
            "MOOLINK_GROUP": self._plan.group,
            "MOOLINK_ROLE": role.name,
            "MOOLINK_PEER_INDEX": str(seat.index),
            "MOOLINK_PEER_NAME": self._peer_name(role, seat.index),
            "MOOLINK_NUM_PEERS": str(role.count),
            "MOOLINK_CORES": str(seat.cores),
            "MOOLINK_TERMINAL": str(int(self.screen.is_terminal)),
            run_record.RESTARTED: str(int(is_restarted)),
        }
        if seat.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
        defaults = dict.fromkeys(THREAD_VARIABLES, str(seat.cores)) | _FAULT_HANDLER
        prefix = str(seat.index) if len(job.roles) == 1 else f"{role.name} {seat.index}"
        process = Process(self, seat.host, seat, prefix)
        self._peers[role.name, seat.index] = process
        self._start(process, Task(role.argv(self._plan.python), defaults, environment))

    def _start(self, process: Process, task: Task) -> None:
        self._open.add(process)
        process.running = process.host.start(task, process)

    def _peer_name(self, role: Role, index: int) -> str:
        """A name for the peer: unique at our own broker, and at one that others use too."""
        if self._plan.broker is not None:
            return f"{role.name}-{index}"
        kind = "" if len(self._plan.job.roles) == 1 else f"-{role.name}"
        return f"{socket.gethostname()}-{os.getpid()}{kind}-{index}"

    def _start_broker(self, *arguments: str, announces: bool = False) -> None:
        assert self._plan.broker is not None
        host = self._plan.broker.host
        python = self._plan.python if host.label else sys.executable
        # The launcher itself says which peers began and ended.
        command = [python, "-m", "moolink.broker", "--log-level", "warning"]
        environment = {**self._plan.security, **_UNBUFFERED}
        self._broker = Process(self, host, None, "broker")
        self._start(self._broker, Task([*command, *arguments], {}, environment, announces))

    def broker_announced(self, text: str) -> None:
        """The broker listens."""
        port = text.rpartition(":")[2]
        if re.fullmatch("[0-9]{1,5}", port):  # else it is none, and is missed in time
            self._broker_port = int(port)

    def _broker_address(self, host: Host) -> str:
        """The broker's address for processes on a host."""
        if self._plan.broker is None:
            return self._plan.job.broker or ""
        return self._plan.broker.address_for(host, self._broker_port)

    # Ends of processes.

    def ended(self, process: Process, status: int, with_host: bool = False) -> None:
        """A process ended: decides what that means for the job."""
        process.running = None
        if process is self._broker:
            self._broker = None
            self._broker_ended(process, with_host)
        elif process.seat is not None:
            del self._peers[process.seat.role.name, process.seat.index]
            if status != 0 and not self._is_stopping:
                self._peer_failed(process, process.seat, status, with_host)

    def drained(self, process: Process) -> None:
        """All of a process's output has come."""
        self._open.discard(process)

    def _peer_failed(self, process: Process, seat: Seat, status: int, with_host: bool) -> None:
        role, said = seat.role, f"{process.describe()} {process.how}"
        restarts = self._restarts_left[role.name]
        if (restarts > 0 or (role.elastic and with_host)) and self._has_finished(role):
            self.say(f"{said}; it is not restarted, for the job has finished")
            self._status = self._status if role.elastic else status
        elif role.elastic and with_host:
            self.say(f"{said}; it is started again when the host is back")
            self._start_peer(seat, is_restarted=True)
        elif restarts > 0:
            self._restarts_left[role.name] -= 1
            self.say(f"{said}; restarting it{' when the host is back' if with_host else ''}")
            self._start_peer(seat, is_restarted=True)
        elif role.elastic:
            self.say(f"{said}; the job goes on without it")
        else:
            self._failed, self._status = process, status
            self._stop()

    def _broker_ended(self, process: Process, with_host: bool) -> None:
        if self._is_stopping or self._broker_port == 0:
            return  # We ended it, or it never came up, which _start_all reports.
        if with_host:
            self.say(f"the broker {process.how}; it is started again when the host is back")
            self._broker_is_waiting = True
            return
        if self._broker_restarts >= _BROKER_RESTARTS:
            self._status = 1
            self.say(f"the broker {process.how} after {_BROKER_RESTARTS} restarts; ending the job")
            self._stop()
            return
        self._broker_restarts += 1
        self._restart_broker(process.how)

    def _restart_broker(self, how: str) -> None:
        assert self._plan.broker is not None
        listen = self._plan.broker.listen().rpartition(":")[0] + f":{self._broker_port}"
        self.say(f"the broker {how}; restarting it on {listen}")
        self._start_broker(listen)

    def _has_finished(self, role: Role) -> bool:
        """Whether the job's end has been noted, as far as this role is concerned."""
        hosts = self._plan.hosts
        return any(host.notes for host in hosts if role.elastic or host.role in ("", role.name))

    # Hosts that are lost and come back.

    def host_is_back(self, host: Host) -> None:
        """Starts the processes of a lost host again."""
        if self._is_stopping:
            return
        for other in self._plan.hosts:
            host.note(other.notes)
        if self._broker_is_waiting and self._plan.broker and self._plan.broker.host is host:
            self._broker_is_waiting = False
            self._restart_broker("can be reached again")
        for key, seat in list(self._waiting.items()):
            if seat.host is host:
                del self._waiting[key]
                self._start_peer(seat, is_restarted=True)

    def noted(self, host: Host, notes: Mapping[str, str]) -> None:
        """A host tells that the job has finished; others have to know, for peers that restart."""
        for other in self._plan.hosts:
            if other is not host:
                other.note(notes)

    # The end.

    def _is_over(self) -> bool:
        """Whether nothing is left that the job waits for, but output."""
        if self._is_stopping:
            return True

        def counts(seat: Seat | None) -> bool:
            return seat is not None and (self._all_elastic or not seat.role.elastic)

        running = any(counts(process.seat) for process in self._peers.values())
        waiting = [seat for seat in self._waiting.values() if counts(seat)]
        if running or not waiting:
            if self._waiting_timer is not None:
                self._waiting_timer.cancel()
                self._waiting_timer = None
            return not running and not any(counts(process.seat) for process in self._open)
        if self._waiting_timer is None:
            self._waiting_timer = self._loop.after(_WAIT_FOR_HOSTS, lambda: None)
        elif self._waiting_timer.is_cancelled:
            labels = ", ".join(sorted({seat.host.label for seat in waiting}))
            raise JobError(
                f"{len(waiting)} processes never came back: {labels} could not be reached"
            )
        return False

    def _on_signal(self, number: int) -> None:
        if self._is_stopping:
            self._is_giving_up = True
            self._kill_all()  # Asked twice: no more grace.
            return
        self._signal = number
        self._status = 128 + number
        self._stop()

    def _stop(self) -> None:
        """Asks every peer to end; those that do not are killed when the grace is over."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._waiting.clear()
        self._kill_timer = self._loop.after(self._plan.job.grace, self._kill_all)
        for process in self._peers.values():
            if process.running is not None:
                process.running.terminate()

    def _kill_all(self) -> None:
        for process in [*self._peers.values(), *([self._broker] if self._broker else [])]:
            if process.running is not None:
                process.running.kill()
        if self._is_giving_up:
            for host in self._plan.hosts:
                if host.label:
                    host.close()  # it may not be reached, and ends its processes by itself

    def _end_everything(self) -> None:
        """Ends the processes that still run, the broker last: peers may still send it LEAVE."""
        self._stop()
        while self._peers:
            self._loop.turn()
        if self._broker is not None and self._broker.running is not None:
            self._broker.running.terminate()
            self._loop.after(_BROKER_GRACE, self._kill_all)
        while self._broker is not None or self._open:
            self._loop.turn()
        remote = [host for host in self._plan.hosts if host.label]
        for host in remote:
            host.close()
        timer = self._loop.after(_HOST_GRACE, lambda: None)
        while not all(host.is_closed for host in remote):
            if timer.is_cancelled:
                for host in remote:
                    host.close()  # without its agent's consent
            self._loop.turn()
        timer.cancel()
        for host in self._plan.hosts:
            host.close()

    def _report(self) -> None:
        """Says why the job ended before its time, with the failed peer's own error last."""
        if self._signal is not None:
            self.say(f"ended by {signal.Signals(self._signal).name}")
        if self._failed is not None:
            process = self._failed
            words = process.last_lines()
            last = "; its last words:" if words else " without a word"
            self.say(f"{process.describe()} {process.how} and ended the job{last}")
            for line in words:
                self.screen.line("stderr", process.prefix + line)
