"""moolib's own tests and examples, from a checkout of it, on the package of compat/moolib.

MOOLIB_CHECKOUT names the checkout. What is left out: a test that puts a mock in place of moolib's
classes, two that compare the texts of errors, and a script that calls a method which moolib lacks.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT

CHECKOUT = os.environ.get("MOOLIB_CHECKOUT", "")
SCRIPTS = [
    "test.py",
    "test_asyncio.py",
    "test_asyncio_queue.py",
    "test_batch.py",
    "test_dynamic_batching_queue.py",
    "test_group.py",
    "test_reduce.py",
    "test_reduce_asyncio.py",
]
LEFT_OUT = "not test_run and not unknown_peer and not dead_host"
SECONDS = 400

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason="MOOLIB_CHECKOUT names no checkout of moolib"),
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.fixture(autouse=True)
def ports() -> Iterator[None]:
    """All of them listen on the same ports: one at a time."""
    with (Path(tempfile.gettempdir()) / "moolink-moolib-programs").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def output_of(*command: str, folder: Path, path: tuple[Path, ...] = ()) -> str:
    """What a program prints; it must end well, and catch no exception of its own."""
    # Not the whole of this checkout, which has a package `examples`, too.
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "Traceback" not in done.stdout, done.stdout[-5000:]
    return done.stdout


@pytest.fixture
def path(tmp_path: Path) -> tuple[Path, ...]:
    """Folders with the packages `moolib` and `moolink`."""
    (tmp_path / "moolink").symlink_to(ROOT / "moolink")
    return ROOT / "compat" / "moolib", tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, path: tuple[Path, ...]) -> None:
    output_of(name, folder=Path(CHECKOUT) / "test", path=path)


@pytest.mark.parametrize("name", ["batcher", "broker", "envpool", "pickle", "simple", "tensors"])
def test_unit(name: str, path: tuple[Path, ...]) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-k", LEFT_OUT]
    folder = Path(CHECKOUT) / "test"
    output = output_of(*arguments, f"unit/test_{name}.py", folder=folder, path=path)
    assert re.search(r"\d passed", output)


def test_a2c(path: tuple[Path, ...], tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="needs gymnasium")
    program = (Path(CHECKOUT) / "examples" / "a2c.py").read_text()
    # What Gymnasium asks: its own name, and an environment that it still has.
    program = program.replace("import gym\n", "import gymnasium as gym\n")
    program = program.replace("CartPole-v0", "CartPole-v1")
    program = program.replace("TOTAL_STEPS = 50000", "TOTAL_STEPS = 5000")
    (tmp_path / "a2c.py").write_text(program)
    output = output_of("a2c.py", folder=tmp_path, path=path)
    assert "Training ended after 5120 steps" in output
    assert len((tmp_path / "logs.tsv").read_text().splitlines()) > 30
