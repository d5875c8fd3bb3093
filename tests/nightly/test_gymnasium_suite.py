"""Gymnasium's own tests of AsyncVectorEnv on a VectorEnv.

Its source distribution leaves them out: MOOLINK_GYMNASIUM names a checkout of the version that is
installed.

    git clone --depth 1 --branch v1.4.0 https://github.com/Farama-Foundation/Gymnasium DIRECTORY
    MOOLINK_GYMNASIUM=DIRECTORY python -m pytest tests/nightly/test_gymnasium_suite.py
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import gymnasium
import pytest

from tests.nightly.gymnasium_conftest import EXPECTED

ROOT = pathlib.Path(__file__).parents[2]
CHECKOUT = os.environ.get("MOOLINK_GYMNASIUM", "")
FILES = [
    "test_async_vector_env.py",
    "test_autoreset_mode.py",
    "test_observation_mode.py",
    "test_vector_env.py",
    "test_vector_env_info.py",
]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not CHECKOUT,
    reason=f"MOOLINK_GYMNASIUM does not name a checkout of gymnasium {gymnasium.__version__}",
)
def test_gymnasiums_own_tests_of_async_vector_environments(tmp_path: pathlib.Path) -> None:
    # Only the tests: a checkout has a gymnasium, too, which is not the one installed.
    shutil.copytree(pathlib.Path(CHECKOUT) / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "tests" / "nightly" / "gymnasium_conftest.py", tmp_path / "conftest.py")
    tests = [f"tests/vector/{name}" for name in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rxXs", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_lists_the_differences() -> None:
    page = " ".join((ROOT / "docs" / "data-plane.md").read_text().split())
    for difference in EXPECTED.values():
        assert difference in page
