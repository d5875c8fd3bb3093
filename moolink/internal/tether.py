"""Run a command tied to the life of its parent: ``python -I -S tether.py PARENT_PID command ...``.

The kernel kills this process when the thread that started it ends (PR_SET_PDEATHSIG), and the
setting survives exec, so the command that replaces it dies with its parent even when the parent is
killed with SIGKILL. A stub that execs is used in place of ``subprocess``'s ``preexec_fn``, which
runs Python code between fork and exec and may deadlock when the parent has threads.

Executed by path, without importing moolink: it must start fast and depend on the standard library
only. `moolink.internal.processes.tethered` builds its command line.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send `signal_number` to this process when its parent ends.

    `parent_pid` is the parent as it knew itself before the start: if this process has another
    parent by now, the parent died before the request was made, and this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os._exit(128 + signal_number)


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    tie_to_parent(parent_pid)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot execute {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
