"""Other libraries' own tests of vector environments, on moolink's.

Their files run as they are; a conftest.py beside them puts one of moolink's classes in the place
of one of theirs. tools/suites.sh fetches them into build/interop/suites.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
SUITES = ROOT / "build" / "interop" / "suites"
GYMNASIUM = [
    "test_async_vector_env.py",
    "test_autoreset_mode.py",
    "test_observation_mode.py",
    "test_vector_env.py",
    "test_vector_env_info.py",
]


def sources_of(library: str) -> pathlib.Path:
    """The fetched sources of the version of a library that is installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: make test-interop")
    folder = SUITES / f"{library}-{importlib.metadata.version(library)}"
    if not (folder / "tests").is_dir():
        pytest.skip(f"tools/suites.sh could not fetch the tests of {folder.name}")
    return folder


def run_suite(folder: pathlib.Path, sources: pathlib.Path, conftest: str, *tests: str) -> None:
    # Only the tests: the sources have the library, too, which is not the one installed.
    shutil.copytree(sources / "tests", folder / "tests")
    shutil.copy(HERE / conftest, folder / "conftest.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rxXs", *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1800)
def test_gymnasiums_tests_of_async_vector_environments(tmp_path: pathlib.Path) -> None:
    tests = [f"tests/vector/{name}" for name in GYMNASIUM]
    run_suite(tmp_path, sources_of("gymnasium"), "gymnasium_conftest.py", *tests)


@pytest.mark.timeout(1800)
def test_stable_baselines_tests_of_vector_environments(tmp_path: pathlib.Path) -> None:
    sources = sources_of("stable_baselines3")
    run_suite(tmp_path, sources, "sb3_conftest.py", "tests/test_vec_envs.py")


def test_the_documentation_names_each_test_that_fails() -> None:
    pytest.importorskip("gymnasium", "1.1", reason="needs gymnasium: make test-interop")
    from tests.interop_libraries.gymnasium_conftest import EXPECTED

    page = (ROOT / "docs" / "environments.md").read_text()
    for name, difference in EXPECTED.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert difference in line
