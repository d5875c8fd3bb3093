"""moolib's interface with moolib's habits, so that its programs run unchanged.

The distribution ``moolib`` in ``compat/moolib`` gives a program this module as ``import moolib``.
The classes are moolink's, with these differences: pickled objects are allowed between peers with a
token; batches of calls show values and split replies as moolib does; wrong arguments raise errors
that are ``RuntimeError``, too; a function that is defined just after ``listen`` is found; a bound
method does not keep its Rpc alive; an EnvPool forks this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moolink import Error, __version__, set_logging, set_max_threads
from moolink._core import create_uid
from moolink.compat.moolib.arguments import set_log_level
from moolink.compat.moolib.futures import Future
from moolink.compat.moolib.groups import AllReduce, Broker, Group
from moolink.compat.moolib.rpc import Rpc
from moolink.internal.lazy import lazy
from moolink.rpc import Queue, RpcDeferredReturn

if TYPE_CHECKING:
    from moolink.compat.moolib.accumulator import Accumulator
    from moolink.compat.moolib.batcher import Batcher
    from moolink.compat.moolib.env_pool import EnvPool, EnvRunner, EnvStepper, EnvStepperFuture

RpcError = Error

__all__ = [
    "Accumulator",
    "AllReduce",
    "Batcher",
    "Broker",
    "EnvPool",
    "EnvRunner",
    "EnvStepper",
    "EnvStepperFuture",
    "Error",
    "Future",
    "Group",
    "Queue",
    "Rpc",
    "RpcDeferredReturn",
    "RpcError",
    "__version__",
    "create_uid",
    "set_log_level",
    "set_logging",
    "set_max_threads",
]

# These import torch, numpy or the environments' machinery.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "Accumulator": "moolink.compat.moolib.accumulator",
        "Batcher": "moolink.compat.moolib.batcher",
        "EnvPool": "moolink.compat.moolib.env_pool",
        "EnvRunner": "moolink.compat.moolib.env_pool",
        "EnvStepper": "moolink.compat.moolib.env_pool",
        "EnvStepperFuture": "moolink.compat.moolib.env_pool",
    },
)
