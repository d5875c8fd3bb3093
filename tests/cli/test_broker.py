"""``python -m moolink.broker`` as its users start and end it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moolink.internal.extras import install_command
from tests.waiting import PROCESS_LIMIT, until

COMMAND = [sys.executable, "-m", "moolink.broker"]


@contextmanager
def broker(*arguments: str, pass_fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def listening_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("moolink-broker listens on tcp://127.0.0.1:")
    return line.split()[-1].removeprefix("tcp://")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ends_cleanly_on_a_signal(how: signal.Signals) -> None:
    with broker("127.0.0.1:0") as process:
        listening_address(process)
        process.send_signal(how)
        _, errors = process.communicate(timeout=PROCESS_LIMIT)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(("host", "told"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_says_at_the_start_that_other_machines_cannot_reach_it(host: str, told: bool) -> None:
    with broker(f"{host}:0") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PROCESS_LIMIT)
    assert ("only this machine reaches" in errors) == told
    # The broker's lines look like those of all programs of moolink.
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} INFO moolink\[\d+\] only this"
    assert bool(re.search(line, errors)) == told
    assert ("moolink-broker 0.0.0.0:4431" in errors) == told


def test_announces_the_address_it_got() -> None:
    read_fd, write_fd = os.pipe()
    with (
        os.fdopen(read_fd) as announced,
        broker("127.0.0.1:0", "--announce-fd", str(write_fd), pass_fds=(write_fd,)) as process,
    ):
        os.close(write_fd)
        assert announced.read() == listening_address(process) + "\n"


def test_a_token_or_none() -> None:
    done = subprocess.run(
        [*COMMAND, "--insecure", "--token-file", "job.token"],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*COMMAND, address], capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False
        )
    assert done.returncode == 1
    assert f"cannot listen on {address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_members_meet_there() -> None:
    import moolink

    with broker("127.0.0.1:0", "--first") as process:
        address = listening_address(process)
        rpc = moolink.Rpc("alone")
        try:
            rpc.connect(address)
            group = moolink.Group(rpc, "g")
            until(lambda: group.update() and group.active(), "a view of the group")
            assert group.members() == ["alone"]
        finally:
            rpc.close()


def test_a_missing_package_of_an_extra_is_installed_without_building_moolink_again(monkeypatch):
    requires = ["numpy>=1.26", "aiohttp>=3.10; extra == 'dashboard'", 'ray>=2; extra == "ray"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    assert install_command("dashboard") == "pip install 'aiohttp>=3.10'"
    assert install_command("ray") == "pip install 'ray>=2'"
