"""CPU time and memory of a process with all its descendants, from /proc."""

from __future__ import annotations

import os
from pathlib import Path


def members(pid: int) -> list[int]:
    """`pid` and its living descendants."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            parents[int(entry)] = int(fields[1])
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sorted(tree)


def cpu_seconds(pid: int) -> float:
    """CPU time used so far by the tree."""
    ticks = 0
    for member in members(pid):
        if fields := _stat(member):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    """Memory of the tree, each page divided by the number of processes that map it."""
    return sum(rss_and_pss(member)[1] for member in members(pid))


def rss_and_pss(pid: int) -> tuple[int, int]:
    """Bytes of one process, resident and shared out among processes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes["Rss:"], sizes["Pss:"]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
