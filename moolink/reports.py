"""The dicts with which peers, accumulators and the machine report on themselves.

``Rpc.stats``, ``Rpc.peers``, ``Rpc.explain`` and ``Accumulator.get_gradient_stats`` return
them.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Path = Literal["shm", "tcp", "verbs"]


class PathStats(TypedDict):
    """Traffic of one kind of path, or of all of them; bytes of payload and control."""

    frames_written: int
    frames_received: int
    bytes_written: int
    bytes_received: int


class CopyStats(TypedDict):
    """Arrays that were copied though others would not have been; see docs/arrays.md."""

    gaps: int
    byte_order: int
    lazy_view: int
    several_parts: int
    lent: int
    alignment: int
    bytes: int  # of all of them


class CudaInfo(TypedDict):
    """This process's copies from and to CUDA devices since it began."""

    used: bool  # whether the CUDA driver was loaded and initialised by moolink
    bytes_to_host: int
    bytes_to_device: int
    copies_to_host: int  # waits for a device, each of one or more tensors
    copies_to_device: int
    pinned_bytes: int  # now: of the host's memory, for copies
    bytes_within_device: int  # copied within a device, for GPUDirect and between processes


class RpcStats(PathStats):
    """A peer's counters since its beginning, but for those that say "now"."""

    calls_sent: int
    calls_succeeded: int
    calls_failed: int
    calls_pending: int  # now: sent by this peer, without a result
    calls_received: int
    calls_running: int  # now: received, their handlers not yet returned
    paths: dict[Path, PathStats]  # those that were used
    connections: int  # now
    connections_opened: int
    dials_failed: int
    peers: int  # now: connected, or waited for
    peers_lost: int  # dead, unreachable or closed
    copies: CopyStats
    cuda: CudaInfo  # of the process


class OpenSslInfo(TypedDict):
    """The library that encrypts tcp."""

    usable: bool
    version: str
    where: str  # the file that it was found in
    reason: str  # why there is none that can be used


class VerbsInfo(TypedDict):
    """The library and the device that RDMA uses."""

    usable: bool
    library: str  # the file that libibverbs was loaded from; empty: it was not
    chosen: str  # device, port and GID or LID
    reason: str  # why RDMA is not used
    devices: list[str]  # each port that was examined, with the reason against it


class PeerInfo(TypedDict):
    """A peer that is connected, or was less than 3 s ago."""

    name: str
    instance: str  # 32 hexadecimal digits, new with each start
    same_host: bool
    connected: bool
    suspected: bool  # silent for 1 s: its addresses are dialled anew
    path: Path | Literal["none"]  # in use
    paths: list[Path]  # that are up, the one in use first
    latency: float | None  # round trip on the path in use, s, smoothed; None: not measured yet
    last_latency: float | None
    silent: float  # s since it was heard of
    addresses: list[str]
    unacknowledged_bytes: int
    calls_waiting: int  # of this peer, that the other does not take yet
    calls_running: int  # of the other, that have no reply yet
    loans_given: int  # to it, and not returned
    loans_held: int  # of its memory


class PathState(TypedDict):
    """One path to a peer, in use or not."""

    path: Path
    state: Literal["in use", "ready", "unused"]
    reason: str  # why it is not in use; "" if it is
    address: str  # of the peer, as it was dialled; "": the peer has dialled
    cipher: str | None  # of TLS; None: data are not encrypted
    latency: float | None  # s
    last_latency: float | None
    silent: float | None  # s; None: unused


class TriedAddress(TypedDict):
    """An address that was dialled and did not answer."""

    address: str
    tries: int  # since it answered last
    given_up: bool
    error: str  # of the last try


class Explanation(TypedDict):
    """How a peer is reached, or why it is not."""

    name: str
    instance: str | None  # None: not known
    connected: bool
    suspected: bool
    same_host: bool
    reason: str  # one sentence on how things stand
    path: Path | Literal["none"]  # in use
    cipher: str | None  # of TLS, on it; None: data are not encrypted
    latency: float | None  # round trip on it, s, smoothed; None: not measured yet
    last_latency: float | None
    paths: list[PathState]  # best first
    addresses: list[str]
    tried: list[TriedAddress]
    asked: list[str]  # peers that were asked where a peer of this name is


class TensorInfo(TypedDict):
    """How moolink sees a tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    device: str
    read_only: bool
    address: int


class RoundPhases(TypedDict):
    """How long a round took at this peer, in seconds."""

    gather: float | None  # from this peer's last contribution to the cut; None: it made none
    reduce: float  # from the cut to the result
    deliver: float  # from the result to the update() that showed it


class GradientStats(TypedDict):
    """The statistics of a round of gradients; see ``Accumulator.get_gradient_stats``."""

    batch_size: int  # the sum over the contributions
    num_gradients: int
    num_skipped: int
    contributors: list[str]  # names of peers
    contributions: dict[str, int]  # with gradients, by the name of the peer
    staleness: list[int]  # of each contribution with gradients, in updates
    counters: dict[str, int]  # exact sums
    phase_seconds: RoundPhases
    waiting_for: list[str]  # now: peers that hold up the group
    lost: list[tuple[str, int]]  # contributions (peer, k) of dead peers that are in no round
    grad_norm: NotRequired[float | None]  # before max_grad_norm was applied
    skipped_rounds: NotRequired[int]
    skipped_contributions: NotRequired[int]


class ReplayTableStats(TypedDict):
    """A replay's table. Counts are of items since it was empty, or was reset."""

    size: int  # now
    inserts: int
    samples: int
    removals: int
    waiting_inserts: int  # now: requests
    waiting_samples: int  # now: requests


class ReplayStoreStats(TypedDict):
    """The memory of steps of one layout."""

    steps: int  # now: that items, writers or batches refer to
    step_bytes: int
    reserved_bytes: int
