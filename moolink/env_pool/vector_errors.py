"""Errors of VectorEnv that belong to moolink's and to Gymnasium's classes: either catches them."""

from __future__ import annotations

import multiprocessing

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from moolink.errors import Closed, Error, TimeoutError


class VectorTimeout(TimeoutError, multiprocessing.TimeoutError):
    """The environments were not ready in time; you can wait again."""


class VectorClosed(Closed, ClosedEnvironmentError):
    """The VectorEnv was closed."""


class VectorPending(Error, AlreadyPendingCallError):
    """Another request is pending: wait for it first."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class VectorNotBegun(Error, NoAsyncCallError):
    """A wait for a request that was not begun."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name
