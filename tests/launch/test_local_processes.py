"""Processes of this machine, and the folder of their run."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moolink.launch.description import Job
from moolink.launch.local_processes import Machine
from moolink.launch.loop import Loop
from tests.waiting import until

# Leaves what a power cut leaves: the process and its guard end at once.
DIES = """
import os, signal
from moolink.launch.loop import Loop
from moolink.launch.local_processes import Machine
machine = Machine(Loop())
open(os.path.join(machine.directory, "token"), "w").close()
os.kill(machine._guard.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Nobody:
    """A watcher of a process that does not start."""


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    loop = Loop()
    made = Machine(loop)
    yield made
    made.close()
    loop.close()


def test_the_next_run_removes_what_a_power_cut_has_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "moolink-run-without-lock").mkdir()
    with machine() as first:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        died = subprocess.run([sys.executable, "-c", DIES], env=environment, check=False)
        assert died.returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob("*/token"))) == 1
        with machine() as second:
            left = {str(path) for path in tmp_path.iterdir()}
            without = str(tmp_path / "moolink-run-without-lock")
            assert left == {first.directory, second.directory, without}
    assert [path.name for path in tmp_path.iterdir()] == ["moolink-run-without-lock"]


def test_a_process_that_cannot_be_watched_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def too_many(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    with machine() as here:
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(os, "pidfd_open", too_many)
        with pytest.raises(OSError, match="Too many open files"):
            here.start(["sleep", "600"], os.environ, Nobody(), announces=True)
        assert os.listdir("/proc/self/fd") == before
    (pid,) = started
    until(lambda: not Path(f"/proc/{pid}").exists(), "its end")


@pytest.mark.parametrize("module", ["moolink.launch.launching", "moolink.launch.slurm"])
def test_an_error_before_the_job_starts_leaves_no_guard(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no plan")

    monkeypatch.setattr(importlib.import_module(module), "plan_with_broker_here", fail)
    before = psutil.Process().children()
    with pytest.raises(ValueError, match="no plan"):
        importlib.import_module(module).launch(Job.of_command(["true"], insecure=True))
    assert psutil.Process().children() == before
