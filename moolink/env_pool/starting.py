"""Starting a pool's fork server: its arguments, and the process, a fresh program or a fork."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from typing import Any, Literal, Protocol

from moolink.env_pool import channel, fork_server
from moolink.errors import Error
from moolink.internal.processes import THREAD_VARIABLES
from moolink.internal.signals import not_ignored

Start = Literal["program", "fork"]


class Process(Protocol):
    """The pool's view of its server's process: `subprocess.Popen`, or a fork of this one."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """

    def kill(self) -> None:
        """Kills it."""


class ForkedProcess:
    """A fork of this process that runs `main` and then ends."""

    def __init__(self, main: Callable[[], object]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _make_server_of_fork()
                main()
            finally:
                os._exit(1)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; returns the code, negative for a signal."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._code is None:
            descriptor = os.pidfd_open(self.pid)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([descriptor], [], [], left)
            os.close(descriptor)
            if not ready:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        """Kills it."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _make_server_of_fork() -> None:
    """Resets, in the fork, the state of the program that was forked."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.set_wakeup_fd(-1)
    for number in not_ignored((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        signal.signal(number, signal.SIG_DFL)
    torch = sys.modules.get("torch")
    if torch is not None:  # A worker is meant to use one core, and OpenMP's threads are not forked.
        torch.set_num_threads(1)


def require_forkable() -> None:
    """Raises unless this process can be forked and the fork used: while it has one thread.

    Threads of numerical libraries that wait for work (OpenBLAS's) know how to be forked.

    Raises:
        Error: names the threads and devices in use.
    """
    current = threading.current_thread()
    threads = [thread.name for thread in threading.enumerate() if thread is not current]
    engines = sorted(name for name in _native_threads() if name.startswith("moolink"))
    torch, xla = sys.modules.get("torch"), sys.modules.get("jax._src.xla_bridge")
    reasons = []
    if threads:
        reasons.append(f"the threads {', '.join(threads)} run")
    if engines:
        reasons.append("an Rpc of moolink runs")
    if torch is not None and torch.cuda.is_initialized():
        reasons.append("CUDA is in use")
    if xla is not None and xla.backends_are_initialized():
        reasons.append("JAX is in use")
    if reasons:
        raise Error(
            f'start="fork" cannot fork this process any more: {" and ".join(reasons)}'
            ", and a fork has no threads and no device. Make the pool before all else, or define "
            'create_env at the top level of a module and leave start at "program"'
        )


def _native_threads() -> list[str]:
    names = []
    for path in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((path / "comm").read_text().strip())
    return names


def start_server(
    start: Start, setup: channel.Setup, create_env: Callable[..., Any], control: int, parent: int
) -> Process:
    """Starts the server; `control` is its end of its channel, `parent` a pidfd of this process."""
    shared = [setup.memory, *setup.doorbells, *setup.bells, *setup.channels]
    if start == "fork":
        return ForkedProcess(lambda: fork_server.main(control, parent, shared, create_env))
    # sys.path goes along, so that the server finds moolink and create_env where we found them.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from moolink.env_pool.fork_server import main; "
        f"main({control}, {parent}, {shared})"
    )
    # A worker is meant to use one core.
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=(control, parent, *shared),
    )


def pickled(create_env: Callable[..., Any]) -> tuple[bytes, dict[str, Any] | None]:
    """Pickles the user's function; returns it with the data from which to load ``__main__``.

    By reference where the workers can import it, else by value, which needs cloudpickle.

    Raises:
        Error: it cannot be sent to the workers.
    """
    try:
        data = pickle.dumps(create_env)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = f"{error}. Lambdas and functions inside functions cannot be pickled"
    else:
        # multiprocessing's name for the main module of a child, or of a worker of a pool.
        if b"__main__" not in data and b"__mp_main__" not in data:
            return data, None
        if _main_can_be_loaded():
            main = spawn.get_preparation_data("moolink-env-pool")
            main.pop("authkey", None)  # Refuses to be pickled, and is of no use to the workers.
            return data, main
        why = (
            "it is defined in a notebook, on standard input or by `python -c`, which the workers "
            "cannot load"
        )
    try:
        import cloudpickle
    except ImportError:
        raise Error(
            f"create_env cannot be sent to the worker processes: {why}. Define it at the top level "
            "of a module, and give it arguments with functools.partial, or install cloudpickle, or "
            'use start="fork"'
        ) from None
    try:
        return cloudpickle.dumps(create_env), None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Error(
            f"create_env cannot be sent to the worker processes: {error}. Let it refer to nothing "
            "that cannot be pickled, such as open files, locks or an Rpc"
        ) from error


def _main_can_be_loaded() -> bool:
    """Tells whether the program's main module has a file, which the workers can load again."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # of `python -m`
        return True
    return pathlib.Path(getattr(main, "__file__", None) or "").is_file()


def takes_index(create_env: Callable[..., Any]) -> bool:
    """Tells whether create_env wants the environment's index: a required parameter, or "index"."""
    try:
        parameters = inspect.signature(create_env).parameters
    except ValueError:
        return False  # Some built-in callables do not tell.
    positional = [
        parameter
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if len(required) > 1:
        names = ", ".join(parameter.name for parameter in required)
        raise TypeError(
            f"create_env takes no argument or the environment's index, but it needs {names}: "
            "bind the others with functools.partial"
        )
    return bool(required) or bool(positional and positional[0].name == "index")


class Functions:
    """One function an environment, as one create_env."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        self._functions = list(functions)

    def __call__(self, index: int) -> Any:
        return self._functions[index]()
