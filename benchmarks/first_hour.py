"""What a user meets first: how soon it learns, how much memory it takes, how fast it ends.

    python benchmarks/first_hour.py --peers 2 --env-id ALE/Breakout-v5

Runs `moolink run -n PEERS -m examples.torch.impala`, and measures the seconds from the command to
the first applied update, the memory of all its processes (PSS), and the seconds from Ctrl-C to the
end of the last one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import process_tree
import tyro

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Options:
    env_id: str = "ALE/Breakout-v5"
    """Environment of the learner."""
    peers: int = 2
    """Number of peers."""
    seconds: float = 30.0
    """How long the job runs before Ctrl-C."""
    json: Path | None = None
    """Write the results here."""


@dataclass
class Result:
    peers: int
    first_update_seconds: float
    memory_mb: float
    interrupt_seconds: float
    left_processes: int


def measure(options: Options) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "moolink", "run", "-n", str(options.peers)]
        command += ["-m", "examples.torch.impala", "--env-id", options.env_id]
        command += ["--save-dir", directory]
        started = time.monotonic()
        job = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert job.stdout is not None
        try:
            first_update = None
            for line in job.stdout:
                if "/s of " in line:
                    first_update = time.monotonic() - started
                    break
            if first_update is None:
                raise RuntimeError(f"the job ended with status {job.wait()} before it learned")
            threading.Thread(target=job.stdout.read, daemon=True).start()  # keeps the pipe empty
            time.sleep(max(0.0, options.seconds - first_update))
            memory = process_tree.pss_bytes(job.pid)
            processes = process_tree.members(job.pid)
            interrupted = time.monotonic()
            job.send_signal(signal.SIGINT)
            job.wait(timeout=30)
            ended = time.monotonic() - interrupted
        finally:
            job.kill()
            job.wait()
    left = [pid for pid in processes if os.path.exists(f"/proc/{pid}")]
    return Result(options.peers, first_update, memory / 1e6, ended, len(left))


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    result = measure(options)
    print(
        f"{options.env_id}, {result.peers} peers: first update after "
        f"{result.first_update_seconds:.1f} s, {result.memory_mb:.0f} MB, ended "
        f"{result.interrupt_seconds:.2f} s after Ctrl-C, {result.left_processes} processes left"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
