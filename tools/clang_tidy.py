"""Runs clang-tidy over the C++ core, two at a time: `clang_tidy.py BUILD_DIR [FILE...]`.

Results are remembered by a hash of the file, of all headers and of the configuration, so that a
second run looks only at what changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def main(build: Path, wanted: list[str]) -> int:
    """Returns the number of files with findings."""
    root = Path(__file__).resolve().parent.parent
    commands = json.loads((build / "compile_commands.json").read_text(encoding="utf-8"))
    files = sorted(
        {Path(c["file"]) for c in commands if Path(c["file"]).is_relative_to(root / "cpp")}
    )
    if wanted:
        files = [f for f in files if any(w in str(f) for w in wanted)]
    headers = hashlib.sha256()
    for path in [root / ".clang-tidy", *sorted((root / "cpp").rglob("*.h"))]:
        headers.update(path.read_bytes())
    cache = build / "clang-tidy"
    cache.mkdir(exist_ok=True)

    def clean(file: Path) -> bool:
        digest = hashlib.sha256(headers.digest() + file.read_bytes()).hexdigest()
        mark = cache / digest
        if mark.exists():
            return True
        tidy = Path(sys.executable).with_name("clang-tidy")
        done = subprocess.run(
            [tidy, "-p", build, "--quiet", "--warnings-as-errors=*", "--extra-arg=-w", file],
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
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))
