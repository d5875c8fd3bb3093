"""The stub of the extension is what the generator makes of it, and true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.examples import ROOT


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_stub_is_the_generated_one() -> None:
    code = "from tools.stubs import generate; print(generate(), end='')"
    stub = (ROOT / "moolink" / "_core.pyi").read_text(encoding="utf-8")
    assert run("-c", code) == stub, "run `python tools/stubs.py`"


# nanobind's functions and classes have types of their own, in which stubtest sees no signatures.
OF_NANOBIND = (
    "is not a function",
    "metaclass differs",
    "is a disjoint base at runtime",
    'stub does not have *args parameter "args"',
    "stub is a staticmethod but runtime is not",
)


def test_the_stub_is_true(tmp_path: Path) -> None:
    # The stub takes only names from other modules; without this mypy reads all of torch and JAX.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = skip\n")
    options = ["--concise", "--mypy-config-file", str(config)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *options, "moolink._core"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = done.stdout.splitlines()
    assert any("is not a function" in line for line in errors), done.stderr  # it has looked
    assert [line for line in errors if not any(known in line for known in OF_NANOBIND)] == []
