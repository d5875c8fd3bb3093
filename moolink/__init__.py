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
    StateError,
    TimeoutError,
    WireError,
)
from moolink.internal.installation import why_no_core, why_stale

if TYPE_CHECKING:
    from moolink import accumulate as accumulate
    from moolink import env_pool as env_pool
    from moolink import group as group
    from moolink import inference as inference
    from moolink import metrics
    from moolink import replay as replay
    from moolink import reports as reports
    from moolink import rpc as rpc
    from moolink import tokens as tokens
    from moolink import trajectories as trajectories
    from moolink import weights as weights
    from moolink._core import Future, dump, set_max_threads
    from moolink.accumulate.accumulators import Accumulator
    from moolink.data.batcher import Batcher
    from moolink.data.values import register
    from moolink.env_pool.driving import drive
    from moolink.env_pool.vector_env import VectorEnv
    from moolink.group import Group
    from moolink.group.broker_peer import Broker
    from moolink.inference import InferenceClient, InferenceServer
    from moolink.internal.logs import set_log_level, set_logging
    from moolink.replay import Replay, ReplayClient, ReplayServer
    from moolink.rpc import Rpc
    from moolink.rpc.lending import empty, lend
    from moolink.rpc.naming import in_group
    from moolink.trajectories import TrajectoryQueue, TrajectoryWriter
    from moolink.weights import Publisher, Subscriber

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
    "Batcher": "moolink.data.batcher",
    "Broker": "moolink.group.broker_peer",
    "Future": "moolink._core",
    "Group": "moolink.group",
    "InferenceClient": "moolink.inference",
    "InferenceServer": "moolink.inference",
    "Publisher": "moolink.weights",
    "Replay": "moolink.replay",
    "ReplayClient": "moolink.replay",
    "ReplayServer": "moolink.replay",
    "Rpc": "moolink.rpc",
    "Subscriber": "moolink.weights",
    "TrajectoryQueue": "moolink.trajectories",
    "TrajectoryWriter": "moolink.trajectories",
    "VectorEnv": "moolink.env_pool.vector_env",
    "drive": "moolink.env_pool.driving",
    "dump": "moolink._core",
    "empty": "moolink.rpc.lending",
    "in_group": "moolink.rpc.naming",
    "lend": "moolink.rpc.lending",
    "register": "moolink.data.values",
    "set_log_level": "moolink.internal.logs",
    "set_logging": "moolink.internal.logs",
    "set_max_threads": "moolink._core",
}
_SUBMODULES = {
    "accumulate",
    "env_pool",
    "group",
    "inference",
    "jax",
    "launch",
    "metrics",
    "pettingzoo",
    "ray",
    "replay",
    "reports",
    "rpc",
    "sb3",
    "tensordict",
    "tokens",
    "torch",
    "torchrl",
    "trajectories",
    "weights",
}

# Names of submodules that a program may look for here; the error for them says where they are.
_ELSEWHERE = {
    "accumulate": (
        "AccumulatorBase",
        "Totals",
        "TrainingStep",
        "ordered_sum",
    ),
    "compat.moolib": (
        "AllReduce",
        "RpcError",
        "create_uid",
    ),
    "env_pool": (
        "Driven",
        "EnvPool",
        "EnvStepper",
        "EnvStepperFuture",
    ),
    "group": ("GroupFuture",),
    "inference": (
        "InferenceBatch",
        "InferenceRequest",
    ),
    "reports": (
        "Explanation",
        "GradientStats",
        "PeerInfo",
        "RpcStats",
    ),
    "rpc": (
        "BatchReturn",
        "Lent",
        "Queue",
        "RpcDeferredReturn",
        "Stream",
        "TimedCalls",
    ),
    "trajectories": ("TrajectoryBatch",),
    "weights": (
        "ParameterClient",
        "ParameterServer",
        "Shard",
        "ShardedSubscriber",
        "Weights",
    ),
}

__all__ = [
    "Accumulator",
    "AuthError",
    "Batcher",
    "Broker",
    "CancelledError",
    "Closed",
    "EnvError",
    "Error",
    "FileError",
    "Future",
    "Group",
    "GroupChanged",
    "InferenceClient",
    "InferenceServer",
    "NoSuchFunction",
    "PeerLost",
    "Publisher",
    "QueueFull",
    "RemoteError",
    "Replay",
    "ReplayClient",
    "ReplayServer",
    "Rpc",
    "StateError",
    "Subscriber",
    "TimeoutError",
    "TrajectoryQueue",
    "TrajectoryWriter",
    "VectorEnv",
    "WireError",
    "drive",
    "dump",
    "empty",
    "in_group",
    "lend",
    "metrics",
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
        raise AttributeError(f"module 'moolink' has no attribute {name!r}{_meant(name)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _meant(name: str) -> str:
    """The hint at the end of the error for an unknown name."""
    for module, names in _ELSEWHERE.items():
        if name in names:
            return f": it is moolink.{module}.{name}"
    if name.startswith("_"):
        return ""
    import difflib

    close = difflib.get_close_matches(name, [*__all__, *_SUBMODULES], 1)
    return f": did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
