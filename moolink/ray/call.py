"""Calls a pickled function: ``python -m moolink.ray.call``, see moolink.ray.command."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Sequence

_VARIABLE = "MOOLINK_RAY_CALL"
_MODULE = "moolink.ray.call"


def command_of(pickled: bytes) -> list[str]:
    """Returns the command that calls a pickled pair of a function and its arguments."""
    return ["-m", _MODULE, base64.b64encode(pickled).decode()]


def without_call(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Moves the call from a command to the environment: other users read command lines."""
    *before, module, last = ["", *command]
    if module != _MODULE:
        return list(command), {}
    return [*before[1:], module], {_VARIABLE: last}


def main() -> None:
    """Calls it; its result is dropped."""
    given = os.environ.pop(_VARIABLE, None) or sys.argv[1]  # other launchers leave it as it is
    function, arguments = pickle.loads(base64.b64decode(given))
    function(*arguments)


if __name__ == "__main__":
    main()
