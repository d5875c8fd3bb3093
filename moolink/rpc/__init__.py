"""Calls between peers: functions, batches of calls, queues and lent memory."""

from moolink.rpc.peer import Rpc

__all__ = ["Rpc"]
