"""Elastic groups of peers, their broker, and collective operations."""

from moolink.group.collectives import GroupFuture
from moolink.group.group import Group

__all__ = ["Group", "GroupFuture"]
