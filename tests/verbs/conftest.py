"""Where RDMA is: this machine's own device, or a virtual machine with soft-RoCE.

A tool that boots such a machine on this one's own root is named by MOOLINK_VERBS_VM (a folder with
fetch.sh, run_in_vm.sh and two_vms.sh), or lies in ../shared/verbs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moolink import _core

ROOT = Path(__file__).resolve().parents[2]
# An emulated processor is many times slower, and shared.
PATIENCE = 900
# Exit status of the tool where the machine did not start: on a busy host its clock may not.
NO_RESULT = 125

InRdma = Callable[..., "subprocess.CompletedProcess[str]"]


def has_device() -> bool:
    """Whether this machine has an RDMA device of its own."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _tool() -> Path:
    named = os.environ.get("MOOLINK_VERBS_VM")
    return Path(named) if named else ROOT.parent / "shared" / "verbs"


@pytest.fixture(scope="session")
def in_rdma() -> InRdma:
    """Returns a function that runs a command where there is an RDMA device."""
    if "in this build" in _core.verbs_info()["reason"]:
        pytest.skip(_core.verbs_info()["reason"])
    prefix: list[str] = []
    if not has_device():
        tool = _tool()
        if not (tool / "run_in_vm.sh").exists():
            pytest.skip(f"no RDMA device here, and no tool for a virtual one at {tool}")
        fetched = subprocess.run([tool / "fetch.sh"], capture_output=True, text=True, check=False)
        if fetched.returncode != 0:
            pytest.skip(f"the virtual machine cannot be made: {fetched.stderr}")
        prefix = [str(tool / "run_in_vm.sh")]

    def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        for _ in range(3):
            done = subprocess.run(
                [*prefix, *command],
                cwd=ROOT,
                env={
                    **os.environ,
                    **variables,
                    "RXE_ENV": " ".join(["XDG_CONFIG_HOME", *variables]),
                    "RXE_TIMEOUT": str(PATIENCE),
                },
                capture_output=True,
                text=True,
                check=False,
            )
            if not prefix or done.returncode != NO_RESULT:
                break
        return done

    return run


@pytest.fixture(scope="session")
def transport_tests() -> Path:
    """The C++ program with the transport's tests, built by `make test-cpp`."""
    build = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev")
    program = build / "tests" / "cpp" / "test_transport"
    if not program.exists():
        pytest.fail(f"{program} is not built: run `make test-cpp` first")
    return program
