"""What all tests share: where the C++ programs are."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moolink

# A shell starts background jobs with SIGINT ignored, which children inherit; the tests of Ctrl-C
# need what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]

# The peers of the tests, in this process and in those that it starts, have a token of their own.
_configuration = tempfile.TemporaryDirectory(prefix="moolink-tests-")
os.environ["XDG_CONFIG_HOME"] = _configuration.name
os.environ.pop("MOOLINK_TOKEN_FILE", None)
os.environ.pop("MOOLINK_INSECURE", None)


@pytest.fixture(scope="session")
def simulator() -> Callable[[str], Path]:
    """Returns a function from a simulation's name to its program, built by `make test-cpp`."""
    build = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev")

    def find(name: str) -> Path:
        program = build / "tests" / "sim" / f"sim_{name}"
        if not program.exists():
            pytest.fail(f"{program} is not built: run `make test-cpp` first")
        return program

    return find


@pytest.fixture
def broker_address() -> Iterator[str]:
    """Address of a broker of this process."""
    with moolink.Broker(first=True) as broker:
        yield broker.listen("127.0.0.1:0")[0]
