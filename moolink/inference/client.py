"""InferenceClient: an actor's side."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink.data import skeletons
from moolink.errors import Closed, Error, NoSuchFunction, PeerLost, TimeoutError
from moolink.inference import names
from moolink.internal import deadlines, logs
from moolink.internal.closing import Closing
from moolink.internal.keywords import names_keywords
from moolink.rpc import naming, serving
from moolink.rpc.peer_wait import PeerWait

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_LOAD_TIMEOUT = 1.0  # seconds to wait for a server's load
_PAUSE = 0.05  # seconds before servers that were lost, all of them, are asked again


@names_keywords
class InferenceClient(Closing):
    """Runs a model that one of several :class:`InferenceServer` serves.

    The client begins with the server that has the fewest rows to serve. When that server is lost,
    it goes to another. A client has at most one request under way: an actor that alternates
    between two halves of its environments has two clients. If the model is recurrent, the server
    keeps a state for each row of a client's requests, which is an environment; when a server is
    lost, states begin anew at the next one.

    Args:
        rpc: this peer, connected to the servers or to a peer that knows them.
        name: the served model's name.
        servers: the servers' peers.

    Raises:
        TypeError: `rpc` is no Rpc, or `name` no str.
        ValueError: no server is named.
    """

    def __init__(self, rpc: Rpc, name: str, servers: str | Sequence[str]) -> None:
        self._rpc = serving.peer_of(rpc)
        self._unlimited = self._rpc.within(None)
        self._name = serving.text_of(name, "name")
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        if not self._servers:
            raise ValueError("a client needs the name of at least one server")
        self._id = naming.make_id(rpc)
        self._function = names.INFER.format(name)
        self._row = np.arange(0)  # the numbers of a request's rows
        self._nowhere = np.zeros(0, bool)  # rows in which an episode begins: none
        self._server: str | None = None
        self._served = False  # by this server, at least once
        self._answers = len(self._servers) == 1  # or the server has told its load
        self._lost: set[str] = set()
        self._under_way = threading.Lock()
        self._moves = 0
        self.version = 0
        """The version of the weights that made the last outputs; 0: they are not versioned."""

    @property
    def server(self) -> str | None:
        """The peer that serves this client; None: it has made no request yet."""
        return self._server

    @property
    def moves(self) -> int:
        """How often a server was lost; recurrent states began anew then."""
        return self._moves

    def infer(
        self,
        inputs: Any,
        first: npt.ArrayLike | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Runs the model; returns its outputs, a tree of arrays with the same rows.

        Args:
            inputs: a tree of arrays with a row for each environment.
            first: bool [rows]: where an episode begins, so that the state is the initial one;
                default: nowhere.
            timeout: seconds to wait at most; None: as long as a server is there, and for the time
                limit of the `Rpc` once none is.

        Raises:
            TimeoutError: no server has answered in time.
            moolink.RemoteError: the model raised, or the inputs differ from others'.
            moolink.Closed: this peer was closed.
        """
        return self.request(inputs, first).result(timeout)

    def request(self, inputs: Any, first: npt.ArrayLike | None = None) -> InferenceRequest:
        """As infer, but returns at once; `result()` of the request waits for the outputs. The
        inputs must not change until then: they are sent again if the server is lost.

        Raises:
            ValueError: the request before has not been waited for, or inputs have no rows.
        """
        rows = _rows_of(inputs)
        of_each = None if first is None else np.array(first, bool)
        if of_each is not None and of_each.shape != (rows,):
            raise ValueError(f"first has shape {of_each.shape}, and there are {rows} rows")
        if not self._under_way.acquire(blocking=False):
            raise ValueError("a client has one request under way: take its result first")
        try:
            if len(self._row) != rows:
                self._row, self._nowhere = np.arange(rows), np.zeros(rows, bool)
            return InferenceRequest(self, inputs, self._nowhere if of_each is None else of_each)
        except BaseException:
            self._under_way.release()
            raise

    def close(self) -> None:
        """Tells the server, which forgets this client's states."""
        if self._server is not None:
            with contextlib.suppress(Error):
                self._rpc.async_(self._server, names.END.format(self._name), self._id)
            self._server = None

    # For requests.

    def _send(self, inputs: Any, first: npt.NDArray[np.bool_]) -> Future:
        if self._server is None:
            self._server = self._choose()
        # A server answers once it has weights, however long that takes; one that may not be there
        # makes way for another.
        calls = self._unlimited if self._answers else self._rpc.within(self._rpc.get_timeout())
        return calls.async_(self._server, self._function, inputs, self._id, self._row, first)

    def _lose(self, why: str) -> None:
        assert self._server is not None
        if self._served:
            logs.logger.warning("inference server %s is lost: %s", naming.quoted(self._server), why)
            self._moves += 1
        self._lost.add(self._server)
        self._server = None
        self._served = False

    def _choose(self) -> str:
        """The server with the fewest rows; one that was lost only if there is no other."""
        candidates = [one for one in self._servers if one not in self._lost]
        if not candidates:
            time.sleep(_PAUSE)
            self._lost.clear()
            candidates = self._servers
        self._answers = len(self._servers) == 1
        if len(candidates) == 1:
            return candidates[0]
        asked = self._rpc.async_many(candidates, names.LOAD.format(self._name))
        deadline = deadlines.after(_LOAD_TIMEOUT)
        loads: dict[str, int] = {}
        for server, future in asked.items():
            try:
                loads[server] = future.result(deadlines.left(deadline))
            except Closed:
                raise
            except Error as error:
                future.cancel()
                logs.logger.info(
                    "inference server %s tells no load: %s", naming.quoted(server), error
                )
        self._answers = bool(loads)
        return min(loads, key=loads.__getitem__) if loads else candidates[0]


class InferenceRequest:
    """A request under way; see :meth:`InferenceClient.request`."""

    def __init__(self, client: InferenceClient, inputs: Any, first: npt.NDArray[np.bool_]) -> None:
        self._done = True
        self._client = client
        self._inputs = inputs
        self._first = first
        self._call = client._send(inputs, first)
        self._done = False

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the outputs, once. After a time-out the request is given up.

        Raises:
            as :meth:`InferenceClient.infer`.
        """
        if self._done:
            raise ValueError("the result of this request was taken")
        wait = PeerWait(self._client._rpc, self._client._servers, timeout)
        waits = f"a client of inference server {self._client._name!r} waits"
        try:
            while True:
                why = wait.reason
                if wait.for_call(self._call, f"{waits}: {why}" if why else waits):
                    try:
                        reply = self._call.result()
                        if reply is not None:
                            break
                        wait.failed("the server was closed")
                    except (PeerLost, NoSuchFunction, TimeoutError) as error:
                        wait.failed(error)
                if wait.over:
                    raise wait.late(f"no server of {self._client._name!r} has answered")
                self._client._lose(wait.reason)
                self._call = self._client._send(self._inputs, self._first)
        finally:
            self._give_up()
        self._client._served = True
        self._client.version = reply["version"]
        return reply["outputs"]

    def _give_up(self) -> None:
        self._done = True
        self._call.cancel()
        self._client._under_way.release()

    def __del__(self) -> None:
        if not self._done:
            self._give_up()


def _rows_of(inputs: Any) -> int:
    if isinstance(inputs, np.ndarray) and inputs.ndim > 0:
        return len(inputs)
    leaves, _ = skeletons.flatten(inputs)
    shapes = {tuple(leaf.shape)[:1] for leaf in leaves if hasattr(leaf, "shape")}
    if len(shapes) != 1 or () in shapes:
        raise ValueError("all inputs must be arrays with the same number of rows")
    return int(next(iter(shapes))[0])
