"""Hooks of mkdocs: SECURITY.md and CHANGELOG.md, which are beside docs/, are pages of the site as
well; the roles of docstrings (``:meth:``) are for Sphinx; each name of the reference has text."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_BESIDE = {"SECURITY.md": "security-policy.md", "CHANGELOG.md": "changelog.md"}
_log = logging.getLogger("mkdocs.hooks")  # its warnings are errors in a strict build


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for name, page in _BESIDE.items():
        text = (Path(config.config_file_path).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to these files lead to their pages."""
    here = posixpath.dirname(page.file.src_uri)
    for name, beside in _BESIDE.items():
        target = posixpath.relpath(beside, here or ".")
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(name)}", f"]({target}", markdown)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Of a role there remains the name. A name of the reference without text fails the build."""
    for name in without_text(html):
        _log.warning("%s: %s has no text", page.file.src_uri, name)
    return re.sub(r":(?:class|meth|func|mod|attr|data):(?=<code>)", "", html)


def without_text(html: str) -> list[str]:
    """The names of the reference that have a signature only."""
    found = []
    for part in html.split('<div class="doc doc-object ')[1:]:
        name = re.search(r'id="([^"]+)"', part)
        signature = re.sub(r'<div class="[^"]*doc-signature.*?</div>', "", part, flags=re.DOTALL)
        if name is not None and "<p>" not in signature and "<table" not in signature:
            found.append(name[1])
    return found
