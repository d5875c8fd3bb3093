"""The packages of moolink's extras."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator

_FOR_DEVELOPERS = ("bench", "dev", "docs", "lint", "test", "wheels")


def names() -> list[str]:
    """The extras that users install; none if moolink itself is not installed."""
    try:
        extras = importlib.metadata.metadata("moolink").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # moolink runs from a folder in PYTHONPATH
        return []
    return [name for name in extras if not name.startswith(_FOR_DEVELOPERS)]


def packages(extra: str, of: str = "moolink") -> list[str]:
    """What an extra of a distribution requires, such as ``rich>=13``; extras of moolink within it
    are resolved.

    Raises:
        importlib.metadata.PackageNotFoundError: the distribution is not installed.
    """
    wanted = re.compile(rf"([^;]+);.*\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    found: list[str] = []
    for line in importlib.metadata.requires(of) or ():
        if (match := wanted.fullmatch(line)) is None:
            continue
        requirement = match[1].strip()
        if own := re.match(r"moolink\[(.*)\]", requirement):
            found += [one for name in own[1].split(",") for one in packages(name.strip())]
        else:
            found.append(requirement)
    return list(dict.fromkeys(found))


def install_command(extra: str) -> str:
    """The command that installs the packages of `extra`, and leaves moolink itself as it is.

    `pip install 'moolink[extra]'` would replace an editable installation, or build it again.
    """
    try:
        return shlex.join(["pip", "install", *packages(extra)])
    except importlib.metadata.PackageNotFoundError:  # moolink runs from a folder in PYTHONPATH
        return f"pip install 'moolink[{extra}]'"


@contextlib.contextmanager
def needed_by(module: str, extra: str) -> Iterator[None]:
    """A context for the imports of a module that needs an extra.

    Raises:
        ModuleNotFoundError: a package is missing; its text has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "moolink":
            raise
        package = missing.name.partition(".")[0]
        raise ModuleNotFoundError(
            f"{module} needs {package}, which is not installed: {install_command(extra)}",
            name=missing.name,
        ) from None
