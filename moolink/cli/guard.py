"""Kill a job's process groups if the launcher dies: ``python -I -S guard.py FD``.

Reads lines ``+PGID`` (a group to watch) and ``-PGID`` (a group that has ended) from descriptor FD,
whose other end only the launcher holds. When that end closes, every group still watched is killed.
PR_SET_PDEATHSIG (end_with_parent.py) kills the peers themselves; this also reaches their children.

Executed by path, without importing moolink.
"""

import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    with open(int(sys.argv[1]), encoding="ascii") as commands:
        for line in commands:
            group = int(line[1:])
            if line[0] == "+":
                groups.add(group)
            else:
                groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # It ended by itself.


if __name__ == "__main__":
    main()
