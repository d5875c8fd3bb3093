"""Running a job by Ray: each of its processes is run by an actor.

Ray chooses the nodes and tells when one is lost. Restarts, output and the exit status are those of
moolink's own supervisor: an actor that ends is not restarted by Ray.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import ray
from ray import cloudpickle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moolink._core import Lock
from moolink.internal.addresses import with_port
from moolink.launch.description import Job, Role
from moolink.launch.host import HostWatcher, LocalHost, Task
from moolink.launch.loop import READ, Loop
from moolink.launch.plan import plan_with_broker_here
from moolink.launch.scheduled_host import ScheduledHost
from moolink.launch.settings import local_security, token_text
from moolink.launch.shares import Seat
from moolink.launch.supervisor import Supervisor
from moolink.ray.call import command_of, without_call
from moolink.ray.runner import Runner

_LONGEST_CALL = 100_000  # bytes; Linux passes 128 KB in one variable
_TRIES, _PAUSE = 60, 1.0  # to make an actor, and seconds between two of them
_GPUS = "CUDA_VISIBLE_DEVICES"


def command(function: Callable[..., object], *arguments: object) -> list[str]:
    """Returns the command of a role that calls a function, in a process of its own:

        Role("learner", moolink.ray.command(train, config), count=2)

    Raises:
        ValueError: the function and its arguments are larger than 100 kB.
    """
    made = command_of(cloudpickle.dumps((function, arguments)))
    if len(made[-1]) > _LONGEST_CALL:
        raise ValueError(
            f"the function and its arguments have {len(made[-1])} bytes, more than "
            f"{_LONGEST_CALL}: let the function read large data from a file, or from ray.get"
        )
    return made


class Inbox:
    """Messages of other threads to the loop."""

    def __init__(self, loop: Loop) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]
        self._calls = queue.SimpleQueue()
        self._read_fd, self._write_fd = os.pipe()
        self._lock = Lock()
        self._loop = loop
        loop.watch(self._read_fd, READ, self._take)

    def put(self, call: Callable[[], None]) -> None:
        """Has the loop make this call, and waits until it has: each thread has one call pending."""
        is_made = threading.Event()
        with self._lock:
            if self._write_fd < 0:
                return
            self._calls.put((call, is_made))
            os.write(self._write_fd, b".")
        is_made.wait()

    def close(self) -> None:
        """Drops the pending calls, and all later ones."""
        with self._lock:
            self._loop.unwatch(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._write_fd = -1
        while not self._calls.empty():
            self._calls.get()[1].set()

    def _take(self) -> None:
        os.read(self._read_fd, 1)
        call, is_made = self._calls.get()
        try:
            call()
        finally:
            is_made.set()


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
        """A thread: waits for the actor's messages."""
        put = self._host.inbox.put
        while True:
            try:
                events = ray.get(actor.next.remote())
            except Exception as error:  # noqa: BLE001 - Ray's errors are many, and each is an end
                put(functools.partial(self._lost, _why(error)))
                return
            put(functools.partial(self._tell, events))
            if events[-1][0] in ("ended", "refused"):
                return

    def _tell(self, events: list[tuple[Any, ...]]) -> None:
        for name, *arguments in events:
            if name == "started":
                (self.pid,) = arguments
                if self._is_ours:  # it was asked to end before it ran
                    self._actor.terminate.remote()
            if name in ("ended", "refused"):
                self._is_over = True
                ray.kill(self._actor)
            if name == "ended":
                self._host.finish(self._watcher, *arguments)
            else:
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
        self._host.finish(self._watcher, -9)


def _why(error: Exception) -> str:
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its actor cannot be reached"
    if isinstance(error, ray.exceptions.ActorDiedError):
        return "its actor died"
    return str(error).strip().partition("\n")[0] or type(error).__name__


class RayHost(ScheduledHost):
    """The place of one process: the node that Ray chooses for its actor.

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
        super().__init__("ray", role)
        self.loop = loop
        self.inbox = inbox
        self._options = options
        self._token = token
        self._directory = directory

    def start(self, task: Task, watcher: HostWatcher) -> RayProcess:
        """Makes an actor for it, which runs it when Ray has a place."""
        # Ray knows which GPUs are the actor's.
        environment = {k: v for k, v in task.environment.items() if k != _GPUS}
        command, call = without_call(task.command)
        return RayProcess(self, Task(command, dict(task.defaults), environment | call), watcher)

    def make_actor(self, task: Task) -> Any:
        """Makes an actor that runs this."""
        actor = ray.remote(Runner).options(**self._options)
        return actor.remote(task, self._token, self._directory)


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
        job: the job to run.
        strategy: of the placement group.
        start_timeout: seconds for the cluster to have a place for the placement group.
        listen: ``HOST:PORT`` on which the broker listens. Default: a free port of this node's
            address.
        python: the interpreter on the nodes. Default: the path of this one.
        directory: working directory, on nodes that have it. Default: this process's.
        program: the prefix of the launcher's messages.

    Returns:
        The exit status: 0, or that of the process that ended the job (128 + n for signal n).

    Raises:
        ValueError: a role has hosts.
        moolink.AuthError: the token cannot be read or made.
    """
    if any(role.hosts for role in job.roles):
        raise ValueError("ray: a role has hosts, but Ray chooses them: leave them out")
    security = local_security(job)
    address = ray.util.get_node_ip_address()
    with (
        closing(Loop()) as loop,
        closing(LocalHost(loop)) as local,
        closing(Inbox(loop)) as inbox,
        _placement_group(job, strategy) as group,
    ):
        shared = (loop, inbox, token_text(security), directory or os.getcwd())
        plan = plan_with_broker_here(
            *(job, local, _seats(job, group, *shared), security),
            program=program,
            python=python or sys.executable,
            listen=listen or with_port(address, 0),
            name=address,
        )
        supervisor = Supervisor(loop)
        return supervisor.run(plan, lambda: _wait_for(group, supervisor, inbox, start_timeout))


def _seats(
    job: Job, group: Any, loop: Loop, inbox: Inbox, token: str | None, directory: str
) -> list[Seat]:
    seats = []
    bundles = iter(range(job.count))
    for role in job.roles:
        for index in range(role.count):
            options = _actor_options(role, group, None if role.elastic else next(bundles))
            seats.append(Seat(role, index, RayHost(role, options, loop, inbox, token, directory)))
    return seats


def _resources(role: Role) -> dict[str, float]:
    wanted = {"CPU": float(role.cores or 1), "GPU": float(role.gpus)}
    return {name: count for name, count in wanted.items() if count}


@contextmanager
def _placement_group(job: Job, strategy: str) -> Iterator[Any]:
    fixed: Sequence[Role] = [role for role in job.roles if not role.elastic]
    bundles = [_resources(role) for role in fixed for _ in range(role.count)]
    group = placement_group(bundles, strategy=strategy) if bundles else None
    try:
        yield group
    finally:
        if group is not None:
            remove_placement_group(group)


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
