"""The dicts with which moolink's objects report on themselves.

Counts are since the object was made, but for those that say "now".
"""

from moolink.reports.machine import OpenSslInfo as OpenSslInfo
from moolink.reports.machine import VerbsInfo as VerbsInfo
from moolink.reports.peers import (
    CopyStats,
    CudaInfo,
    Explanation,
    PathState,
    PathStats,
    PeerInfo,
    RpcStats,
    TriedAddress,
)
from moolink.reports.rounds import GradientStats, RoundPhases
from moolink.reports.services import (
    InferenceServerStats,
    MeanLag,
    ParameterServerStats,
    PublisherStats,
    ReplayServerStats,
    ReplayStats,
    ReplayStoreStats,
    ReplayTableStats,
    ShardedSubscriberStats,
    SubscriberSource,
    SubscriberStats,
    TrajectoryQueueStats,
    TrajectoryWriterStats,
)

__all__ = [
    "CopyStats",
    "CudaInfo",
    "Explanation",
    "GradientStats",
    "InferenceServerStats",
    "MeanLag",
    "ParameterServerStats",
    "PathState",
    "PathStats",
    "PeerInfo",
    "PublisherStats",
    "ReplayServerStats",
    "ReplayStats",
    "ReplayStoreStats",
    "ReplayTableStats",
    "RoundPhases",
    "RpcStats",
    "ShardedSubscriberStats",
    "SubscriberSource",
    "SubscriberStats",
    "TrajectoryQueueStats",
    "TrajectoryWriterStats",
    "TriedAddress",
]
