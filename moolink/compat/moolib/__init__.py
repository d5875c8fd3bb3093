"""moolib's interface with moolib's habits, so that its programs run unchanged.

The distribution ``moolib`` in ``compat/moolib`` gives a program this module as ``import moolib``.
The classes are moolink's, with these differences: pickled objects are allowed between peers with a
token; batches of calls show values and split replies as moolib does; wrong arguments raise errors
that are ``RuntimeError``, too; a function that is defined just after ``listen`` is found; a bound
method does not keep its Rpc alive; an EnvPool forks this process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moolink import (
    Error,
    Queue,
    RpcDeferredReturn,
    RpcError,
    __version__,
    create_uid,
    set_logging,
    set_max_threads,
)
from moolink.compat.moolib.arguments import set_log_level
from moolink.compat.moolib.futures import Future
from moolink.compat.moolib.groups import AllReduce, Broker, Group
from moolink.compat.moolib.rpc import Rpc

if TYPE_CHECKING:
    from moolink.compat.moolib.accumulator import Accumulator
    from moolink.compat.moolib.batcher import Batcher
    from moolink.compat.moolib.env_pool import EnvPool, EnvRunner, EnvStepper, EnvStepperFuture

# These import torch, numpy or the environments' machinery: loaded at first use.
_HOME = {
    "Accumulator": "accumulator",
    "Batcher": "batcher",
    "EnvPool": "env_pool",
    "EnvRunner": "env_pool",
    "EnvStepper": "env_pool",
    "EnvStepperFuture": "env_pool",
}

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


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
