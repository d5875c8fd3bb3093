"""Elastic groups of peers, their broker, and collective operations."""

from moolink.group.collectives import AllReduce, GroupFuture
from moolink.group.group import Group, Reduction

__all__ = ["AllReduce", "Group", "GroupFuture", "Reduction"]
