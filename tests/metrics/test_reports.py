"""The dicts of moolink.reports: every field is documented, and is what objects return."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import pytest

import moolink
from moolink import reports
from moolink.reports import (
    InferenceServerStats,
    ParameterServerStats,
    PublisherStats,
    ReplayServerStats,
    ReplayStats,
    RpcStats,
    ShardedSubscriberStats,
    SubscriberStats,
    TrajectoryQueueStats,
    TrajectoryWriterStats,
)
from moolink.weights import ParameterServer


def check(value: Any, kind: Any, where: str) -> None:
    """Raises unless a value has the fields of its type, and of the types in it."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert value.keys() == hints.keys(), where
        for name, of in hints.items():
            check(value[name], of, f"{where}[{name!r}]")
    elif get_origin(kind) is list:
        for one in value:
            check(one, get_args(kind)[0], where)
    elif get_origin(kind) is dict:
        for name, one in value.items():
            check(one, get_args(kind)[1], f"{where}[{name!r}]")
    else:
        assert isinstance(value, get_args(kind) or kind), f"{where}: {value!r} is no {kind}"


BASES = {"RpcStats": reports.PathStats, "ReplayServerStats": ReplayStats}


@pytest.mark.parametrize("name", reports.__all__)
def test_every_field_is_documented(name: str) -> None:
    kinds = [BASES[name]] if name in BASES else []
    kinds.append(getattr(reports, name))
    documented = [
        field
        for kind in kinds
        for field in re.findall(r"^        (\w+): ", kind.__doc__ or "", re.MULTILINE)
    ]
    assert documented == list(get_type_hints(kinds[-1]))


def test_stats_have_the_fields_of_their_types() -> None:
    with moolink.Rpc("learner") as learner, moolink.Rpc("actor") as actor:
        actor.connect(learner.listen("127.0.0.1:0")[0])
        replay = moolink.Replay(moolink.replay.Table("train", 10))
        with (
            replay,
            moolink.ReplayServer(learner, replay) as served,
            ParameterServer(learner, "tree", np.zeros(3), lambda old, new: new) as server,
            moolink.Publisher(learner, "policy") as publisher,
            moolink.Subscriber(actor, "policy", "learner") as subscriber,
            moolink.weights.ShardedSubscriber(actor, "policy", ["learner"]) as sharded,
            moolink.TrajectoryQueue(learner, "unrolls") as queue,
            moolink.TrajectoryWriter(actor, "unrolls", "learner") as writer,
            moolink.InferenceServer(learner, "model", lambda batch: batch.inputs) as inference,
        ):
            client = moolink.ReplayClient(actor, server="learner")
            client.insert(np.zeros(3))
            publisher.publish({"w": np.zeros(3)})
            subscriber.wait()
            sharded.wait()
            publisher.wait_acknowledged(0)
            writer.put(np.zeros(3), begin=0)
            queue.get(1)
            writer.flush()
            for stats, kind in (
                (learner.stats(), RpcStats),
                (replay.stats(), ReplayStats),
                (served.stats(), ReplayServerStats),
                (client.stats(), ReplayServerStats),
                (server.stats(), ParameterServerStats),
                (publisher.stats(), PublisherStats),
                (subscriber.stats(), SubscriberStats),
                (sharded.stats(), ShardedSubscriberStats),
                (queue.stats(), TrajectoryQueueStats),
                (writer.stats(), TrajectoryWriterStats),
                (inference.stats(), InferenceServerStats),
            ):
                check(stats, kind, kind.__name__)
            assert publisher.stats()["subscribers"]["actor"]["source"] == ""
            assert writer.stats() == {"put": 1, "accepted": 1, "lost": 0}
