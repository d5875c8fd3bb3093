"""Calls between peers: functions, batches of calls, queues and lent memory."""

from typing import TYPE_CHECKING

from moolink._core import Lent, RpcDeferredReturn, Stream
from moolink.internal.lazy import lazy
from moolink.rpc.peer import Rpc
from moolink.rpc.timed_calls import TimedCalls

if TYPE_CHECKING:
    from moolink.rpc.batch_replies import BatchReturn
    from moolink.rpc.queue import Queue

__all__ = [
    "BatchReturn",
    "Lent",
    "Queue",
    "Rpc",
    "RpcDeferredReturn",
    "Stream",
    "TimedCalls",
]

# Imported at first use: these modules import asyncio or numpy.
__getattr__, __dir__ = lazy(
    __name__, {"BatchReturn": "moolink.rpc.batch_replies", "Queue": "moolink.rpc.queue"}
)
