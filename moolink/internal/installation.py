"""Why moolink's extension module is not there. Needs neither it nor numpy."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def why_no_core() -> str | None:
    """The reason why there is no module ``moolink._core`` for this Python, and the remedy. None:
    there is one, which may still fail to load."""
    if importlib.util.find_spec("moolink._core") is not None:
        return None
    missing = f"moolink's extension module is not in {_PACKAGE}"
    if others := sorted(path.name for path in _PACKAGE.glob("_core.*.so")):
        return (
            f"{missing} for Python {platform.python_version()} ({sys.executable}), only "
            f"{', '.join(others)}: use the Python that it was built for, or {_remedy()}"
        )
    if elsewhere := _elsewhere():
        return (
            f"{missing}, a folder of sources that comes on sys.path before {elsewhere}, where "
            "moolink is installed: start Python in another folder, or take the folder out of "
            f"PYTHONPATH, or {_remedy()}"
        )
    return f"{missing}: {_remedy()}"


def _remedy() -> str:
    root = _PACKAGE.parent
    if (root / "pyproject.toml").exists():
        return f"install the checkout in place with `pip install -v -e {root}`"
    return "install moolink again"


def _elsewhere() -> str | None:
    """A folder of another moolink that has its extension module."""
    for entry in sys.path:
        folder = Path(entry or os.getcwd()).resolve() / "moolink"
        if folder == _PACKAGE or not folder.is_dir():
            continue
        if importlib.machinery.PathFinder.find_spec("_core", [str(folder)]) is not None:
            return str(folder)
    return None
