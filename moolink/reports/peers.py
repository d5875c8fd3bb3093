"""Types of the reports of peers: `Rpc.stats`, `Rpc.peers` and `Rpc.explain`."""

from __future__ import annotations

from typing import Literal, TypedDict

Path = Literal["shm", "tcp", "verbs"]


class PathStats(TypedDict):
    """Traffic of one kind of path, or of all of them.

    Attributes:
        frames_written: units of the wire format, of any size.
        frames_received: the same, in the other direction.
        bytes_written: payload and control.
        bytes_received: payload and control.
    """

    frames_written: int
    frames_received: int
    bytes_written: int
    bytes_received: int


class CopyStats(TypedDict):
    """Arrays that were copied although others would not have been; see docs/arrays.md.

    Attributes:
        gaps: strided or transposed arrays that were sent.
        byte_order: big-endian arrays that were sent.
        lazy_view: conjugated or negated torch views that were sent.
        several_parts: JAX arrays on several devices that were sent.
        lent: lent arrays that were received in torch or JAX, which have no read-only arrays.
        alignment: received arrays that were not aligned to 64 bytes.
        bytes: of all of them.
    """

    gaps: int
    byte_order: int
    lazy_view: int
    several_parts: int
    lent: int
    alignment: int
    bytes: int


class CudaInfo(TypedDict):
    """This process's copies from and to CUDA devices since it began.

    Attributes:
        used: whether moolink has loaded and initialised the CUDA driver.
        bytes_to_host: copied from devices.
        bytes_to_device: copied to devices.
        copies_to_host: waits for a device, each of one or more tensors.
        copies_to_device: the same, in the other direction.
        pinned_bytes: now: of the host's memory, for copies.
        bytes_within_device: copied within a device, for GPUDirect and between processes.
    """

    used: bool
    bytes_to_host: int
    bytes_to_device: int
    copies_to_host: int
    copies_to_device: int
    pinned_bytes: int
    bytes_within_device: int


class RpcStats(PathStats):
    """A peer's counts: those of :class:`PathStats` over all paths, and more.

    Attributes:
        calls_sent: calls of this peer.
        calls_succeeded: those of them that returned a result.
        calls_failed: those of them that raised.
        calls_pending: now: those of them without a result.
        calls_received: calls of other peers.
        calls_running: now: those of them whose handlers have not returned.
        paths: the traffic of each kind of path that was used.
        connections: now.
        connections_opened: all there were.
        dials_failed: attempts to connect.
        peers: now: connected, or waited for.
        peers_lost: dead, unreachable or closed.
        copies: arrays that were copied.
        cuda: of the whole process.
    """

    calls_sent: int
    calls_succeeded: int
    calls_failed: int
    calls_pending: int
    calls_received: int
    calls_running: int
    paths: dict[Path, PathStats]
    connections: int
    connections_opened: int
    dials_failed: int
    peers: int
    peers_lost: int
    copies: CopyStats
    cuda: CudaInfo


class PeerInfo(TypedDict):
    """A peer that is connected, or was less than 3 s ago.

    Attributes:
        name: its name.
        group: the group whose key the connection is confined to; "": none. See moolink.in_group.
        instance: 32 hexadecimal digits, new with each start.
        same_host: whether it runs on this host.
        connected: whether it is connected now.
        suspected: whether it was silent for 1 s, so that its addresses are dialled anew.
        path: the path in use.
        paths: those that are up, the one in use first.
        latency: the round trip on the path in use, in seconds, smoothed; None: not measured yet.
        last_latency: the last round trip, in seconds; None: not measured yet.
        silent: seconds since it was heard of.
        addresses: where it listens.
        unacknowledged_bytes: sent to it.
        calls_waiting: of this peer, that the other does not take yet.
        calls_running: of the other, that have no reply yet.
        loans_given: to it, and not returned.
        loans_held: of its memory.
    """

    name: str
    group: str
    instance: str
    same_host: bool
    connected: bool
    suspected: bool
    path: Path | Literal["none"]
    paths: list[Path]
    latency: float | None
    last_latency: float | None
    silent: float
    addresses: list[str]
    unacknowledged_bytes: int
    calls_waiting: int
    calls_running: int
    loans_given: int
    loans_held: int


class PathState(TypedDict):
    """One path to a peer, in use or not.

    Attributes:
        path: its kind.
        state: whether it is in use, could be at once, or is not there.
        reason: why it is not in use; "" if it is.
        address: the peer's, as it was dialled; "": the peer has dialled.
        cipher: of TLS; None: data are not encrypted.
        latency: the round trip, in seconds, smoothed; None: not measured yet.
        last_latency: the last round trip, in seconds; None: not measured yet.
        silent: seconds since something came; None: unused.
    """

    path: Path
    state: Literal["in use", "ready", "unused"]
    reason: str
    address: str
    cipher: str | None
    latency: float | None
    last_latency: float | None
    silent: float | None


class TriedAddress(TypedDict):
    """An address that was dialled and did not answer.

    Attributes:
        address: as it was dialled.
        tries: since it answered last.
        given_up: whether it is dialled no more.
        error: of the last try.
    """

    address: str
    tries: int
    given_up: bool
    error: str


class Explanation(TypedDict):
    """How a peer is reached, or why it is not.

    Attributes:
        name: the peer's name.
        instance: 32 hexadecimal digits, new with each start; None: not known.
        connected: whether it is connected now.
        suspected: whether it was silent for 1 s, so that its addresses are dialled anew.
        same_host: whether it runs on this host.
        reason: a summary in one sentence.
        path: the path in use.
        cipher: of TLS, on that path; None: data are not encrypted.
        latency: the round trip on it, in seconds, smoothed; None: not measured yet.
        last_latency: the last round trip, in seconds; None: not measured yet.
        paths: the best first.
        addresses: where it listens.
        tried: addresses that did not answer.
        asked: the peers that were asked where this one is.
    """

    name: str
    instance: str | None
    connected: bool
    suspected: bool
    same_host: bool
    reason: str
    path: Path | Literal["none"]
    cipher: str | None
    latency: float | None
    last_latency: float | None
    paths: list[PathState]
    addresses: list[str]
    tried: list[TriedAddress]
    asked: list[str]
