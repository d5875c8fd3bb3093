"""Unknown keyword arguments: an error that names the one that was meant, and all that there are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def names_keywords(kind: type[T]) -> type[T]:
    """Decorates a class: the TypeErrors of its constructor and of its own public methods for an
    unknown keyword say which are known."""
    for name, method in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
            known = _keywords(method)
            if known is not None:
                setattr(kind, name, _checked(method, frozenset(known)))
    return kind


def _checked(method: Callable[..., Any], known: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not kwargs.keys() <= known:
            raise TypeError(
                _unknown(type(args[0]), method, next(k for k in kwargs if k not in known))
            )
        return method(*args, **kwargs)

    return checked


def _keywords(method: Callable[..., Any]) -> list[str] | None:
    """None: it takes any."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return _named(method)


def _named(method: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind in _NAMED]


def unknown_keyword(owner: str, known: list[str], name: str) -> str:
    """The text of the error, with the nearest known name and all known names."""
    import difflib  # only for this error

    close = difflib.get_close_matches(name, known, 1)
    meant = f": did you mean {close[0]!r}?" if close else "."
    has = f"It has {', '.join(known)}" if known else "It has none"
    return f"{owner} has no keyword argument {name!r}{meant} {has}"


def _unknown(kind: type, method: Callable[..., Any], name: str) -> str:
    if method.__name__ == "__init__":
        owner = kind.__name__
        methods = [vars(base).get("__init__") for base in kind.__mro__]
    else:
        owner, methods = f"{kind.__name__}.{method.__name__}()", [method]
    known = [keyword for one in methods if inspect.isfunction(one) for keyword in _named(one)]
    return unknown_keyword(owner, known, name)
