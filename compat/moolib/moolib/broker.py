"""The broker as a program: ``python -m moolib.broker [address]``, on all interfaces by default.

It is moolink's broker with moolib's default address; ``--help`` shows its options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moolink import broker

DEFAULT_PORT = 4431


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a broker until SIGINT or SIGTERM; returns the exit status."""
    return broker.main(arguments, default_address=f"0.0.0.0:{DEFAULT_PORT}")


if __name__ == "__main__":
    sys.exit(main())
