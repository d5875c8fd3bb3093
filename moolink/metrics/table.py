"""moolink's own metrics: the name, kind, labels and meaning of each.

Names and units follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters.
docs/metrics.md shows this table.
"""

from __future__ import annotations

from typing import NamedTuple

from moolink.metrics.family import Kind


class Metric(NamedTuple):
    """A metric that moolink collects by itself."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_GROUP = ("group",)
_MODEL = ("group", "name")
_PHASE = ("group", "name", "phase")
_TABLE = ("table",)
_NAME = ("name",)
_PATH = ("path",)
_POOL = ("pool",)

TABLE = (
    Metric("process_cpu_seconds_total", "counter", (), "User and system time of the process."),
    Metric("process_resident_memory_bytes", "gauge", (), "Resident memory of the process."),
    Metric("process_start_time_seconds", "gauge", (), "Start of the process, Unix time."),
    Metric("moolink_calls_sent_total", "counter", (), "Calls made by this peer."),
    Metric("moolink_calls_succeeded_total", "counter", (), "Calls that returned a result."),
    Metric("moolink_calls_failed_total", "counter", (), "Calls that ended with an error."),
    Metric("moolink_calls_pending", "gauge", (), "Calls made by this peer, without a result."),
    Metric("moolink_calls_received_total", "counter", (), "Calls made to this peer."),
    Metric("moolink_calls_running", "gauge", (), "Calls whose handlers have not returned."),
    Metric("moolink_connections", "gauge", (), "Open connections."),
    Metric("moolink_connections_opened_total", "counter", (), "Connections opened."),
    Metric("moolink_dials_failed_total", "counter", (), "Connections that could not be opened."),
    Metric("moolink_peers", "gauge", (), "Peers that are connected."),
    Metric("moolink_peers_lost_total", "counter", (), "Peers that died or left."),
    Metric("moolink_received_bytes_total", "counter", _PATH, "Bytes received."),
    Metric("moolink_sent_bytes_total", "counter", _PATH, "Bytes sent."),
    Metric("moolink_group_epoch", "gauge", _GROUP, "Number of the membership."),
    Metric("moolink_group_members", "gauge", _GROUP, "Members of the view."),
    Metric("moolink_model_version", "gauge", _MODEL, "Rounds of gradients delivered to the model."),
    Metric("moolink_leader", "gauge", _MODEL, "1 at the leader of the rounds, 0 elsewhere."),
    Metric("moolink_rounds_total", "counter", _MODEL, "Rounds applied by this process."),
    Metric("moolink_round_seconds", "histogram", _MODEL, "Time from one round to the next."),
    Metric("moolink_round_phase_seconds", "histogram", _PHASE, "Time of each of its phases."),
    Metric("moolink_contributions_total", "counter", _MODEL, "Contributions in these rounds."),
    Metric("moolink_skipped_contributions_total", "counter", _MODEL, "Those without gradients."),
    Metric("moolink_samples_total", "counter", _MODEL, "Sum of the rounds' batch sizes."),
    Metric("moolink_staleness_updates_total", "counter", _MODEL, "Sum of contributions' ages."),
    Metric("moolink_counter", "gauge", (*_MODEL, "counter"), "Sum of a counter of these rounds."),
    Metric("moolink_own_counter", "gauge", (*_MODEL, "counter"), "Sum of it in own contributions."),
    Metric("moolink_environments", "gauge", _POOL, "Environments of a pool."),
    Metric("moolink_environment_steps_total", "counter", _POOL, "Steps asked of environments."),
    Metric("moolink_environment_restarts_total", "counter", _POOL, "Worker processes restarted."),
    Metric("moolink_replay_items", "gauge", _TABLE, "Items in a replay's table."),
    Metric("moolink_replay_inserts_total", "counter", _TABLE, "Items inserted."),
    Metric("moolink_replay_samples_total", "counter", _TABLE, "Items sampled."),
    Metric("moolink_replay_removals_total", "counter", _TABLE, "Items removed."),
    Metric("moolink_replay_waiting_inserts", "gauge", _TABLE, "Inserts that wait for the limiter."),
    Metric("moolink_replay_waiting_samples", "gauge", _TABLE, "Samples that wait."),
    Metric("moolink_queue_items", "gauge", _NAME, "Items in a trajectory queue."),
    Metric("moolink_queue_taken_total", "counter", _NAME, "Items taken by the learner."),
    Metric("moolink_queue_dropped_total", "counter", _NAME, "Items dropped as too old."),
    Metric("moolink_queue_largest_lag", "gauge", _NAME, "Largest lag of an item that was taken."),
    Metric("moolink_published_version", "gauge", _NAME, "Newest version of a publisher."),
    Metric("moolink_subscribers", "gauge", _NAME, "Connected subscribers of a publisher."),
    Metric("moolink_subscribed_version", "gauge", _NAME, "Version that a subscriber has."),
    Metric("moolink_inference_batches_total", "counter", _NAME, "Batches of an inference server."),
    Metric("moolink_inference_requests_total", "counter", _NAME, "Requests of clients."),
    Metric("moolink_inference_rows_total", "counter", _NAME, "Rows of the requests."),
    Metric("moolink_inference_clients", "gauge", _NAME, "Clients now."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in TABLE}
