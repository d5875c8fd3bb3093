"""Runs clang-tidy over the C++ core: `clang_tidy.py BUILD_DIR [--since REV] [FILE...]`.

A clean result is remembered by a hash of the file, of all headers and of the configuration: a
second run checks only the files that changed. With `--since` it checks the sources that differ from
REV or include a header that does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
BIN = Path(sys.executable).parent


def output(*command: str | Path) -> str:
    """Returns the standard output of a command that must succeed, run in the project's folder."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def touched_since(revision: str) -> set[Path]:
    """Returns the sources that changed since `revision` and those that include a changed header."""
    diff = output("git", "diff", "--name-only", revision, "--", "cpp", ".clang-tidy")
    changed = {ROOT / name for name in diff.split()}
    files = {path for kind in ("*.cc", "*.h") for path in (ROOT / "cpp").rglob(kind)}
    if ROOT / ".clang-tidy" in changed:
        return files
    included = {
        path: {ROOT / "cpp" / name for name in INCLUDE.findall(path.read_text(encoding="utf-8"))}
        for path in files
    }
    touched: set[Path] = set()
    while changed:
        touched |= changed
        changed = {path for path in files if included[path] & changed} - touched
    return touched


def main(build: Path, wanted: list[str], since: str | None) -> int:
    """Returns the number of files with findings."""
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    files = sorted(
        {Path(c["file"]) for c in commands if Path(c["file"]).is_relative_to(ROOT / "cpp")}
    )
    if since:
        touched = touched_since(since)
        files = [f for f in files if f in touched]
    if wanted:
        files = [f for f in files if any(w in str(f) for w in wanted)]
    headers = hashlib.sha256()
    for path in [ROOT / ".clang-tidy", *sorted((ROOT / "cpp").rglob("*.h"))]:
        headers.update(path.read_bytes())
    tidy: list[str | Path] = [
        BIN / "clang-tidy",
        "-p",
        build,
        "--quiet",
        "--warnings-as-errors=*",
        "--extra-arg=-Wno-everything",
        "--extra-arg=-Wthread-safety",
    ]
    cache = build / "clang-tidy"
    cache.mkdir(exist_ok=True)

    def clean(file: Path) -> bool:
        digest = hashlib.sha256(headers.digest() + file.read_bytes()).hexdigest()
        mark = cache / digest
        if mark.exists():
            return True
        done = subprocess.run(
            [*tidy, file],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            print(done.stdout, done.stderr, sep="\n", flush=True)
            return False
        mark.touch()
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = sum(not ok for ok in pool.map(clean, files))
    print(f"clang-tidy: {len(files)} files, {findings} with findings")
    return findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("files", nargs="*", help="parts of the paths to check; default: all")
    parser.add_argument("--since", metavar="REV", help="check only sources changed since REV")
    options = parser.parse_args()
    sys.exit(min(main(options.build.resolve(), options.files, options.since or None), 1))
