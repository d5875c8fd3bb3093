"""The base of subscribers: the thread that follows versions, and waiting for one."""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from moolink.errors import CancelledError, Closed, Error, NoSuchFunction
from moolink.internal import deadlines, forks, logs
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.locks import condition
from moolink.rpc import naming, serving
from moolink.rpc.peer_wait import PeerWait
from moolink.weights.blob import Arrays, FloatType
from moolink.weights.copies import Weights

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_TURN = 2.0  # seconds between two looks at whether the publisher is connected
_PAUSES = (0.05, 2.0)  # seconds between attempts: the first, the longest


class Following(Closing):
    """Has a current version, which a thread replaces by the next one when that is whole."""

    def __init__(
        self, rpc: Rpc, name: str, source: str, arrays: Arrays, dtype: FloatType | None
    ) -> None:
        """`source` names the publishers in messages; the others are as for `Subscriber`."""
        if dtype not in (None, "float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}")
        if arrays not in get_args(Arrays):
            raise ValueError(f"arrays must be one of {', '.join(get_args(Arrays))}, got {arrays!r}")
        self._rpc = serving.peer_of(rpc)
        self._name = serving.text_of(name, "name")
        self._source = source
        self._arrays: Arrays = arrays
        self._dtype = dtype or ""
        self._call: Future | None = None  # that the thread waits for
        self._reason = "nothing is published yet, or there is no connection or answer"
        self._away = deadlines.Wait()  # since a publisher was connected
        self._was_there = False
        self._closed = False
        self._forked()
        forks.changes_in_children(self)
        self._thread = threading.Thread(
            target=self._run, name=f"moolink-subscriber-{name}", daemon=True
        )

    @abc.abstractmethod
    def latest(self) -> Weights | None:
        """The current version, without waiting; None: there was none yet. The same object until
        the next version is whole."""

    @property
    def version(self) -> int | None:
        """The current version's number."""
        with self._changed:
            return self._current()

    def wait(self, min_version: int = 0, timeout: float | None = None) -> Weights:
        """Waits for a version of at least `min_version`, and returns the current one.

        Args:
            timeout: seconds to wait at most; None: as long as all publishers' peers are connected,
                and for the time limit of the `Rpc` once one is not.

        Raises:
            TimeoutError: there was none in time; the message says why.
            moolink.Closed: the subscriber or its peer was closed.
            TypeError, ValueError: `min_version` is no integer, or `timeout` no time limit.
        """
        min_version = integer_of(min_version, "min_version")
        wait = PeerWait(self._rpc, self._peers(), timeout, every=True)
        with self._changed:
            while (current := self._current()) is None or current < min_version:
                if self._closed:
                    raise Closed(f"the subscriber of {self._name!r} was closed")
                if wait.over:
                    has = "none" if current is None else f"version {current}"
                    wait.reason = f"there is {has}: {self._reason}"
                    raise wait.late(
                        f"no version {min_version} of {self._name!r} came from {self._source}"
                    )
                wait.for_change(
                    self._changed,
                    f"the subscriber of {self._name!r} waits for version {min_version} from "
                    f"{self._source}: {self._reason}",
                )
        weights = self.latest()
        assert weights is not None
        return weights

    def close(self) -> None:
        """Ends it. Trees that it has given out stay valid."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        self._thread.join()
        self._withdraw()

    @abc.abstractmethod
    def _peers(self) -> list[str]:
        """The publishers' peers."""

    def _withdraw(self) -> None:
        """Stops serving others."""

    def _forked(self) -> None:
        self._changed = condition()

    @abc.abstractmethod
    def _current(self) -> int | None:
        """The current version's number; the caller holds the lock."""

    @abc.abstractmethod
    def _follow_once(self) -> None:
        """Waits for the next version and fetches it."""

    # The thread

    def _run(self) -> None:
        pause = _PAUSES[0]
        try:
            while True:
                try:
                    self._follow_once()
                    pause = _PAUSES[0]
                except CancelledError:
                    pass  # by close()
                except Closed as closed:
                    self._reason = str(closed)
                    return
                except Exception as error:  # noqa: BLE001 - a peer may send anything
                    self._note(error)
                    self._pause(pause)
                    pause = min(2 * pause, _PAUSES[1])
                with self._changed:
                    if self._closed:
                        return
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self, call: Future, publisher: str, deadline: float | None = None) -> Any:
        """Waits for a publisher's next version; None: the deadline has passed."""
        with self._under_way(call):
            # In turns of which the log does not tell: there may be no newer version for long.
            while not call.wait(_turn(deadline)):
                if deadlines.left(deadline) == 0:
                    return None
                if naming.connected(self._rpc, [publisher]):
                    self._away, self._was_there = deadlines.Wait(), True
                else:
                    gone = ", which has gone: it takes the next one of this name"
                    unknown = ", which is not connected: is its name right?"
                    self._away.turn(
                        f"the subscriber of {self._name!r} waits for the peer "
                        f"{naming.quoted(publisher)}{gone if self._was_there else unknown}"
                    )
            try:
                version = call.result()
                self._was_there = True
                return version
            except NoSuchFunction:
                raise NoSuchFunction(
                    f"peer {naming.quoted(publisher)} has no publisher of {self._name!r}"
                ) from None

    def _result(self, future: Future, timeout: float | None = None) -> Any:
        """Waits for a call, which close() cancels."""
        with self._under_way(future):
            return future.result(timeout)

    @contextlib.contextmanager
    def _under_way(self, call: Future) -> Iterator[None]:
        with self._changed:
            self._call = call
            closed = self._closed
        if closed:
            call.cancel()
        try:
            yield
        finally:
            with self._changed:
                self._call = None

    def _note(self, error: Exception) -> None:
        self._reason = str(error) if isinstance(error, Error) else repr(error)
        level = logging.INFO if isinstance(error, Error) else logging.WARNING
        logs.logger.log(level, "subscriber of %r: %s", self._name, self._reason)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


def _turn(deadline: float | None) -> float:
    left = deadlines.left(deadline)
    return _TURN if left is None else min(_TURN, left)
