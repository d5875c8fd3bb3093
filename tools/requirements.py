"""Prints what the named extras of pyproject.toml require, one a line, for `pip install -r`.

The extension is installed by itself (editable, without dependencies), so that a change of the C++
code does not make pip look at torch again.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Returns the requirements of the project and of the extras, nested extras resolved."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = list(project["dependencies"])
    queue = list(extras)
    while queue:
        for requirement in project["optional-dependencies"][queue.pop()]:
            own = re.fullmatch(r"moolink\[(.*)\]", requirement)
            if own:
                queue.extend(own[1].split(","))
            else:
                found.append(requirement)
    return sorted(set(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
