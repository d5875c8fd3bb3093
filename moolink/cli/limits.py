"""``moolink doctor``: the limits of this process, its clock, and the process start method."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from moolink.cli.finding import Finding, State

_FEW_DESCRIPTORS = 1024
_FEW_PROCESSES = 1024
_LITTLE_LOCKED = 1 << 30
_SLOW_CLOCK = 1e-6  # seconds for a read: moolink reads the clock for each message
_TIME_ERROR = 5  # of adjtimex(2)
_CGROUP = Path("/sys/fs/cgroup")


def examine() -> list[Finding]:
    """Runs every check."""
    return [
        _descriptors(),
        _processes(),
        _locked_memory(),
        _memory_limit(),
        _dev_shm(),
        _clock(),
        _start_method(),
    ]


_SETTINGS = {"-n": "LimitNOFILE", "-u": "LimitNPROC", "-l": "LimitMEMLOCK"}  # of systemd


def _limit(
    topic: str, of: int, option: str, least: int, lack: State, say: Callable[[int], str]
) -> Finding:
    """A limit of this process (`ulimit OPTION`), of which less than `least` is a lack."""
    soft, hard = resource.getrlimit(of)
    if soft == resource.RLIM_INFINITY:
        return Finding(topic, "ok", "unlimited")
    if soft >= least:
        return Finding(topic, "ok", say(soft))
    if hard == soft:
        where = f"limits.conf, or {_SETTINGS[option]} of a systemd service"
        cure = f"the hard limit is the same: an administrator raises it ({where})"
    else:
        wanted = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        cure = f"raise it with ulimit {option} {wanted}"
    return Finding(topic, lack, f"{say(soft)}: {cure}")


def _descriptors() -> Finding:
    of, least = resource.RLIMIT_NOFILE, _FEW_DESCRIPTORS
    return _limit("descriptors", of, "-n", least, "failed", lambda n: f"{n} open files allowed")


def _processes() -> Finding:
    def say(count: int) -> str:
        return f"{count} processes and threads of this user allowed"

    return _limit("processes", resource.RLIMIT_NPROC, "-u", _FEW_PROCESSES, "absent", say)


def _locked_memory() -> Finding:
    def say(size: int) -> str:
        return f"{size / 2**20:.0f} MiB may be locked, as RDMA does when it registers memory"

    return _limit("locked memory", resource.RLIMIT_MEMLOCK, "-l", _LITTLE_LOCKED, "absent", say)


def _memory_limit() -> Finding:
    """Shared memory also counts: it is in memfds, not in /dev/shm."""
    least: tuple[int, Path] | None = None
    try:
        cgroups = Path("/proc/self/cgroup").read_text()
    except OSError:
        cgroups = "0::/\n1:memory:/\n"
    for place in _limit_files(cgroups):
        try:
            text = place.read_text().strip()
        except OSError:
            continue
        if text != "max" and (least is None or int(text) < least[0]):
            least = int(text), place
    if least is not None and least[0] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        limit = f"{least[0] / 2**30:.1f} GiB for this control group ({least[1]})"
        return Finding("memory limit", "ok", f"{limit}; segments of shared memory count in it")
    return Finding("memory limit", "ok", "none but the machine's")


def _limit_files(cgroups: str) -> Iterator[Path]:
    """The files with the memory limits of this process's control groups, as /proc/self/cgroup
    names them, and of their parents."""
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUP, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _CGROUP / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for one in (group, *group.parents):
            yield root / one / name


def _dev_shm() -> Finding:
    """moolink does not use /dev/shm, but torch's DataLoader does."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", "absent", f"{error.strerror}; moolink does not need it")
    text = f"{free / 2**30:.1f} GiB free; moolink does not use it, torch's DataLoader does"
    return Finding("/dev/shm", "ok", text)


def _clock() -> Finding:
    seconds = min(_time_of_clock() for _ in range(10))
    try:
        name = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text()
    except OSError:
        name = "an unknown source"
    text = f"{name.strip()}, {seconds * 1e9:.0f} ns to read"
    if seconds > _SLOW_CLOCK:
        cure = "each message reads it: have the kernel use tsc or the hypervisor's clock"
        return Finding("clock", "absent", f"{text}: {cure}")
    # adjtimex(2) with modes 0 in its struct timex only reads.
    state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    if state < 0:
        return Finding("clock", "ok", f"{text}; whether it is synchronised cannot be told")
    if state == _TIME_ERROR:
        cure = "times of several machines on the dashboard differ: run chrony or ntpd"
        return Finding("clock", "absent", f"{text}; not synchronised: {cure}")
    return Finding("clock", "ok", f"{text}; synchronised")


def _time_of_clock() -> float:
    """Seconds to read the clock; more if other programs run meanwhile."""
    began = time.perf_counter()
    for _ in range(100):
        time.monotonic()
    return (time.perf_counter() - began) / 100


def _start_method() -> Finding:
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:
        method = multiprocessing.get_all_start_methods()[0]  # the default
    if method != "fork":
        return Finding("start method", "ok", f"multiprocessing uses {method}")
    text = (
        "multiprocessing uses fork: moolink allows it (a child has no peers and no groups), but "
        "JAX and CUDA do not once they run: use spawn or forkserver with them"
    )
    return Finding("start method", "ok", text)
