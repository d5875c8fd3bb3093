from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moolink

ROOT = Path(__file__).resolve().parents[2]


def _write(folder: Path) -> tuple[str, str]:
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    include = Path(spec.submodule_search_locations[0]) / "include"
    bill, licences = folder / "bill.json", folder / "licences.txt"
    options = ["--version", moolink.__version__, "--compiler", "c++", "--dlpack", str(include)]
    command = [sys.executable, str(ROOT / "tools/sbom.py"), *options, str(bill), str(licences)]
    subprocess.run(command, check=True)
    return bill.read_text(), licences.read_text()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_bill_names_what_is_compiled_in(tmp_path: Path) -> None:
    bill, licences = _write(tmp_path)
    read = json.loads(bill)
    assert read["bomFormat"] == "CycloneDX"
    assert read["metadata"]["component"]["version"] == moolink.__version__
    versions = {component["name"]: component.get("version") for component in read["components"]}
    assert versions["nanobind"] == importlib.metadata.version("nanobind")
    assert {"robin-map", "dlpack"} < versions.keys()
    references = [component["bom-ref"] for component in read["components"]]
    assert read["dependencies"][0]["dependsOn"] == references
    for component in read["components"]:
        name, licence = component["name"], component["licenses"][0]["expression"]
        assert re.search(rf"^{re.escape(f'{name} ({licence})')}\n\n\S", licences, re.MULTILINE)
    assert "Wenzel Jakob" in licences
    assert _write(tmp_path) == (bill, licences)  # the same build gives the same bytes


def test_the_version_is_written_once() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert not re.search(r"^version *=", project, re.MULTILINE)
    build = (ROOT / "CMakeLists.txt").read_text()
    assert moolink.__version__ not in build
