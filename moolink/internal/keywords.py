"""Unknown keyword arguments: an error that names the one that was meant, and all that there are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def names_keywords(constructor: Callable[P, R]) -> Callable[P, R]:
    """Decorates an ``__init__``: its TypeError for an unknown keyword says which are known."""
    known = _keywords(constructor)

    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unknown(type(args[0]), name))
        return constructor(*args, **kwargs)

    return checked


def _keywords(constructor: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _unknown(kind: type, name: str) -> str:
    import difflib  # only for this error

    owner = kind.__name__
    constructors = [vars(base).get("__init__") for base in kind.__mro__]
    known = [
        keyword
        for constructor in constructors
        if inspect.isfunction(constructor)
        for keyword in _keywords(constructor)
    ]
    close = difflib.get_close_matches(name, known, 1)
    meant = f": did you mean {close[0]!r}?" if close else "."
    return f"{owner} has no keyword argument {name!r}{meant} It has {', '.join(known)}"
