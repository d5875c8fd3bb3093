"""Makes moolink/_core.pyi from the compiled extension; run it after a change of a binding.

Signatures and docstrings are those of cpp/bind, by nanobind's generator.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from nanobind.stubgen import StubGen

from moolink import _core

STUB = Path(__file__).resolve().parents[1] / "moolink" / "_core.pyi"


class _Generator(StubGen):  # type: ignore[misc]  # nanobind has no types
    """Takes what bears the package's public name for what it is: no import from there."""

    def put_function(self, fn: Any, name: str | None = None, parent: object = None) -> None:
        if type(fn).__module__ == "nanobind":
            self.put_nb_func(fn, name)
        else:
            super().put_function(fn, name, parent)


def generate() -> str:
    """Returns the stub's text."""
    for value in vars(_core).values():
        if isinstance(value, type):
            value.__module__ = _core.__name__
    generator = _Generator(_core, include_private=True)
    generator.put(_core)
    text: str = generator.get()
    for command in (["check", "--fix-only", "--select", "I"], ["format"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={STUB}"]
        text = subprocess.run(
            [*arguments, "-"], input=text, capture_output=True, text=True, check=True
        ).stdout
    return text


if __name__ == "__main__":
    STUB.write_text(generate(), encoding="utf-8")
