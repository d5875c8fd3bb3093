"""Where RDMA is: this machine's own device, or a virtual machine with soft-RoCE.

MOOLINK_VERBS_VM names the folder of a tool that boots such a machine on this one's own root:
fetch.sh downloads what it needs, `run_in_vm.sh COMMAND...` runs a command in one machine, and
`two_vms.sh A B` runs a command in each of two.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moolink import _core

ROOT = Path(__file__).resolve().parents[3]
# An emulated processor is many times slower, and shared.
TIMEOUT = 900
# Exit status of the tool where the machine did not start: on a busy host its clock may not.
NO_RESULT = 125
ADDRESS_OF_A = "10.77.0.1"  # the tool's, of the first of two machines

InRdma = Callable[..., "subprocess.CompletedProcess[str]"]


def has_device() -> bool:
    """Whether this machine has an RDMA device of its own."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def told(done: subprocess.CompletedProcess[str], mark: str = "") -> dict[str, Any]:
    """The one JSON object that a program printed, in a line that begins with this mark."""
    answers = [line for line in done.stdout.splitlines() if line.startswith(mark + "{")]
    assert len(answers) == 1, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(answers[0].removeprefix(mark))
    return seen


def _fetched(program: str) -> Path:
    """The tool's program, or the test is skipped, and says why."""
    named = os.environ.get("MOOLINK_VERBS_VM")
    if not named:
        pytest.skip("needs an RDMA device, or MOOLINK_VERBS_VM, a tool for virtual ones")
    tool = Path(named)
    fetched = subprocess.run([tool / "fetch.sh"], capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        pytest.skip(f"the virtual machines cannot be made: {fetched.stderr}")
    return tool / program


def _skip_if_left_out() -> None:
    if "in this build" in _core.verbs_info()["reason"]:
        pytest.skip(_core.verbs_info()["reason"])


def _run(
    command: list[str | Path], timeout: int, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        **variables,
        "RXE_ENV": " ".join(["XDG_CONFIG_HOME", *variables]),
        "RXE_TIMEOUT": str(timeout),
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def in_rdma() -> InRdma:
    """Returns a function that runs a command where there is an RDMA device."""
    _skip_if_left_out()
    prefix = [] if has_device() else [_fetched("run_in_vm.sh")]

    def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        for _ in range(3):
            done = _run([*prefix, *command], TIMEOUT, variables)
            if not prefix or done.returncode != NO_RESULT:
                break
        return done

    return run


@pytest.fixture(scope="session")
def on_two_machines() -> InRdma:
    """Returns a function that runs one command on each of two virtual machines on one wire.

    What they print is marked by "[a] " and "[b] ". Other devices have links that are not ours to
    break: the tool is needed.
    """
    _skip_if_left_out()
    program = _fetched("two_vms.sh")

    def run(a: str, b: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return _run([program, a, b], TIMEOUT // 2, variables)

    return run


def _built(program: str) -> Path:
    build = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev")
    path = build / "tests" / "cpp" / program
    if not path.exists():
        pytest.fail(f"{path} is not built: run `make test-cpp` first")
    return path


@pytest.fixture(scope="session")
def transport_tests() -> Path:
    """The C++ program with the transport's tests, built by `make test-cpp`."""
    return _built("test_transport")


@pytest.fixture(scope="session")
def peer_tests() -> Path:
    """The C++ program with the tests of peers, built by `make test-cpp`."""
    return _built("test_runtime")
