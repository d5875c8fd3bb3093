"""Child processes: tied to their parent, described when they end, given a share of the cores."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Sequence

# Numerical libraries read their number of threads from these variables.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_END_WITH_PARENT = str(pathlib.Path(__file__).with_name("end_with_parent.py"))
_CGROUP_CPU_MAX = pathlib.Path("/sys/fs/cgroup/cpu.max")


def ends_with_parent(command: Sequence[str]) -> list[str]:
    """Returns `command` wrapped so that it is killed when the calling thread's process ends.

    The kernel ties the child to the *thread* that starts it: start it from a thread that lives as
    long as the child should.
    """
    return [sys.executable, "-I", "-S", _END_WITH_PARENT, str(os.getpid()), *command]


def exit_status(returncode: int) -> int:
    """Converts `subprocess`'s return code to a shell's: 128 + n for a death by signal n."""
    return 128 - returncode if returncode < 0 else returncode


def describe_exit(returncode: int) -> str:
    """Says in words how a process ended: ``exited with status 3``, ``was killed by SIGSEGV``."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if -returncode == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def available_cores() -> int:
    """Counts the cores this process may use: its affinity, bounded by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def share_cores(cores: int, peers: int) -> list[int]:
    """Shares `cores` out to `peers`, at least one each, the first ones getting the remainder."""
    share, remainder = divmod(cores, peers)
    return [max(1, share + (index < remainder)) for index in range(peers)]
