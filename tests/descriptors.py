"""The open descriptors of this process."""

from __future__ import annotations

import os


def of_moolink() -> set[str]:
    """Those that are sockets, epolls, eventfds or shared memory, each with what it is."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
        if target.startswith(("socket:", "anon_inode:", "/memfd:")):
            found.add(f"{fd} {target}")
    return found


def are_gone_in_a_forked_child(before: set[str]) -> bool:
    """Whether a child of this process holds none of them."""
    child = os.fork()
    if child == 0:
        os._exit(1 if of_moolink() & before else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
