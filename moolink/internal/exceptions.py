"""Errors that are raised more than once.

An exception refers, by its traceback, to the frames it went through and to their callers. An object
that keeps an error to raise it later must not keep those frames. A frame usually refers to the
object, and this cycle keeps all that the frames hold until a garbage collection. So the object
keeps ``copied(error)``, and raises another copy each time.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def copied(error: E) -> E:
    """Returns an exception of the same type, arguments, attributes, notes, cause and context, none
    of which has a traceback."""
    # A loop, because a program that retries can chain more errors than Python's stack has frames.
    copies: dict[int, BaseException] = {}
    waiting: list[BaseException] = [error]
    originals: list[BaseException] = []
    while waiting:
        one = waiting.pop()
        if id(one) in copies:
            continue
        copies[id(one)] = _bare_copy(one)
        originals.append(one)
        waiting += [x for x in (one.__cause__, one.__context__) if x is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    grouped: set[int] = set()
    for one in originals:
        if isinstance(one, BaseExceptionGroup):
            _regroup(one, copies, grouped)
    for one in originals:
        new, cause, context = copies[id(one)], one.__cause__, one.__context__
        new.__cause__ = None if cause is None else copies[id(cause)]
        new.__context__ = None if context is None else copies[id(context)]
        new.__suppress_context__ = one.__suppress_context__
    return copies[id(error)]  # type: ignore[return-value]


def _regroup(
    error: BaseExceptionGroup[BaseException], copies: dict[int, BaseException], done: set[int]
) -> None:
    """Makes the copy of a group hold the copies of its exceptions."""
    if id(error) in done:
        return
    done.add(id(error))
    for part in error.exceptions:
        if isinstance(part, BaseExceptionGroup):
            _regroup(part, copies, done)
    group = error.derive([copies[id(part)] for part in error.exceptions])
    if type(group) is type(error):
        group.__dict__.update(copies[id(error)].__dict__)
        copies[id(error)] = group


def _bare_copy(error: E) -> E:
    new = _without_traceback(error)
    if "__notes__" in new.__dict__:  # a list, to which add_note of the copy appends
        new.__notes__ = list(new.__notes__)
    return new


def _without_traceback(error: E) -> E:
    # The exception's own copy method knows members that are not attributes, such as an OSError's.
    # The constructor that it calls may need other arguments than `args`, or change them.
    with contextlib.suppress(Exception):
        new = copy.copy(error)
        if new is not error and type(new) is type(error) and _same(new.args, error.args):
            return new.with_traceback(None)
    new = type(error).__new__(type(error), *error.args)
    new.args = error.args
    new.__dict__.update(error.__dict__)
    for name in copyreg._slotnames(type(error)):  # type: ignore[attr-defined]
        if hasattr(error, name):
            setattr(new, name, getattr(error, name))
    return new


def _same(ours: tuple[object, ...], theirs: tuple[object, ...]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
