"""The function by which writers put items into a queue."""

PUT = "moolink.trajectories/{}/put"
