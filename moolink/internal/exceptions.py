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
    return _copied(error, {})


def _copied(error: E, done: dict[int, BaseException]) -> E:
    if id(error) in done:
        return done[id(error)]  # type: ignore[return-value]
    new = done[id(error)] = _bare_copy(error)
    cause, context = error.__cause__, error.__context__
    new.__cause__ = None if cause is None else _copied(cause, done)
    new.__context__ = None if context is None else _copied(context, done)
    new.__suppress_context__ = error.__suppress_context__
    if isinstance(error, BaseExceptionGroup):
        # Its exceptions are part of it: a group of copies, with the attributes of this one.
        parts = [_copied(part, done) for part in error.exceptions]
        group = error.derive(parts)
        if type(group) is type(error):
            group.__dict__.update(new.__dict__)
            group.__cause__, group.__context__ = new.__cause__, new.__context__
            group.__suppress_context__ = new.__suppress_context__
            return group  # type: ignore[return-value]
    return new


def _bare_copy(error: E) -> E:
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
