"""Cancel a launcher's jobs of Slurm if it dies: ``python -I -S slurm_guard.py``.

Reads lines ``+NAME`` (a job that was submitted) and ``-NAME`` (one that has ended) from standard
input, whose other end only the launcher holds. When that end closes, every job still known is
cancelled: srun, which dies with the launcher, leaves it running.

Executed by path, without importing moolink.
"""

import os
import subprocess
import sys


def main() -> None:
    names: set[str] = set()
    for line in sys.stdin:
        name = line[1:].strip()
        if line[0] == "+":
            names.add(name)
        else:
            names.discard(name)
    user = f"--user={os.getuid()}"
    for name in names:
        subprocess.run(["scancel", f"--jobname={name}", user], check=False)


if __name__ == "__main__":
    main()
