"""Hooks of mkdocs: SECURITY.md, which is beside docs/, is a page of the site as well; the roles of
docstrings (``:meth:``) are for Sphinx."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_POLICY = "security-policy.md"


def on_files(files: Files, config: Any) -> Files:
    """Adds the page."""
    text = (Path(config.config_file_path).parent / "SECURITY.md").read_text(encoding="utf-8")
    files.append(File.generated(config, _POLICY, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to SECURITY.md lead to the page."""
    here = posixpath.dirname(page.file.src_uri)
    target = posixpath.relpath(_POLICY, here or ".")
    return re.sub(r"\]\((?:\.\./)+SECURITY\.md", f"]({target}", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Of a role there remains the name."""
    return re.sub(r":(?:class|meth|func|mod|attr|data):(?=<code>)", "", html)
