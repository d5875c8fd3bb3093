"""Tests a wheel.

tools/check_wheel.py WHEEL                      looks at what is in it
tools/check_wheel.py WHEEL PYTHON [torch] [jax] installs it and these extras, as constraints.txt has
    them, into an empty environment without a compiler, runs wheel_program.py there, and prints
    the seconds from `pip install` to the first call
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
LIMIT = 300  # seconds
LARGEST = 6_000_000  # bytes
NEWEST_GLIBC = 28  # 2.28: RHEL 8


def check_contents(wheel: Path) -> None:
    """Raises SystemExit if something is not in the wheel, or should not be."""
    source = (TOOLS.parent / "moolink" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    assert found is not None
    version = found[1]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        information = f"moolink-{version}.dist-info"
        bom_name = f"{information}/sboms/moolink.cdx.json"
        wanted = {
            "moolink/_core.pyi",
            "moolink/py.typed",
            f"{information}/licenses/LICENSE",
            f"{information}/licenses/third_party.txt",
            bom_name,
        }
        problems = [f"{name} is missing" for name in sorted(wanted - names)]
        problems += [f"{name} is in it" for name in names if name.endswith((".cc", ".h", ".a"))]
        components = json.loads(archive.read(bom_name))["components"] if bom_name in names else []
    named = {component["name"]: component.get("version") for component in components}
    needed = {"nanobind", "robin-map", "dlpack"}
    problems += [f"its bill of materials lacks {name}" for name in sorted(needed - named.keys())]
    extensions = [name for name in names if name.endswith(".so")]
    if len(extensions) != 1:
        problems.append(f"its extension modules are {extensions}")
    elif ("abi3" in wheel.name) != extensions[0].endswith("/_core.abi3.so"):
        problems.append(f"{extensions[0]} does not fit its name")
    glibcs = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    if min(glibcs, default=NEWEST_GLIBC + 1) > NEWEST_GLIBC:
        problems.append(f"it needs a glibc later than 2.{NEWEST_GLIBC}")
    if wheel.stat().st_size > LARGEST:
        problems.append(f"it has {wheel.stat().st_size} bytes, more than {LARGEST}")
    if problems:
        raise SystemExit(f"{wheel.name}: " + "; ".join(problems))
    parts = ", ".join(f"{name} {version or ''}".strip() for name, version in named.items())
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, with parts of {parts}")


def main(wheel: str, python: str, extras: list[str]) -> None:
    """Raises CalledProcessError if something fails."""
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory, "environment")
        subprocess.run([python, "-m", "venv", environment], check=True)
        path = environment / "bin"
        # PATH has only the environment, so no compiler.
        variables = {"PATH": str(path), "HOME": directory}
        variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        named = f"{wheel}[{','.join(extras)}]" if extras else wheel
        install: list[str | Path] = [
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            TOOLS.parent / "constraints.txt",
        ]
        began = time.monotonic()
        subprocess.run(
            [path / "python", *install, "--only-binary", ":all:", named],
            check=True,
            env=variables,
            cwd=directory,
        )
        with subprocess.Popen(
            [path / "python", TOOLS / "wheel_program.py", *extras],
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=directory,
        ) as running:
            assert running.stdout is not None
            line = running.stdout.readline()
            seconds = time.monotonic() - began
            running.communicate(timeout=LIMIT)
        tried = " and ".join([python, *extras])
        if line != "called\n" or running.returncode != 0:
            raise SystemExit(f"{wheel} fails with {tried}: exit status {running.returncode}")
        for command, option in (("moolink", "--version"), ("moolink-broker", "--help")):
            subprocess.run(
                [path / "python", path / command, option],
                check=True,
                env=variables,
                stdout=subprocess.DEVNULL,
            )
        print(f"{Path(wheel).name} with {tried}: {seconds:.1f} s from pip install to a call")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        check_contents(Path(sys.argv[1]))
    else:
        main(os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:])
