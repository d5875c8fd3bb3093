"""Running a job by Ray: each of its processes is run by an actor.

Ray chooses the nodes and tells when one is lost. Restarts, output and the exit status are those of
moolink's own supervisor: an actor that ends is not restarted by Ray.
"""

from __future__ import annotations

import base64
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moolink.launch.description import Job, Role
from moolink.launch.host import Host, HostWatcher, LocalHost, Task
from moolink.launch.loop import READ, Loop
from moolink.launch.output import Screen
from moolink.launch.settings import group_of, local_security, token_text
from moolink.launch.shares import Seat
from moolink.launch.supervisor import BrokerPlan, Plan, Supervisor
from moolink.ray.runner import Runner

_LONGEST_CALL = 100_000  # bytes; Linux passes 128 KB in one argument
_TRIES, _PAUSE = 60, 1.0  # to make an actor, and seconds between two of them
_GPUS = "CUDA_VISIBLE_DEVICES"


def command(function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the command of a role that calls a function, in a process of its own:

        Role("learner", moolink.ray.command(train, config), count=2)

    Raises:
        ValueError: the function and its arguments are larger than 100 kB.
    """
    call = base64.b64encode(cloudpickle.dumps((function, arguments))).decode()
    if len(call) > _LONGEST_CALL:
        raise ValueError(
            f"the function and its arguments have {len(call)} bytes, more than {_LONGEST_CALL}: "
            "let the function read what is large from a file, or from ray.get"
        )
    return ["-m", "moolink.ray.call", call]


class Inbox:
    """What other threads tell the loop."""

    def __init__(self, loop: Loop) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()
        self._loop = loop
        loop.watch(self._read_fd, READ, self._take)

    def put(self, call: Callable[[], None]) -> None:
        """Lets the loop make this call; may be called by any thread."""
        with self._lock:
            if self._write_fd >= 0:
                self._calls.put(call)
                os.write(self._write_fd, b".")

    def close(self) -> None:
        """Drops what comes from now on."""
        with self._lock:
            self._loop.unwatch(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._write_fd = -1

    def _take(self) -> None:
        os.read(self._read_fd, 1)
        self._calls.get()()


class RayProcess:
    """A process that an actor runs, as soon as Ray has a place for it."""

    def __init__(self, host: RayHost, task: Task, watcher: HostWatcher) -> None:
        self._host = host
        self._task = task
        self._watcher = watcher
        self._is_ours = False  # we are ending it
        self._is_over = False
        self._tries_left = _TRIES
        self.pid = 0
        self._start()

    def terminate(self) -> None:
        """Sends SIGTERM to it; gives it up if it does not run yet."""
        self._is_ours = True
        if self.pid:
            self._actor.terminate.remote()
        else:
            ray.kill(self._actor)

    def kill(self) -> None:
        """Kills it: it ends with its actor."""
        self._is_ours = True
        ray.kill(self._actor)

    def _start(self) -> None:
        if self._is_ours:
            self._give_up()
            return
        self._actor = self._host.make_actor(self._task)
        threading.Thread(target=self._follow, args=(self._actor,), daemon=True).start()

    def _follow(self, actor: Any) -> None:
        """A thread: waits for what the actor tells."""
        put = self._host.inbox.put
        while True:
            try:
                events = ray.get(actor.next.remote())
            except Exception as error:  # noqa: BLE001 - Ray's errors are many, and each is an end
                put(functools.partial(self._lost, _why(error)))
                return
            put(functools.partial(self._tell, events))
            if events[-1][0] in ("drained", "refused"):
                return

    def _tell(self, events: list[tuple[Any, ...]]) -> None:
        for name, *arguments in events:
            if name == "started":
                (self.pid,) = arguments
                if self._is_ours:  # it was asked to end before it ran
                    self._actor.terminate.remote()
            elif name == "ended":
                self._host.has_ended_well = self._host.has_ended_well or arguments[0] == 0
            if name in ("drained", "refused"):
                self._is_over = True
                ray.kill(self._actor)
            getattr(self._watcher, name)(*arguments)

    def _lost(self, why: str) -> None:
        if self._is_over:
            return
        ray.kill(self._actor)
        if self._is_ours:
            self._give_up()
        elif not self.pid and self._tries_left:
            # Ray gives actors places on a node that is lost until it knows of the loss.
            self._tries_left -= 1
            self._host.loop.after(_PAUSE, self._start)
        else:
            self._is_over = True
            self._watcher.lost(why)

    def _give_up(self) -> None:
        self._is_over = True
        self._watcher.ended(-9)
        self._watcher.drained()


def _why(error: Exception) -> str:
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its actor cannot be reached"
    if isinstance(error, ray.exceptions.ActorDiedError):
        return "its actor died"
    return str(error).strip().partition("\n")[0] or type(error).__name__


class RayHost(Host):
    """The place of one process: whatever node Ray gives its actor.

    Args:
        options: of the actor.
        token: its text, or ``None``.
    """

    def __init__(
        self,
        role: Role,
        options: dict[str, Any],
        loop: Loop,
        inbox: Inbox,
        token: str | None,
        directory: str,
    ) -> None:
        self.label = "ray"
        self.cores = role.cores or 1
        self.gpus = [str(number) for number in range(role.gpus)]
        self.is_up = True
        self.loop = loop
        self.inbox = inbox
        self.has_ended_well = False
        self.role = role.name
        self._role = role
        self._options = options
        self._token = token
        self._directory = directory

    def start(self, task: Task, watcher: HostWatcher) -> RayProcess:
        """Makes an actor for it, which runs it when Ray has a place."""
        # Ray knows which GPUs are the actor's.
        environment = {k: v for k, v in task.environment.items() if k != _GPUS}
        return RayProcess(self, Task(task.command, dict(task.defaults), environment), watcher)

    def make_actor(self, task: Task) -> Any:
        """Makes an actor that runs this."""
        actor = ray.remote(Runner).options(**self._options)
        return actor.remote(task, self._token, self._directory)

    def note(self, notes: Mapping[str, str]) -> None:
        """Does nothing: nodes need not have a folder in common."""

    @property
    def notes(self) -> Mapping[str, str]:
        """A process that the job waits for ends well when its role's work has finished."""
        return {self._role.name: ""} if self.has_ended_well and not self._role.elastic else {}

    def close(self) -> None:
        """Does nothing: its processes have ended."""

    @property
    def is_closed(self) -> bool:
        return True


def launch(
    job: Job,
    *,
    strategy: str = "SPREAD",
    start_timeout: float = 300.0,
    listen: str | None = None,
    python: str | None = None,
    directory: str | None = None,
    program: str = "moolink.ray",
) -> int:
    """Runs a job to its end by Ray. Call `ray.init()` before it.

    Each process is run by an actor of its own, with the cores (1 if the role does not say) and
    GPUs of its role. Those of roles that are not elastic are in one placement group. A process
    whose node is lost is started again on another node, or when the node is back: as often as that
    happens if its role is elastic, else as often as the role's ``restarts`` say. Everything else
    is as for :func:`moolink.launch.launch`: output, exit status, Ctrl-C.

    The broker runs beside the caller. Each node gets the job's token from the caller, through Ray.

    Args:
        job: what is run.
        strategy: of the placement group.
        start_timeout: seconds for the cluster to have a place for the placement group.
        listen: ``HOST:PORT`` on which the broker listens. Default: a free port of this node's
            address.
        python: the interpreter on the nodes. Default: the path of this one.
        directory: working directory, on nodes that have it. Default: this process's.
        program: what messages of the launcher begin with.

    Returns:
        The exit status: 0, or that of the process that ended the job (128 + n for signal n).

    Raises:
        ValueError: a role has hosts.
        moolink.AuthError: the token cannot be read or made.
    """
    if any(role.hosts for role in job.roles):
        raise ValueError("ray: a role has hosts, but Ray chooses them: leave them out")
    security = local_security(job)
    token = token_text(security)
    loop = Loop()
    local, inbox = LocalHost(loop), Inbox(loop)
    group = _placement_group(job, strategy)
    seats = []
    bundles = iter(range(job.count))
    for role in job.roles:
        for index in range(role.count):
            bundle = None if role.elastic else next(bundles)
            options = _actor_options(role, group, bundle)
            host = RayHost(role, options, loop, inbox, token, directory or os.getcwd())
            seats.append(Seat(role, index, host))
    listened = listen or f"{ray.util.get_node_ip_address()}:0"
    address = listened.rpartition(":")[0]
    broker = BrokerPlan(local, lambda: listened, lambda _, port: f"{address}:{port}")
    plan = Plan(
        program,
        job,
        group_of(job),
        python or sys.executable,
        seats,
        [local, *(seat.host for seat in seats)],
        None if job.broker else broker,
        security,
    )

    supervisor = Supervisor(loop, Screen(sys.stdout.buffer, sys.stderr.buffer))
    try:
        return supervisor.run(plan, lambda: _wait_for(group, supervisor, inbox, start_timeout))
    finally:
        inbox.close()
        loop.close()
        if group is not None:
            remove_placement_group(group)


def _resources(role: Role) -> dict[str, float]:
    wanted = {"CPU": float(role.cores or 1), "GPU": float(role.gpus)}
    return {name: count for name, count in wanted.items() if count}


def _placement_group(job: Job, strategy: str) -> Any:
    fixed: Sequence[Role] = [role for role in job.roles if not role.elastic]
    bundles = [_resources(role) for role in fixed for _ in range(role.count)]
    return placement_group(bundles, strategy=strategy) if bundles else None


def _wait_for(group: Any, supervisor: Supervisor, inbox: Inbox, seconds: float) -> None:
    """Serves until the placement group has its place."""
    if group is None:
        return
    is_ready = threading.Event()

    def wait() -> None:
        if group.wait(seconds):
            inbox.put(is_ready.set)

    threading.Thread(target=wait, daemon=True).start()
    supervisor.wait_until(
        is_ready.is_set,
        seconds,
        f"the Ray cluster had no place for the job within {seconds:g} s: it needs "
        f"{group.bundle_specs} at once, and has {ray.cluster_resources()} in all",
    )


def _actor_options(role: Role, group: Any, bundle: int | None) -> dict[str, Any]:
    options = {
        "num_cpus": role.cores or 1,
        "num_gpus": role.gpus,
        "max_restarts": 0,
        "max_concurrency": 2,  # `next` waits in one thread
    }
    if bundle is None:
        return options | {"scheduling_strategy": "SPREAD"}
    placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return options | {"scheduling_strategy": placed}
