"""Lazy imports: a package's names whose modules are imported at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        home: the module of each name.
    """
    names = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = value = getattr(importlib.import_module(home[name]), name)
        return value

    return get, lambda: sorted({*names, *home})
