"""Errors about arguments: moolib raises RuntimeError for all, moolink the same as Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from moolink.internal import logs

P = ParamSpec("P")
R = TypeVar("R")
Class = TypeVar("Class", bound=type)


class ArgumentValueError(ValueError, RuntimeError):
    """A ValueError that moolib's programs catch."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A TypeError that moolib's programs catch."""


class ArgumentIndexError(IndexError, RuntimeError):
    """An IndexError that moolib's programs catch."""


_KINDS: list[tuple[type[Exception], type[Exception]]] = [
    (IndexError, ArgumentIndexError),
    (TypeError, ArgumentTypeError),
    (ValueError, ArgumentValueError),
]


def runtime_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function: its errors about arguments are also RuntimeErrors."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            raise
        except (IndexError, TypeError, ValueError) as error:
            kind = next(wider for narrow, wider in _KINDS if isinstance(error, narrow))
            raise kind(str(error)).with_traceback(error.__traceback__) from None

    return called


def with_runtime_errors(*methods: str) -> Callable[[Class], Class]:
    """Decorates a class: does to the named methods, inherited ones, too, as `runtime_errors`."""

    def changed(cls: Class) -> Class:
        for name in methods:
            setattr(cls, name, runtime_errors(getattr(cls, name)))
        return cls

    return changed


@runtime_errors
def set_log_level(level: str | int) -> None:
    """Sets the least level that is logged; see :func:`moolink.set_log_level`."""
    logs.set_log_level(level)
