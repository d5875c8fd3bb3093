"""`moolink doctor`: limits, clock and start method, each with what to do about it."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest

from moolink.cli import limits
from moolink.cli.finding import Finding


def found(topic: str) -> Finding:
    (finding,) = [finding for finding in limits.examine() if finding.topic == topic]
    return finding


@pytest.mark.parametrize(
    ("topic", "of", "state", "option", "setting"),
    [
        ("descriptors", resource.RLIMIT_NOFILE, "failed", "-n", "LimitNOFILE"),
        ("processes", resource.RLIMIT_NPROC, "absent", "-u", "LimitNPROC"),
        ("locked memory", resource.RLIMIT_MEMLOCK, "absent", "-l", "LimitMEMLOCK"),
    ],
)
def test_a_low_limit_says_how_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, topic: str, of: int, state: str, option: str, setting: str
) -> None:
    def is_limited_to(soft: int, hard: int) -> Finding:
        real = resource.getrlimit
        with monkeypatch.context() as patch:
            patch.setattr(
                limits.resource, "getrlimit", lambda one: (soft, hard) if one == of else real(one)
            )
            return found(topic)

    assert is_limited_to(200, 4096).state == state
    assert is_limited_to(200, 4096).text.endswith(f"raise it with ulimit {option} 4096")
    assert is_limited_to(200, resource.RLIM_INFINITY).text.endswith(f"ulimit {option} unlimited")
    assert f"an administrator raises it (limits.conf, or {setting}" in is_limited_to(200, 200).text
    assert is_limited_to(1 << 40, 1 << 40).state == "ok"
    unlimited = is_limited_to(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert (unlimited.state, unlimited.text) == ("ok", "unlimited")


@pytest.mark.parametrize(
    ("cgroups", "places"),
    [
        ("0::/job.slice/task\n", {"job.slice/memory.max": "max", "job.slice/task/memory.max": 2}),
        ("0::/job.slice/task\n", {"job.slice/memory.max": 2, "job.slice/task/memory.max": 3}),
        ("0::/\n", {"memory.max": 2}),
        ("9:name=x:/\n4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": 2}),
    ],
)
def test_the_memory_limit_is_that_of_the_processs_own_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, places: dict[str, Any]
) -> None:
    for place, limit in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        text = str(limit) if isinstance(limit, str) else str(limit << 30)
        (tmp_path / place).write_text(f"{text}\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self: cgroups if "/proc" in str(self) else read(self)
    )
    assert found("memory limit").text.startswith("2.0 GiB for this control group")


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def __init__(self, state: int) -> None:
            self.adjtimex = lambda buffer: state

    for state, words in ((0, "; synchronised"), (5, "run chrony or ntpd"), (-1, "cannot be told")):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, state=state: Libc(state))
        assert found("clock").text.endswith(words)
    monkeypatch.setattr(limits, "_SLOW_CLOCK", 0.0)
    assert found("clock").state == "absent"
    assert "tsc" in found("clock").text


def test_start_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    assert "use spawn or forkserver" in found("start method").text
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert found("start method").text == "multiprocessing uses spawn"
