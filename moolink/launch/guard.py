"""Clean up behind a job whose launcher or agent dies: ``python -I -S guard.py FD``.

Reads lines ``+PGID`` (a group to watch), ``-PGID`` (a group that has ended) and ``/PATH`` (a folder
to remove) from descriptor FD, whose other end only the launcher holds. When that end closes, every
group still watched is killed, and the folder, which may hold a token, is removed.
PR_SET_PDEATHSIG (end_with_parent.py) kills the peers themselves; this also reaches their children.

Executed by path, without importing moolink.
"""

import os
import shutil
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    folders: list[str] = []
    with open(int(sys.argv[1]), encoding="utf-8", errors="surrogateescape") as commands:
        for line in commands:
            if line[0] == "/":
                folders.append(line.rstrip("\n"))
            elif line[0] == "+":
                groups.add(int(line[1:]))
            else:
                groups.discard(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # It ended by itself.
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
