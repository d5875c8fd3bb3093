"""Versioned weights: a publisher makes whole versions, subscribers switch from one to the next."""

from moolink.weights.copies import Weights
from moolink.weights.parameter_server import ParameterClient, ParameterServer
from moolink.weights.publisher import Publisher
from moolink.weights.sharded_subscriber import ShardedSubscriber
from moolink.weights.shards import Shard
from moolink.weights.subscriber import Subscriber

__all__ = [
    "ParameterClient",
    "ParameterServer",
    "Publisher",
    "Shard",
    "ShardedSubscriber",
    "Subscriber",
    "Weights",
]
