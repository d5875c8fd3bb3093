"""Types that `stats()` of replays, weights, trajectories and inference servers returns."""

from __future__ import annotations

from typing import TypedDict


class ReplayTableStats(TypedDict):
    """A replay's table. Counts are of items since it was made or reset.

    Attributes:
        size: items in it now.
        inserts: items that were inserted.
        samples: items that were sampled.
        removals: items that were removed.
        waiting_inserts: requests that wait now.
        waiting_samples: requests that wait now.
    """

    size: int
    inserts: int
    samples: int
    removals: int
    waiting_inserts: int
    waiting_samples: int


class ReplayStoreStats(TypedDict):
    """The memory of steps of one layout.

    Attributes:
        steps: now: those to which items, writers or batches refer.
        step_bytes: of one step.
        reserved_bytes: of the store's memory, or file.
    """

    steps: int
    step_bytes: int
    reserved_bytes: int


class ReplayStats(TypedDict):
    """A replay.

    Attributes:
        tables: by name.
        stores: one for each layout of steps.
    """

    tables: dict[str, ReplayTableStats]
    stores: list[ReplayStoreStats]


class ReplayServerStats(ReplayStats):
    """A replay that is served.

    Attributes:
        writers: now: those of clients.
    """

    writers: int


class SubscriberSource(TypedDict):
    """A subscriber, as its publisher sees it.

    Attributes:
        version: that it has; None: none yet.
        host: the key of its host.
        source: the peer from which it fetches; "": the publisher.
    """

    version: int | None
    host: str
    source: str


class PublisherStats(TypedDict):
    """A publisher of weights.

    Attributes:
        version: the newest; None: nothing was published.
        bytes: of the newest version.
        kept: the versions that can be fetched, the oldest first.
        waiting: now: requests for a newer version.
        subscribers: each :class:`moolink.Subscriber`, by the name of its peer.
    """

    version: int | None
    bytes: int
    kept: list[int]
    waiting: int
    subscribers: dict[str, SubscriberSource]


class SubscriberStats(TypedDict):
    """A subscriber of weights.

    Attributes:
        version: the current one; None: none yet.
        versions: that have arrived.
        chunks: of 512 KB or less, that were fetched.
        bytes_fetched: from other hosts, or from processes that could not lend.
        bytes_mapped: from processes of this host.
        waiting_for: why there is no newer version.
    """

    version: int | None
    versions: int
    chunks: int
    bytes_fetched: int
    bytes_mapped: int
    waiting_for: str


class ShardedSubscriberStats(TypedDict):
    """A subscriber of a tree that several publishers hold.

    Attributes:
        version: the current one; None: none yet.
        versions: that have arrived.
        pieces: parts of arrays that have arrived.
        bytes: of these pieces.
        waiting_for: why there is no newer version.
    """

    version: int | None
    versions: int
    pieces: int
    bytes: int
    waiting_for: str


class ParameterServerStats(TypedDict):
    """A parameter server.

    Attributes:
        version: of the parameters.
        applied: pushes that were applied: each makes a version.
        dropped: pushes that were too old.
        publisher: of the parameters.
    """

    version: int
    applied: int
    dropped: int
    publisher: PublisherStats


class MeanLag(TypedDict):
    """The mean age of the items that were taken, in versions of the learner's weights.

    Attributes:
        acting: from the first step to the last.
        in_flight: from the last step until the item came.
        in_queue: until the item was taken.
    """

    acting: float
    in_flight: float
    in_queue: float


class TrajectoryQueueStats(TypedDict):
    """A queue of trajectories.

    Attributes:
        size: items in it now.
        waiting_for_room: items of writers that wait now.
        put: items that have come.
        taken: items in batches.
        dropped: items that were too old.
        withdrawn: items that waited for room until their writer, or the queue, ended that.
        largest_lag: of an item that was taken, in versions, from its first step on.
        mean_lag: of the items that were taken.
    """

    size: int
    waiting_for_room: int
    put: int
    taken: int
    dropped: int
    withdrawn: int
    largest_lag: int
    mean_lag: MeanLag


class TrajectoryWriterStats(TypedDict):
    """A writer of trajectories.

    Attributes:
        put: items that were sent.
        accepted: items that the learner's queue has taken.
        lost: items that were lost with a learner, or sent to one without the queue.
    """

    put: int
    accepted: int
    lost: int


class InferenceServerStats(TypedDict):
    """A server of a model.

    Attributes:
        batches: that the model was run on.
        requests: in these batches.
        rows: of these requests.
        padding: rows of zeros that filled batches up.
        clients: now.
        states: of actors, that are kept now.
        version: of the newest weights; None: there are none.
    """

    batches: int
    requests: int
    rows: int
    padding: int
    clients: int
    states: int
    version: int | None
