"""InferenceServer: runs a model on batches of requests of many actors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink._core import Lock
from moolink.data.frameworks import as_numpy
from moolink.errors import TimeoutError
from moolink.inference import names
from moolink.inference.states import States
from moolink.internal import deadlines, forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics import sources
from moolink.metrics.sources import Value
from moolink.reports import InferenceServerStats
from moolink.rpc import naming, serving

if TYPE_CHECKING:
    from moolink.rpc import Rpc
    from moolink.weights import Subscriber, Weights

_LOOK = 0.2  # seconds between two looks at whether the server ends
# Two sizes for each power of two, so at most a third of a batch is padding.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True)
class InferenceBatch:
    """A model's input. Arrays have the requests' rows as their first dimension, filled up
    with zeros to the next bucket.

    Attributes:
        inputs: the requests' tree.
        first: bool [rows], whether an episode begins; the state is the initial one there.
        rows: how many of the rows are requests; the others are padding.
        state: the actors' recurrent states, or None.
        weights: the tree of the newest :class:`moolink.weights.Weights`, or None.
        version: their version, or 0.
    """

    inputs: Any
    first: npt.NDArray[np.bool_]
    rows: int
    state: Any
    weights: Any
    version: int


@names_keywords
class InferenceServer(Closing):
    """Serves :class:`InferenceClient` in dynamic batches: a batch has the requests that came while
    the one before it ran.

    Args:
        rpc: the peer that clients name among their `servers`.
        name: the served model's name.
        model: called with an :class:`InferenceBatch`, on a worker thread, one batch at a time.
            Returns a tree of arrays with the same rows; with `state`, a pair: that tree and the new
            state. Its exceptions are raised at the clients whose requests were in the batch.
        buckets: the numbers of rows that batches are filled up to, rising. A request has at most
            the largest number of rows.
        device: where inputs are put; any but "cpu" gives torch tensors.
        state: an actor's recurrent state when an episode begins: a tree of arrays without a batch
            dimension, of the framework and on the device that the model wants.
        max_actors: states that are kept; the least recently used makes room.
        weights: a subscriber, whose newest weights each batch gets. Until there are any, requests
            wait.

    Raises:
        TypeError: `rpc` is no Rpc, `name` no str, `model` not callable, or `state` no tree of
            arrays and numbers.
        ValueError: this peer serves the name already, or an argument is out of range.
    """

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        model: Callable[[InferenceBatch], Any],
        *,
        buckets: Iterable[int] = BUCKETS,
        device: str = "cpu",
        state: Any = None,
        max_actors: int = 4096,
        weights: Subscriber | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {model!r}")
        max_actors = integer_of(max_actors, "max_actors", least=1)
        self._rpc = serving.peer_of(rpc)
        self._name = serving.text_of(name, "name")
        self._model = model
        self._weights = weights
        self._states = None if state is None else States(state, max_actors)
        sizes = tuple(buckets)
        self._most_rows = max(sizes, default=0)
        self._clients: dict[str, int] = {}  # rows of each one's last request
        self._counts = {"batches": 0, "requests": 0, "rows": 0, "padding": 0}
        self._closed = False
        self._forked()
        with serving.only_one(f"an inference server of {name!r}"):
            rpc.define(names.LOAD.format(name), self._load)
        rpc.define(
            names.INFER.format(name),
            self._infer,
            dynamic_batching=True,
            mode="cat",
            bucket_sizes=sizes,
            device=device,
        )
        rpc.define(names.END.format(name), self._end)
        forks.changes_in_children(self)
        sources.add(self, rpc)

    def stats(self) -> InferenceServerStats:
        """Returns counts of batches, requests and clients, and the newest weights' version."""
        with self._lock:
            self._forget_the_dead()
            return {
                "batches": self._counts["batches"],
                "requests": self._counts["requests"],
                "rows": self._counts["rows"],
                "padding": self._counts["padding"],
                "clients": len(self._clients),
                "states": 0 if self._states is None else len(self._states),
                "version": None if self._weights is None else self._weights.version,
            }

    def _metrics(self) -> Iterator[Value]:
        stats, labels = self.stats(), {"name": self._name}
        yield "moolink_inference_batches_total", labels, stats["batches"]
        yield "moolink_inference_requests_total", labels, stats["requests"]
        yield "moolink_inference_rows_total", labels, stats["rows"]
        yield "moolink_inference_clients", labels, stats["clients"]

    def close(self) -> None:
        """Ends it, after the batch that runs; clients go to other servers."""
        if self._closed:
            return
        self._closed = True
        sources.remove(self)
        for function in (names.INFER, names.LOAD, names.END):
            serving.undefine(self._rpc, function.format(self._name))

    def __repr__(self) -> str:
        return f"<moolink.InferenceServer of {self._name!r}, {len(self._clients)} clients>"

    def _forked(self) -> None:
        self._lock = Lock()

    def _infer(
        self,
        inputs: Any,
        client: Sequence[str | None],
        row: Any,
        first: Any,
    ) -> dict[str, Any] | None:
        """The replies to a batch; None: this server ends, and clients go to others. One batch at a
        time; the lock is not held while the model runs."""
        first, row = _on_host(first), _on_host(row)
        rows = sum(name is not None for name in client)
        self._check(client, rows, row, first)
        weights = self._newest()
        if self._closed:
            return None
        version = 0 if weights is None else weights.version
        tree = None if weights is None else weights.tree
        with self._lock:
            slots, state = self._gather(client, row, first)
        outputs = self._model(InferenceBatch(inputs, first, rows, state, tree, version))
        with self._lock:
            if self._states is not None:
                if not isinstance(outputs, tuple | list) or len(outputs) != 2:
                    raise TypeError(
                        "with state=, a model must return a pair, outputs and the new state; it "
                        f"returned a {type(outputs).__qualname__}"
                    )
                outputs, new = outputs
                self._states.scatter(slots, new)
            self._count(client, row, rows)
        return {"outputs": outputs, "version": version}

    def _check(
        self,
        client: Sequence[str | None],
        rows: int,
        row: npt.NDArray[Any],
        first: npt.NDArray[Any],
    ) -> None:
        """Raises a TypeError or ValueError if a request has arguments that no client sends."""
        for name in client[: max(1, rows)]:  # padding is at the end, and is not all of a batch
            serving.text_of(name, "client")
        if row.ndim != 1 or row.dtype.kind not in "iu" or not _within(row, self._most_rows):
            raise ValueError(f"row must be integers from 0 to {self._most_rows - 1}, got {row}")
        if first.ndim != 1 or first.dtype != np.bool_:
            raise TypeError(f"first must be bool, one for each row, got {first}")

    def _newest(self) -> Weights | None:
        """The newest weights, once there are any; None: none are wanted, or this server ends."""
        if self._weights is None:
            return None
        wait = deadlines.Wait()
        while (weights := self._weights.latest()) is None and not self._closed:
            turn = wait.turn(
                f"the inference server of {self._name!r} waits for weights: "
                f"{self._weights.stats()['waiting_for']}"
            )
            with contextlib.suppress(TimeoutError):
                self._weights.wait(timeout=min(turn, _LOOK))
        return weights

    def _gather(
        self,
        client: Sequence[str | None],
        row: npt.NDArray[np.int64],
        first: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[np.int64], Any]:
        if self._states is None:
            return np.zeros(0, np.int64), None
        actors = [
            None if name is None else (name, number)
            for name, number in zip(client, row.tolist(), strict=True)
        ]
        slots = self._states.slots(actors)
        self._states.reset(slots[: len(first)][first])
        return slots, self._states.gather(slots)

    def _count(self, client: Sequence[str | None], row: npt.NDArray[np.int64], rows: int) -> None:
        requests = 0
        for name, number in zip(client, row.tolist(), strict=True):
            if name is not None:
                requests += number == 0
                if name not in self._clients:
                    self._forget_the_dead()
                self._clients[name] = max(number + 1, self._clients.get(name, 0))
        self._counts["batches"] += 1
        self._counts["requests"] += requests
        self._counts["rows"] += rows
        self._counts["padding"] += len(client) - rows

    def _forget_the_dead(self) -> None:
        """Clients whose peers are not connected; the caller holds the lock. Their states stay: they
        may be back, and a new client takes their room."""
        for client in naming.gone(self._rpc, self._clients):
            del self._clients[client]

    def _load(self) -> int:
        """Rows of all clients that live."""
        with self._lock:
            self._forget_the_dead()
            return sum(self._clients.values())

    def _end(self, client: str) -> None:
        serving.text_of(client, "client")
        with self._lock:
            self._clients.pop(client, None)
            if self._states is not None:
                self._states.forget(client)


def _within(numbers: npt.NDArray[Any], size: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < size)


def _on_host(array: Any) -> npt.NDArray[Any]:
    """A numpy array on the host; a tuple of values becomes an array of objects."""
    return np.array(array, object) if isinstance(array, tuple) else as_numpy(array)
