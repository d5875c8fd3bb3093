"""ReplayClient: the tables of a replay that another process serves."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink.data import skeletons
from moolink.errors import Error, NoSuchFunction, PeerLost, QueueFull, TimeoutError
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.replay import array_conversion, names
from moolink.replay.array_conversion import Arrays
from moolink.replay.batch import Batch, Batches
from moolink.replay.layout import floats_of, keys_of, priorities_of
from moolink.replay.options import Table
from moolink.replay.reading import Items
from moolink.replay.remote_steps import RemoteSteps
from moolink.replay.tables import Stop, late
from moolink.replay.writer import Writer
from moolink.reports import ReplayServerStats
from moolink.rpc import naming, serving
from moolink.rpc.peer_wait import PeerWait

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_PAUSE = 0.1  # seconds before a server that is lost is asked again
_GRACE = 2.0  # seconds that a call may take beyond the time for which the server waits
_CONNECTING = 1.0  # seconds that a connection may take, however short the time limit
_LOOK = 0.2  # seconds between two looks at whether a batch is still wanted


@dataclasses.dataclass
class _Sampled:
    """The server's reply to SAMPLE."""

    arrays: list[Any]
    skeleton: Any
    framework: str
    table: str
    keys: Any
    probabilities: Any
    priorities: Any
    times_sampled: Any


@names_keywords
class ReplayClient:
    """Uses a replay that a :class:`ReplayServer` serves, with the methods of :class:`Replay`, but
    for checkpoints.

    On the server's host, batches of numpy's and JAX's arrays are mapped, not copied, and cannot be
    written. While the server is away, `sample`, `batches` and writers wait for one in its place:
    until their time limit, or without one for the time limit of `rpc`. `insert`,
    `extend` and the others raise `PeerLost` if the server ends during the call, and `TimeoutError`
    if it is away.

    Args:
        rpc: this peer, connected to the server or to a peer that knows it.
        name: the replay's name at the server.
        server: the server's peer.
        arrays: the batches' framework: "numpy", "torch", "jax", or "same": that of the table's
            first item.
    """

    def __init__(
        self, rpc: Rpc, name: str = "replay", *, server: str, arrays: Arrays = "same"
    ) -> None:
        self._rpc = serving.peer_of(rpc)
        self._server = serving.text_of(server, "server")
        self._name = serving.text_of(name, "name")
        self._arrays = array_conversion.kind_of(arrays)
        self._frameworks: dict[str | None, str] = {}  # of each table's items

    def insert(
        self,
        item: Any,
        priority: float = 1.0,
        *,
        table: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """As :meth:`Replay.insert`."""
        leaves, skeleton = skeletons.flatten(item)
        arrays = [array[None] for array in skeletons.arrays_of(leaves, skeleton)]
        return int(
            self.extend(
                skeletons.unflatten(skeleton, arrays), priority, table=table, timeout=timeout
            )[0]
        )

    def extend(
        self,
        items: Any,
        priorities: npt.ArrayLike = 1.0,
        *,
        table: str | None = None,
        timeout: float | None = None,
    ) -> npt.NDArray[np.int64]:
        """As :meth:`Replay.extend`. While items wait for limiter and room, those that are not in
        are sent again every 5 s."""
        leaves, skeleton = skeletons.flatten(items)
        arrays = skeletons.arrays_of(leaves, skeleton)
        if not arrays or any(not array.shape for array in arrays):
            raise ValueError("all arrays must have the items as their first dimension")
        count = len(arrays[0])
        of_each = priorities_of(count, priorities)
        keys: list[npt.NDArray[np.int64]] = []
        done = 0
        wait = self._wait(timeout)
        while True:
            rest = skeletons.unflatten(skeleton, [array[done:] for array in arrays])
            left = _turn(wait)
            call = self._begin(names.EXTEND, wait, table, rest, of_each[done:], left)
            try:
                keys.append(self._answer(call, wait, None))
            except TimeoutError as error:
                wait.failed(error)
                raise self._no_answer(wait) from None
            wait.answered()
            done += len(keys[-1])
            if done == count:
                return np.concatenate(keys)
            if wait.over:
                break
        raise self._late("insert", table, timeout, f"; {done} of {count} items are in")

    def sample(
        self,
        batch_size: int,
        *,
        table: str | None = None,
        timeout: float | None = None,
        device: Any = None,
    ) -> Batch:
        """As :meth:`Replay.sample`."""
        batch = self._sample(
            integer_of(batch_size, "batch_size", least=1), table, timeout, device, None
        )
        if batch is None:
            raise self._late("sample", table, timeout)
        return batch

    def batches(
        self,
        batch_size: int,
        *,
        table: str | None = None,
        prefetch: int = 2,
        device: Any = None,
    ) -> Batches:
        """As :meth:`Replay.batches`."""
        size = integer_of(batch_size, "batch_size", least=1)
        return Batches(lambda stop: self._sample(size, table, None, device, stop), prefetch)

    def update_priorities(
        self, keys: npt.ArrayLike, priorities: npt.ArrayLike, *, table: str | None = None
    ) -> int:
        """As :meth:`Replay.update_priorities`."""
        of_each = floats_of(priorities)
        return int(self._call(names.UPDATE, table, keys_of(keys), of_each))

    def remove(self, keys: npt.ArrayLike, *, table: str | None = None) -> int:
        """As :meth:`Replay.remove`."""
        return int(self._call(names.REMOVE, table, keys_of(keys)))

    def reset(self, *, table: str | None = None) -> None:
        """As :meth:`Replay.reset`."""
        self._call(names.RESET, table)

    def tables(self) -> list[Table]:
        """As :meth:`Replay.tables`."""
        return [Table.described(options) for options in self._call(names.DESCRIBE)]

    def writer(self, keep: int, *, chunk: int = 16) -> Writer:
        """As :meth:`Replay.writer`. Steps are sent once, several at a time, and items refer to
        them.

        Args:
            keep: as for :meth:`Replay.writer`.
            chunk: steps that may wait here while those before are on their way, at least 1.

        Raises:
            TypeError, ValueError: `keep` or `chunk` is not an integer, or below 1.
        """
        chunk = integer_of(chunk, "chunk", least=1)
        steps = functools.partial(RemoteSteps, self._rpc, self._server, self._name, chunk)
        return Writer(steps, keep)

    def stats(self) -> ReplayServerStats:
        """As :meth:`ReplayServer.stats`."""
        stats: ReplayServerStats = self._call(names.STATS)
        return stats

    def __repr__(self) -> str:
        return f"<moolink.ReplayClient of {self._name!r} at {naming.quoted(self._server)}>"

    def _items(
        self, keys: npt.NDArray[np.int64] | None, table: str | None
    ) -> tuple[npt.NDArray[np.int64], Items]:
        there, items = self._call(names.ITEMS, table, keys)
        return np.asarray(there), Items(*items)

    def _call(self, function: str, *args: Any) -> Any:
        return self._rpc.sync(self._server, function.format(self._name), *args)

    def _sample(
        self,
        count: int,
        table: str | None,
        timeout: float | None,
        device: Any,
        stop: Stop | None,
    ) -> Batch | None:
        """None: the time is up, or `stop` returned True. A server grants a batch in several turns
        where the limiter does; those are joined."""
        parts: list[_Sampled] = []
        wait = self._wait(timeout)
        while True:
            wanted = count - sum(len(part.keys) for part in parts)
            call = self._begin(names.SAMPLE, wait, table, wanted, _turn(wait), self._maps(table))
            lost: Error | None = None
            try:
                sampled = self._answer(call, wait, stop)
            except (PeerLost, NoSuchFunction, TimeoutError) as error:
                lost = error
                wait.failed(error)
                time.sleep(_PAUSE)
            else:
                wait.answered()
                if sampled is not None:
                    parts.append(_Sampled(*sampled))
                    self._frameworks[table] = parts[0].framework
            wait.turn(
                f"a client of the replay {self._name!r} waits for {wanted} items of "
                f"{naming.quoted(self._server)}: {lost or 'its limiter grants none'}"
            )
            if stop is not None and stop():
                return None
            if sum(len(part.keys) for part in parts) == count or wait.over:
                break
        if parts:
            return self._batch(parts, device)
        if lost is not None:
            raise self._no_answer(wait)
        return None

    def _no_answer(self, wait: PeerWait) -> TimeoutError:
        server = naming.quoted(self._server)
        return wait.late(f"the replay {self._name!r} at {server} did not answer")

    def _wait(self, timeout: float | None) -> PeerWait:
        return PeerWait(self._rpc, [self._server], timeout)

    def _begin(self, function: str, wait: PeerWait, *args: Any) -> Future:
        """Calls a function in which the server waits for one turn."""
        limit = _turn(wait) + (_GRACE if wait.timed else self._rpc.get_timeout())
        return self._rpc.within(limit).async_(self._server, function.format(self._name), *args)

    def _answer(self, call: Future, wait: PeerWait, stop: Stop | None) -> Any:
        """The server's answer; None: `stop` ended it. A server that is there answers soon after
        the time is up.

        Raises:
            TimeoutError: the time is up, and the server is not connected.
        """
        begun = time.monotonic()
        try:
            while not call.wait(_LOOK if wait.over else min(_LOOK, _turn(wait))):
                if stop is not None and stop():
                    return None
                if wait.over and time.monotonic() >= begun + _CONNECTING and not wait.connected():
                    raise TimeoutError(f"{naming.quoted(self._server)} is not connected")
            return call.result()
        finally:
            call.cancel()

    def _maps(self, table: str | None) -> bool:
        """Whether arrays that cannot be written will do: not for torch's, which could be."""
        kind = self._frameworks.get(table) if self._arrays == "same" else self._arrays
        return kind in ("numpy", "jax")

    def _batch(self, parts: list[_Sampled], device: Any) -> Batch:
        first = parts[0]
        kind = first.framework if self._arrays == "same" else self._arrays
        columns = zip(*(part.arrays for part in parts), strict=True)
        arrays = array_conversion.convert([_joined(column) for column in columns], kind, device)
        return Batch(
            skeletons.unflatten(first.skeleton, arrays),
            _joined([part.keys for part in parts]),
            _joined([part.probabilities for part in parts]),
            _joined([part.priorities for part in parts]),
            _joined([part.times_sampled for part in parts]),
            first.table,
        )

    def _late(
        self, what: str, table: str | None, timeout: float | None, more: str = ""
    ) -> QueueFull | TimeoutError:
        tables = self.stats()["tables"]
        name = table if table in tables else next(iter(tables))
        place = f"table {name!r} at {naming.quoted(self._server)}"
        return late(what, place, tables[name], timeout, more)


def _joined(parts: Sequence[Any]) -> npt.NDArray[Any]:
    arrays = [np.asarray(part) for part in parts]  # of another framework: Rpc(arrays=)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _turn(wait: PeerWait) -> float:
    """The seconds of the next turn of a wait."""
    return names.TURN if wait.left is None else min(names.TURN, wait.left)
