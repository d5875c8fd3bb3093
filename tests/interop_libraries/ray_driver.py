"""Launches a job by Ray: ``python -m tests.interop_libraries.ray_driver ADDRESS JOB FOLDER``."""

from __future__ import annotations

import os
import sys

import ray

import moolink.ray
from moolink.launch import Job, Role
from tests.launch import four_learners


def called(folder: str) -> None:
    """What the job of a function runs."""
    index = os.environ["MOOLINK_PEER_INDEX"]
    print(f"called with {folder} as {index} by {len(sys.argv)} words", flush=True)
    sys.exit(3 if index == "1" else 0)


def job_of(name: str, folder: str) -> Job:
    """The jobs of the tests."""
    peer = ["-m", "tests.slurm.peer", folder]
    if name == "train":
        learner = Role("learner", peer, count=2, restarts=1)
        return Job("walk", [learner, Role("actor", peer, elastic=True)], grace=5)
    if name == "function":
        return Job("call", [Role("peer", moolink.ray.command(called, folder), count=2)])
    if name == "learn":
        command = [*four_learners.COMMAND, "--save-dir", folder]
        return Job("learn", [Role("peer", command, count=4, restarts=1)], grace=5)
    return Job("large", [Role("peer", peer, cores=1000)])


if __name__ == "__main__":
    address, name, folder = sys.argv[1:]
    ray.init(address=address, logging_level="error", log_to_driver=False)
    timeout = 1.0 if name == "large" else 60.0
    strategy = "STRICT_SPREAD" if name in ("train", "learn") else "PACK"
    sys.exit(moolink.ray.launch(job_of(name, folder), strategy=strategy, start_timeout=timeout))
