"""Elastic groups of peers, their broker, and collective operations."""

from moolink.group.collectives import AllReduce
from moolink.group.group import Group, Reduction

__all__ = ["AllReduce", "Group", "Reduction"]
