"""Forks of a process that uses moolink: locks in the child, and its end inside of a handler.

A child has one thread. Locks that the parent's other threads held are never released there, so
objects with locks get new ones; the rest of a handler's worker runs in the parent only.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import NoReturn, Protocol


class Forked(Protocol):
    """An object that changes in a forked child: see `changes_in_children`."""

    def _forked(self) -> None:
        """In a child, which has no other thread yet: makes the locks anew."""


_all: weakref.WeakSet[Forked] = weakref.WeakSet()


def changes_in_children(one: Forked) -> None:
    """Has its `_forked` called in each child, for as long as it lives."""
    _all.add(one)


def _change_all() -> None:
    for one in list(_all):
        one._forked()


os.register_at_fork(after_in_child=_change_all)


class ChildEnds:
    """A context in which user code of a handler runs: a child that is forked there ends there.

    The reply and everything after it are the parent's.
    """

    def __enter__(self) -> None:
        self._process, self._thread = os.getpid(), threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A child that another thread forked only disposes of the coroutine.
        left = threading.get_ident() == self._thread and kind is not GeneratorExit
        if left and os.getpid() != self._process:
            end_child(raised)


def end_child(raised: BaseException | None) -> NoReturn:
    """Ends this process, a forked child, as Python ends one whose program returned or raised; but
    runs no exit hooks, which are the parent's.
    """
    status = 1
    try:
        status = _exit_status(raised)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _exit_status(raised: BaseException | None) -> int:
    if raised is None:
        return 0
    if not isinstance(raised, SystemExit):
        traceback.print_exception(raised)
        return 1
    if raised.code is None or isinstance(raised.code, int):
        return (raised.code or 0) & 0xFF
    print(raised.code, file=sys.stderr)
    return 1
