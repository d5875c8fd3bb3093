"""The raw limits beside the peers: copies and sockets in C (limits.c), compiled when needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from rpc_peers.measure import MODES, SIZES

SOURCE = Path(__file__).with_name("limits.c")
PROGRAM = SOURCE.parents[2] / "build" / "benchmarks" / "rpc_limits"

KINDS = {
    "memcpy": "memcpy",
    "one copy (vm_readv)": "vm_readv",
    "two copies (ring)": "ring",
    "Unix socket": "unix",
    "TCP loopback": "tcp",
}


def missing() -> str:
    """Compiles the program; says why there is none, or nothing."""
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler (cc) was found"
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < SOURCE.stat().st_mtime:
        command = [compiler, "-O2", "-o", str(PROGRAM), str(SOURCE)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            return f"{SOURCE.name} does not compile: {made.stderr.strip().splitlines()[0]}"
    return ""


def one_round(kind: str, seconds: float) -> dict[str, float]:
    """The same figures as a peer's, as far as there are any."""
    figures: dict[str, float] = {}
    for name, size in SIZES.items():
        command = [str(PROGRAM), KINDS[kind], str(size), str(seconds)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            # A container may forbid to read another process's memory.
            raise RuntimeError(run.stderr.strip() or f"exit status {run.returncode}")
        seen = json.loads(run.stdout)
        figures |= {f"{name} {mode}, GB/s": seen[mode] for mode in MODES if mode in seen}
        figures |= {what: seen[what] for what in ("p50 us", "p99 us") if what in seen}
    return figures
