"""moolink: communication for distributed reinforcement learning.

RPC for any DLPack tensor, elastic groups, allreduce, a gradient accumulator, an environment pool,
a batcher, a replay and versioned weights, over shared memory and TCP. Importing this package
imports neither torch nor JAX.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading  # noqa: F401 - a worker that imported it first would be taken for the main thread
import warnings
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036 - pip checks this, a folder in PYTHONPATH does not
    raise ImportError(
        f"moolink needs Python 3.11 or later; this is Python {sys.version.split()[0]} "
        f"({sys.executable})"
    )

from moolink.errors import (
    AuthError,
    CancelledError,
    Closed,
    EnvError,
    Error,
    FileError,
    GroupChanged,
    NoSuchFunction,
    PeerLost,
    QueueFull,
    RemoteError,
    RpcError,
    StateError,
    TimeoutError,
    WireError,
)
from moolink.internal.installation import why_no_core, why_stale

if TYPE_CHECKING:
    from moolink import metrics
    from moolink._core import (
        Future,
        Lent,
        RpcDeferredReturn,
        Stream,
        create_uid,
        dump,
        set_max_threads,
    )
    from moolink.accumulate.accumulators import Accumulator
    from moolink.accumulate.ordered import ordered_sum
    from moolink.data.batcher import Batcher
    from moolink.data.values import register
    from moolink.env_pool import EnvPool, EnvStepper, EnvStepperFuture
    from moolink.env_pool.driving import Driven, drive
    from moolink.env_pool.vector_env import VectorEnv
    from moolink.group import AllReduce, Group, GroupFuture
    from moolink.group.broker_peer import Broker
    from moolink.inference import InferenceBatch, InferenceClient, InferenceServer
    from moolink.internal.logs import set_log_level, set_logging
    from moolink.replay import Replay, ReplayClient, ReplayServer
    from moolink.reports import Explanation, GradientStats, PeerInfo, RpcStats
    from moolink.rpc import Rpc
    from moolink.rpc.batch_replies import BatchReturn
    from moolink.rpc.lending import empty, lend
    from moolink.rpc.naming import in_group
    from moolink.rpc.queue import Queue
    from moolink.trajectories import TrajectoryBatch, TrajectoryQueue, TrajectoryWriter
    from moolink.weights import (
        ParameterClient,
        ParameterServer,
        Publisher,
        Shard,
        ShardedSubscriber,
        Subscriber,
        Weights,
    )

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is the command ``moolink``, whose `doctor` explains what is missing."""
    if sys.argv[:1] == ["-m"]:
        return "moolink" in sys.orig_argv
    return os.path.basename(sys.argv[0] if sys.argv else "") == "moolink"


if not _is_command():
    if (_missing := why_no_core()) is not None:
        raise ImportError(_missing, name="moolink._core")
    if (_stale := why_stale()) is not None:
        warnings.warn(_stale, RuntimeWarning, stacklevel=2)

# Loaded at first use, so that `import moolink` costs next to nothing.
_HOME = {
    "Accumulator": "moolink.accumulate.accumulators",
    "AllReduce": "moolink.group",
    "BatchReturn": "moolink.rpc.batch_replies",
    "Batcher": "moolink.data.batcher",
    "Broker": "moolink.group.broker_peer",
    "Driven": "moolink.env_pool.driving",
    "EnvPool": "moolink.env_pool",
    "EnvStepper": "moolink.env_pool",
    "EnvStepperFuture": "moolink.env_pool",
    "Explanation": "moolink.reports",
    "Future": "moolink._core",
    "GradientStats": "moolink.reports",
    "Group": "moolink.group",
    "GroupFuture": "moolink.group",
    "InferenceBatch": "moolink.inference",
    "InferenceClient": "moolink.inference",
    "InferenceServer": "moolink.inference",
    "Lent": "moolink._core",
    "PeerInfo": "moolink.reports",
    "ParameterClient": "moolink.weights",
    "ParameterServer": "moolink.weights",
    "Publisher": "moolink.weights",
    "Queue": "moolink.rpc.queue",
    "Replay": "moolink.replay",
    "ReplayClient": "moolink.replay",
    "ReplayServer": "moolink.replay",
    "Rpc": "moolink.rpc",
    "RpcDeferredReturn": "moolink._core",
    "RpcStats": "moolink.reports",
    "Stream": "moolink._core",
    "Shard": "moolink.weights",
    "ShardedSubscriber": "moolink.weights",
    "Subscriber": "moolink.weights",
    "TrajectoryBatch": "moolink.trajectories",
    "TrajectoryQueue": "moolink.trajectories",
    "TrajectoryWriter": "moolink.trajectories",
    "VectorEnv": "moolink.env_pool.vector_env",
    "Weights": "moolink.weights",
    "create_uid": "moolink._core",
    "drive": "moolink.env_pool.driving",
    "dump": "moolink._core",
    "empty": "moolink.rpc.lending",
    "in_group": "moolink.rpc.naming",
    "lend": "moolink.rpc.lending",
    "ordered_sum": "moolink.accumulate.ordered",
    "register": "moolink.data.values",
    "set_log_level": "moolink.internal.logs",
    "set_logging": "moolink.internal.logs",
    "set_max_threads": "moolink._core",
}
_SUBMODULES = {
    "inference",
    "jax",
    "launch",
    "metrics",
    "pettingzoo",
    "ray",
    "replay",
    "reports",
    "sb3",
    "tensordict",
    "tokens",
    "torch",
    "torchrl",
    "trajectories",
    "weights",
}

__all__ = [
    "Accumulator",
    "AllReduce",
    "AuthError",
    "BatchReturn",
    "Batcher",
    "Broker",
    "CancelledError",
    "Closed",
    "Driven",
    "EnvError",
    "EnvPool",
    "EnvStepper",
    "EnvStepperFuture",
    "Error",
    "Explanation",
    "FileError",
    "Future",
    "GradientStats",
    "Group",
    "GroupChanged",
    "GroupFuture",
    "InferenceBatch",
    "InferenceClient",
    "InferenceServer",
    "Lent",
    "NoSuchFunction",
    "ParameterClient",
    "ParameterServer",
    "PeerInfo",
    "PeerLost",
    "Publisher",
    "Queue",
    "QueueFull",
    "RemoteError",
    "Replay",
    "ReplayClient",
    "ReplayServer",
    "Rpc",
    "RpcDeferredReturn",
    "RpcError",
    "RpcStats",
    "Shard",
    "ShardedSubscriber",
    "StateError",
    "Stream",
    "Subscriber",
    "TimeoutError",
    "TrajectoryBatch",
    "TrajectoryQueue",
    "TrajectoryWriter",
    "VectorEnv",
    "Weights",
    "WireError",
    "create_uid",
    "drive",
    "dump",
    "empty",
    "in_group",
    "lend",
    "metrics",
    "ordered_sum",
    "register",
    "set_log_level",
    "set_logging",
    "set_max_threads",
]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"moolink.{name}")
    home = _HOME.get(name)
    if home is None:
        import difflib  # only for this error

        close = difflib.get_close_matches(name, [*__all__, *_SUBMODULES], 1)
        meant = f": did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module 'moolink' has no attribute {name!r}{meant}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_SUBMODULES])
