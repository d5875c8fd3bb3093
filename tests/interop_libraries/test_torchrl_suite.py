"""TorchRL's own tests of replay buffers, with moolink's buffers as TorchRL's.

TorchRL's packages have no tests: MOOLINK_TORCHRL_TESTS names the folder test/rb of a checkout.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("torchrl", reason="needs torchrl: make test-interop")

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = os.environ.get("MOOLINK_TORCHRL_TESTS")


def failures(folder: pathlib.Path, tests: pathlib.Path, conftest: str | None) -> set[str]:
    """The cases that fail, as CLASS::FUNCTION[PARAMETERS]."""
    shutil.copytree(tests, folder / "tests")
    if conftest:
        shutil.copy(HERE / conftest, folder / "conftest.py")
    options = ["-q", "--timeout=120", "--junitxml=report.xml", f"--rootdir={folder}"]
    # Which needs a cluster of Ray.
    options += ["--ignore=tests/test_rb_distributed.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    cases = ET.parse(folder / "report.xml").getroot().findall(".//testcase")
    assert len(cases) > 4000
    return {
        "::".join([*case.attrib["classname"].split(".")[2:], case.attrib["name"]])
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }


def functions(cases: set[str]) -> set[str]:
    return {case.partition("[")[0] for case in cases}


@pytest.mark.skipif(not TESTS, reason="MOOLINK_TORCHRL_TESTS names no folder of TorchRL's tests")
@pytest.mark.timeout(4 * 3600)
def test_the_failures_are_those_that_the_page_names(tmp_path: pathlib.Path) -> None:
    tests = pathlib.Path(TESTS or "").resolve()
    theirs = failures(tmp_path / "theirs", tests, None)
    ours = failures(tmp_path / "ours", tests, "torchrl_conftest.py")
    page = (ROOT / "docs" / "torchrl.md").read_text()
    named = set(re.findall(r"`((?:Test\w+::)?test_\w+)`", page))
    assert not functions(ours - theirs) - named, "fail, and the page does not name them"
    assert not named - functions(ours), "pass, and the page names them"
