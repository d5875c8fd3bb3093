"""A run's files: a table of its numbers, a description of it, links to the newest."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

_writers: dict[Path, csv.DictWriter[str]] = {}


def log_to_file(**fields: Any) -> None:
    """Adds a line to ``logs.tsv`` in the working directory; the first call names the columns."""
    path = Path("logs.tsv").resolve()
    writer = _writers.get(path)
    if writer is None:
        is_new = not path.exists()
        file = path.open("a", buffering=1, newline="")
        writer = _writers[path] = csv.DictWriter(file, list(fields), delimiter="\t")
        if is_new:
            writer.writeheader()
        logging.info("%s logs to %s", "Writing" if is_new else "Appending", path)
    writer.writerow(fields)


def symlink_path(target: str | os.PathLike[str], symlink: str | os.PathLike[str]) -> bool:
    """Makes or replaces a link; returns whether it is there. A file in its place stays."""
    link = Path(symlink)
    try:
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(target)
            return True
    except OSError:
        pass  # Another process made it at the same time.
    return False


def write_metadata(
    localdir: str | os.PathLike[str] | None, srcdir: str | os.PathLike[str], **kwargs: Any
) -> None:
    """Writes ``meta.json`` of a run: its environment, start, source revision and the arguments."""
    if not localdir:
        return
    described = {
        "env": dict(os.environ),
        "date_start": time.strftime("%Y-%m-%d %H:%M:%S"),
        **kwargs,
    }
    if (revision := _revision(srcdir)) is not None:
        described["git"] = revision
    else:
        logging.warning("%s is in no git repository", srcdir)
    name = f"meta.json.{time.strftime('%Y%m%d-%H%M%S')}.{os.getpid()}"
    path = Path(localdir) / name
    path.write_text(json.dumps(described, indent=2, sort_keys=True))
    symlink_path(name, Path(localdir) / "meta.json")


def _revision(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    try:
        return {
            "commit": _git(folder, "rev-parse", "HEAD"),
            "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
            "is_dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
            "path": _git(folder, "rev-parse", "--absolute-git-dir"),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: str | os.PathLike[str], *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
