"""Calls between peers: functions, batches of calls, queues and lent memory."""

from moolink.rpc.peer import Rpc
from moolink.rpc.timed_calls import TimedCalls

__all__ = ["Rpc", "TimedCalls"]
