"""The distribution of compat/moolib: of this version of moolink, with all its packages."""

from __future__ import annotations

import tomllib

import moolib

import moolink
from tests.compat.conftest import PACKAGE


def test_it_is_of_this_version_and_complete() -> None:
    described = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    project = described["project"]
    assert project["version"] == moolink.__version__ == moolib.__version__
    assert project["dependencies"] == [f"moolink[torch]=={moolink.__version__}"]
    folders = {path.parent for path in (PACKAGE / "moolib").rglob("*.py")}
    packages = {".".join(folder.relative_to(PACKAGE).parts) for folder in folders}
    assert packages == set(described["tool"]["setuptools"]["packages"])
