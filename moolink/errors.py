"""The one hierarchy of moolink's exceptions.

Every error names the failure, its object (``peer``, ``function``), and the remedy.
"""

from __future__ import annotations

import builtins
from typing import Literal

__all__ = [
    "AuthError",
    "CancelledError",
    "Closed",
    "EnvError",
    "Error",
    "FileError",
    "GroupChanged",
    "NoSuchFunction",
    "PeerLost",
    "QueueFull",
    "RemoteError",
    "StateError",
    "TimeoutError",
    "WireError",
]

Ran = Literal["no", "maybe", "yes"]


class Error(RuntimeError):
    """Base of all of moolink's errors.

    Attributes:
        peer: name of the peer concerned, or ``None``.
        function: name of the function or group concerned, or ``None``.
        ran: for a call that failed, whether the peer ran it: ``"no"``, ``"maybe"`` or ``"yes"``.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        function: str | None = None,
        ran: Ran = "no",
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.function = function
        self.ran: Ran = ran


class TimeoutError(Error, builtins.TimeoutError):
    """A call, a wait or an operation did not end within its time limit.

    Attributes:
        detail: the waits at that time, a line each: calls of this process by peer with their age,
            handlers that ran here with age and caller, threads. ``""`` if it is not known.
    """

    detail: str = ""


class CancelledError(Error):
    """The operation was cancelled by :meth:`Future.cancel` or by its caller."""


class PeerLost(Error):
    """The peer died, restarted or closed before it answered; ``ran``: whether the call ran."""


class NoSuchFunction(Error):
    """The peer is there but has not defined a function of this name."""


class RemoteError(Error):
    """The handler at the peer raised, or the call did not suit it: then ``ran`` is ``"no"``.

    Attributes:
        remote_type: qualified name of the exception's type at the peer.
        remote_traceback: the peer's formatted traceback.
    """

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        function: str | None = None,
        ran: Ran = "yes",
        remote_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message, peer=peer, function=function, ran=ran)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        if not self.remote_traceback:
            return message
        return f"{message}\n\nTraceback at the peer:\n{self.remote_traceback.rstrip()}"


class GroupChanged(Error):
    """The group's membership changed while the operation was under way; start it again."""


class QueueFull(Error):
    """A bounded queue is full and the caller asked not to wait."""


class AuthError(Error):
    """A peer did not prove that it holds the token."""


class WireError(Error):
    """Bytes from outside broke a rule of the wire format; the connection was closed."""


class Closed(Error):
    """An object of this process was closed, or belongs to a process that forked, or a group's
    operation was called before ``update()`` had shown any members, or by an observer.

    Callers of a peer that closes get :class:`PeerLost`.
    """


class StateError(Error):
    """The state that an accumulator's leader has sent cannot be taken over by this peer."""


class FileError(Error, ValueError):
    """The contents of a file cannot be used: it is damaged, cut off, of another version or kind, or
    made by another configuration, or a line of it is not understood. Nothing of it was used.

    If the system cannot open, read or write a file, the error is an ``OSError``.

    Attributes:
        path: path of the file.
        previous: path of the checkpoint before it, if there is one, else ``None``.
    """

    def __init__(self, message: str = "", *, path: str = "", previous: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.previous = previous


class EnvError(Error):
    """An environment of an :class:`EnvPool` raised, or its worker process died.

    Attributes:
        environments: indices of the environments concerned.
        worker_pid: process id of their worker, or ``None``.
        returncode: how the worker ended, negative for a signal as in ``subprocess``, or ``None``.
        remote_traceback: the environment's formatted traceback, or ``""``.
    """

    def __init__(
        self,
        message: str = "",
        *,
        environments: tuple[int, ...] = (),
        worker_pid: int | None = None,
        returncode: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.environments = environments
        self.worker_pid = worker_pid
        self.returncode = returncode
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        if not self.remote_traceback:
            return message
        return f"{message}\n\nTraceback in the worker:\n{self.remote_traceback.rstrip()}"
