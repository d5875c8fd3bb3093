"""Trajectories from actors to a learner, with a bound on how old their weights are."""

from moolink.trajectories.queue import TrajectoryBatch, TrajectoryQueue
from moolink.trajectories.writer import TrajectoryWriter

__all__ = ["TrajectoryBatch", "TrajectoryQueue", "TrajectoryWriter"]
