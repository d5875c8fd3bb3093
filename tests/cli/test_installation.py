"""Installations that are not whole: each says what is missing, and the command that adds it."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moolink
from moolink import _core
from moolink.internal import extras
from moolink.internal.installation import digest
from tests.waiting import PROCESS_LIMIT

PACKAGE = Path(moolink.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A checkout without the extension module."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "moolink", ignore=ignored)
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def run(sources: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, without the path hooks of an editable install: they come before all folders."""
    folders = [sources, Path(np.__file__).parents[1], PACKAGE.parent]
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_LIMIT,
    )


def test_an_import_without_the_extension_says_where_it_is(sources: Path) -> None:
    done = run(sources, "-c", "import moolink")
    assert f"moolink's extension module is not in {sources / 'moolink'}" in done.stderr
    assert f"pip install -v -e {sources}`" in done.stderr
    # This test's own moolink is installed as well, and comes later.
    assert f"before {PACKAGE}, where moolink is installed" in done.stderr


def test_an_extension_for_another_python_is_named(sources: Path) -> None:
    (sources / "moolink" / "_core.cpython-399-x86_64-linux-gnu.so").touch()
    done = run(sources, "-c", "import moolink")
    assert "only _core.cpython-399-x86_64-linux-gnu.so: use the Python that it" in done.stderr


def test_doctor_runs_without_the_extension_and_ends_with_a_verdict(sources: Path) -> None:
    done = run(sources, "-m", "moolink", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    (core,) = [line for line in done.stdout.splitlines() if line.split()[1] == "core"]
    assert core.startswith("failed")
    assert "pip install -v -e" in core
    assert done.stdout.splitlines()[-1] == "moolink does not work here as it should: see core"


def test_doctor_runs_with_an_extension_that_does_not_load(sources: Path) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (sources / "moolink" / f"_core{suffix}").write_bytes(b"no library")
    done = run(sources, "-m", "moolink", "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert "it does not load: " in done.stdout
    assert done.stdout.splitlines()[-1].endswith("see core")


def test_other_commands_take_one_line(sources: Path) -> None:
    done = run(sources, "-m", "moolink", "run", "x.py")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("moolink: moolink's extension module is not in")
    assert run(sources, "-m", "moolink", "--help").returncode == 0


def stand_in(sources: Path, built_of: str, modified: float) -> None:
    """Writes an extension module with this digest and modification time, and C++ sources."""
    (sources / "cpp" / "bind").mkdir(parents=True, exist_ok=True)
    (sources / "cpp" / "bind" / "module.cc").write_text("int now;")
    core = sources / "moolink" / "_core.py"
    core.write_text(f"def sources_digest():\n    return {built_of!r}\n")
    os.utime(core, (modified, modified))


LONG_AGO = 1.0
OF_OTHERS = "was built from other C++ sources than those in"


def test_an_extension_of_other_sources_is_noticed_at_import(sources: Path) -> None:
    stand_in(sources, "those before the pull", LONG_AGO)
    done = run(sources, "-c", "import moolink")
    assert done.returncode == 0
    assert OF_OTHERS in done.stderr
    assert f"pip install -v -e {sources}`" in done.stderr
    command = run(sources, "-m", "moolink", "dump")
    assert command.stderr.startswith(f"moolink: the extension module {sources}")
    stand_in(sources, digest(sources / "cpp"), LONG_AGO)  # a clone of the same sources
    assert run(sources, "-c", "import moolink").stderr == ""


def test_an_extension_later_than_all_sources_costs_no_reading(sources: Path) -> None:
    # Of the folder, which was made now: the copy of the package has the time of the original.
    stand_in(sources, "unknown", sources.stat().st_mtime + 1000)
    assert run(sources, "-c", "import moolink").stderr == ""


def test_doctor_names_an_extension_of_other_sources(sources: Path) -> None:
    stand_in(sources, "those before the pull", LONG_AGO)
    done = run(sources, "-m", "moolink", "doctor", "--json")
    (core,) = [one for one in json.loads(done.stdout) if one["topic"] == "core"]
    assert core["state"] == "failed"
    assert OF_OTHERS in core["text"]


def test_the_extension_was_built_from_these_sources() -> None:
    # Those beside the tests: an installed wheel has none beside the package.
    checkout = CHECKOUT / "cpp"
    if not checkout.is_dir():
        pytest.skip("the tests have no C++ sources beside them to compare the extension with")
    other = "the extension is of other sources than these tests: run `make dev`, or install again"
    assert _core.sources_digest() == digest(checkout), other


def test_an_old_python_is_the_reason(sources: Path) -> None:
    done = run(sources, "-c", "import sys; sys.version_info = (3, 10, 13); import moolink")
    assert "moolink needs Python 3.11 or later; this is Python" in done.stderr
    assert "extension module" not in done.stderr


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("moolink.sb3", "stable_baselines3", "sb3"),
        ("moolink.ray", "ray", "ray"),
        ("moolink.tensordict", "tensordict", "tensordict"),
        ("moolink.torchrl", "torchrl", "torchrl"),
        ("moolink.pettingzoo", "gymnasium", "pettingzoo"),
        ("moolink.torch", "torch", "torch"),
        ("moolink.jax", "jax", "jax"),
    ],
)
def test_a_module_names_the_packages_that_it_needs(module: str, package: str, extra: str) -> None:
    with pytest.raises(ModuleNotFoundError) as raised, extras.needed_by(module, extra):
        raise ModuleNotFoundError(f"No module named '{package}'", name=f"{package}.part")
    assert str(raised.value).startswith(f"{module} needs {package}, which is not installed: pip")
    assert "moolink[" not in str(raised.value), "the command leaves an editable moolink as it is"
    file = PACKAGE / f"{extra}.py"
    source = file if file.exists() else PACKAGE / extra / "__init__.py"
    assert f'with needed_by("{module}", "{extra}"):' in source.read_text()


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("examples.torch.impala", "torch", "torch"),
        ("examples.jax.impala", "jax", "jax"),
        ("examples.torch.impala", "tyro", "examples"),
    ],
)
def test_an_example_names_the_packages_that_it_needs(module: str, package: str, extra: str) -> None:
    # None in sys.modules: an import of it fails as if it were not installed.
    program = f"import sys; sys.modules['{package}'] = None; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_LIMIT,
    )
    last = done.stderr.splitlines()[-1]
    assert f"needs {package}, which is not installed: {extras.install_command(extra)}" in last


def test_a_fault_of_moolinks_own_is_not_taken_for_a_missing_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named"), extras.needed_by("m", "ray"):
        raise ModuleNotFoundError("No module named 'moolink.x'", name="moolink.x")


def test_extras_within_an_extra_are_resolved() -> None:
    assert {"torch", "tensordict", "torchrl"} == {
        requirement.partition(">")[0] for requirement in extras.packages("torchrl")
    }
    assert "dashboard" in extras.names()
    assert not {"test", "docs", "lint", "bench-ray"} & set(extras.names())
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        extras.packages("x", "no-such-distribution")
