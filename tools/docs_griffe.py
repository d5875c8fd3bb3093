"""An extension of griffe, which reads the sources for the site's reference without running them:
what `__doc__ = Other.__doc__` says."""

from __future__ import annotations

import re
from typing import Any

import griffe

_BORROWED = re.compile(r"([\w.]+)\.__doc__")


class BorrowedText(griffe.Extension):
    """Gives a class the text of the one that its `__doc__` names."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called when a package and all it contains has been read."""
        for module in _modules(pkg):
            for kind in module.classes.values():
                if kind.is_alias or (said := kind.members.get("__doc__")) is None:
                    continue
                borrowed = _BORROWED.fullmatch(str(getattr(said, "value", "")))
                if borrowed is not None:
                    source = loader.modules_collection[kind.resolve(borrowed[1])]
                    assert source.docstring is not None, source.path
                    kind.docstring = griffe.Docstring(source.docstring.value, parent=kind)
                    kind.docstring.parser = source.docstring.parser


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [one for one in module.modules.values() if not one.is_alias]
    return [module, *(each for one in inner for each in _modules(one))]
