"""The packages of moolink's extras."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def install_command(extra: str) -> str:
    """The command that installs the packages of `extra`, and leaves moolink itself as it is.

    `pip install 'moolink[extra]'` would replace an editable installation, or build it again.
    """
    wanted = re.compile(rf"([^;]+);.*\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    try:
        lines = importlib.metadata.requires("moolink") or ()
    except importlib.metadata.PackageNotFoundError:  # moolink runs from a folder in PYTHONPATH
        return f"pip install 'moolink[{extra}]'"
    found = [wanted.fullmatch(line) for line in lines]
    return shlex.join(["pip", "install", *(match[1].strip() for match in found if match)])
