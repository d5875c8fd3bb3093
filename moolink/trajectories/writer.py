"""TrajectoryWriter: an actor's side."""

from __future__ import annotations

import collections
import contextlib
import time
from typing import TYPE_CHECKING, Any

from moolink.errors import Closed, NoSuchFunction, PeerLost
from moolink.internal import deadlines, logs
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.reports import TrajectoryWriterStats
from moolink.rpc import naming, serving
from moolink.rpc.peer_wait import PeerWait
from moolink.trajectories import names

if TYPE_CHECKING:
    from moolink._core import Future
    from moolink.rpc import Rpc

_PAUSE = 0.1  # seconds before the next item, where the learner has no such queue


@names_keywords
class TrajectoryWriter(Closing):
    """Puts items into a :class:`TrajectoryQueue` of another process. One thread may use it; another
    may call `close`, which ends the first one's waits with moolink.Closed.

    Args:
        rpc: this peer, connected to the learner or to a peer that knows it.
        name: the queue's name.
        learner: the learner's peer.
        ahead: items that may be on their way or wait for room before `put` waits.

    Raises:
        ValueError: `ahead` is below 1.
    """

    def __init__(self, rpc: Rpc, name: str, learner: str, *, ahead: int = 2) -> None:
        self._rpc = serving.peer_of(rpc)
        self._unlimited = self._rpc.within(None)
        self._function = names.PUT.format(serving.text_of(name, "name"))
        self._learner = serving.text_of(learner, "learner")
        self._ahead = integer_of(ahead, "ahead", least=1)
        self._pending: collections.deque[Future] = collections.deque()
        self._closed = False
        self._refused = deadlines.Wait()  # since an item was accepted
        self._stats: TrajectoryWriterStats = {"put": 0, "accepted": 0, "lost": 0}
        self.learner_version: int | None = None
        """The learner's version when it accepted the last item; None: it has accepted none."""

    def put(
        self, tree: Any, begin: int, end: int | None = None, timeout: float | None = None
    ) -> None:
        """Sends an item: a tree of arrays, which are captured. Waits while `ahead` items before it
        are not accepted: the queue is full.

        An item that is lost with a learner that dies, or that has no such queue yet, is counted
        (`stats()`), and no error: the next one goes to the learner that takes its place.

        Args:
            begin, end: the version of the weights at the item's first and last step; `end` is
                `begin` by default.
            timeout: seconds to wait at most; None: as long as the learner is there, and for the
                time limit of the `Rpc` once it is not.

        Raises:
            TimeoutError: the queue had no room in time; the item was not sent.
            moolink.RemoteError: an item before this one differs from the queue's first, or the
                queue was closed.
            moolink.Closed: this peer was closed.
            TypeError, ValueError: a version is no integer, or `end` is below `begin`.
        """
        begin, end = names.versions_of(begin, begin if end is None else end)
        self._wait_for(self._ahead - 1, timeout)
        # The queue answers once it has room, however long that takes.
        call = self._unlimited.async_(self._learner, self._function, tree, begin, end)
        self._pending.append(call)
        self._stats["put"] += 1
        if self._closed:  # by another thread, meanwhile
            self.close()

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the learner has accepted all items.

        Args:
            timeout: as for :meth:`put`.

        Raises:
            TimeoutError: some were not accepted in time; the message gives their number.
            moolink.RemoteError, moolink.Closed: as :meth:`put`.
        """
        self._wait_for(0, timeout)

    def stats(self) -> TrajectoryWriterStats:
        """Returns the counts of items that were put, accepted, and lost with a learner."""
        return self._stats.copy()

    def close(self) -> None:
        """Gives up the items that wait for room."""
        self._closed = True
        with contextlib.suppress(IndexError):  # put(), of another thread, takes them, too
            while True:
                self._pending.popleft().cancel()

    def _wait_for(self, left_over: int, timeout: float | None) -> None:
        """Waits until at most so many items are pending."""
        wait = PeerWait(self._rpc, [self._learner], timeout)
        learner = naming.quoted(self._learner)
        waits = f"a writer waits: {learner} is not reached, or its queue is full"
        while (call := self._oldest()) and (len(self._pending) > left_over or call.done()):
            if not wait.for_call(call, waits):
                count = len(self._pending)
                raise wait.late(
                    f"{learner} did not accept the oldest of {count} items that were put",
                    "it may be away, or its queue is full; flush() waits for it once more",
                )
            if not self._closed:
                self._pending.popleft()
                self._accept(call)
        if self._closed:
            raise Closed(f"the writer of {self._function!r} at {learner} was closed")

    def _oldest(self) -> Future | None:
        """The first item that is not accepted; None: there is none, or another thread has closed
        the writer."""
        try:
            return None if self._closed else self._pending[0]
        except IndexError:
            return None

    def _accept(self, call: Future) -> None:
        try:
            self.learner_version = call.result()
            self._stats["accepted"] += 1
            self._refused = deadlines.Wait()
        except Closed:
            raise
        except NoSuchFunction as lost:
            self._stats["lost"] += 1
            time.sleep(min(_PAUSE, self._refused.turn(f"items of a writer are lost: {lost}")))
        except PeerLost as lost:
            self._stats["lost"] += 1
            learner = naming.quoted(self._learner)
            logs.logger.warning("an item for %s is lost: %s", learner, lost)
