"""Calls a pickled function: ``python -m moolink.ray.call PICKLE``, see moolink.ray.command."""

from __future__ import annotations

import base64
import pickle
import sys


def main() -> None:
    """Calls it; its result is dropped."""
    function, arguments = pickle.loads(base64.b64decode(sys.argv[1]))
    function(*arguments)


if __name__ == "__main__":
    main()
