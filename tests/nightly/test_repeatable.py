"""Nine runs with `--deterministic` have the same checksums. `tests/learning` has a short test."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common.checksums import NAME
from tests.learning.processes import run

JOBS = {
    "cartpole": ["--env-id", "CartPole-v1", "--total-steps", "100000"],
    "breakout": ["--env-id", "ALE/Breakout-v5", "--total-steps", "100000"],
    "pendulum": ["--env-id", "Pendulum-v1", "--normalize", "--lstm", "--total-steps", "50000"],
}


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("job", JOBS)
def test_nine_runs_have_one_list_of_checksums(framework: str, job: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    lists = set()
    for peers in (1, 2, 4):
        for number in range(3):
            folder = tmp_path / f"{peers}-{number}"
            command = ["-m", "moolink", "run", "-n", str(peers)]
            command += ["-m", f"examples.{framework}.impala", *JOBS[job], "--deterministic"]
            code, output = run(*command, "--save-dir", str(folder), timeout=1200)
            assert code == 0, output
            lists.add((folder / NAME).read_bytes())
    assert len(lists) == 1
    assert len(next(iter(lists)).splitlines()) > 100
