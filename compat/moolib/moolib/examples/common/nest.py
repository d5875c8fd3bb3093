"""Functions over nests: dicts, lists and tuples of leaves, in the order of their keys."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any


def map(f: Callable[[Any], Any], n: Any) -> Any:
    """Returns a nest of the same structure, with ``f`` of each leaf."""
    if isinstance(n, dict):
        return {key: map(f, part) for key, part in n.items()}
    if isinstance(n, list | tuple):
        parts = [map(f, part) for part in n]
        return type(n)(*parts) if hasattr(n, "_fields") else type(n)(parts)
    return f(n)


def flatten(n: Any) -> Iterator[Any]:
    """Iterates over the leaves of a nest."""
    if isinstance(n, dict):
        n = n.values()
    elif not isinstance(n, list | tuple):
        yield n
        return
    for part in n:
        yield from flatten(part)


def map_many(f: Callable[[list[Any]], Any], *nests: Any) -> Any:
    """Returns a nest of the first one's structure, with ``f`` of the list of the nests' leaves at
    each place."""
    rows = builtins.zip(*builtins.map(flatten, nests), strict=True)
    return map(lambda _: f(list(next(rows))), nests[0])


def zip(*nests: Any) -> Any:
    """Returns a nest of the first one's structure, with the list of the nests' leaves at each
    place."""
    return map_many(lambda leaves: leaves, *nests)
