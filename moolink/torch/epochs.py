"""The state of a group's epoch for sums by its communicator, and the futures of these sums."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from moolink._core import Future, LentSlot, Lock, call_later
from moolink.errors import GroupChanged, TimeoutError
from moolink.internal import deadlines
from moolink.internal.exceptions import copied
from moolink.torch.communicators import Communicator

View = tuple[int, tuple[str, ...]]  # epoch, and members by rank
KEPT_LOST = 1000  # lost parts that a member remembers; most are of operations that ended everywhere


class Promise:
    """A future for `GroupFuture`, which `DeviceSums` completes.

    Args:
        agreement: the operation's first step.
    """

    def __init__(self, agreement: Future) -> None:
        self.outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._agreement = agreement
        self._is_cancelled = False
        self._lock = Lock()
        self._last_step: Callable[[], bool] | None = None

    def result(self, timeout: float | None = None) -> Any:
        if not self.wait(timeout):
            raise TimeoutError(f"the sum has not ended within {timeout:g} s")
        if (error := self.outcome.exception()) is not None:
            raise copied(error)
        return self.outcome.result()

    def wait(self, timeout: float | None = None) -> bool:
        deadlines.check(timeout)
        with LentSlot():
            return bool(concurrent.futures.wait([self.outcome], timeout).done)

    def done(self) -> bool:
        return self.outcome.done()

    def exception(self) -> BaseException | None:
        error = self.outcome.exception() if self.done() else None
        return None if error is None else copied(error)

    def cancel(self) -> bool:
        """Makes the operation end at its next step, here and at the other members."""
        with self._lock:
            last_step = self._last_step
            if last_step is None:
                self._is_cancelled = not self.done()
        if last_step is not None:
            return last_step()
        self._agreement.cancel()
        return self._is_cancelled

    def begin_last_step(self, cancel: Callable[[], bool] = lambda: False) -> bool:
        """From now on, cancel() calls `cancel`. Returns whether cancel() was called before."""
        with self._lock:
            self._last_step = cancel
            return self._is_cancelled

    def add_done_callback(self, callback: Callable[[Promise], object]) -> None:
        self.outcome.add_done_callback(lambda _: call_later(0, lambda: callback(self)))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result_in_loop().__await__()

    async def _result_in_loop(self) -> Any:
        ended = asyncio.wrap_future(self.outcome)
        ended.add_done_callback(lambda over: over.cancelled() or over.exception())
        await asyncio.wait([ended])  # A cancelled task stops waiting; the operation continues.
        return self.result()


Part = tuple[int, int]  # a member's part in an operation: its rank, and its count of operations


class Operation:
    """A sum that this member has started."""

    def __init__(
        self, name: str, data: Any, op: str, place: Any, mark: Any, part: Part, agreement: Future
    ) -> None:
        self.name, self.data, self.op, self.place, self.mark = name, data, op, place, mark
        self.number = 0  # among the epoch's operations; the same at all members
        self.part = part
        self.parts: frozenset[Part] = frozenset()  # of all members, once they agree
        self.promise = Promise(agreement)


class Epoch:
    """The state of one view of the group.

    Attributes:
        deciding: held while this member asks the member of rank 0 for its decision.
        uses_communicator: the decision of the member of rank 0; None: not asked yet.
        communicator: None until rank 0 has decided for one.
    """

    def __init__(self, view: View, rank: int) -> None:
        self.view, self.rank = view, rank
        self.number, self.members = view
        self.deciding = Lock()
        self.uses_communicator: bool | None = None
        self.communicator: Communicator | None = None
        self.numbers, self.turns = itertools.count(1), itertools.count(1)  # used by rank 0
        self.parts = itertools.count(1)  # operations that this member has begun
        self._lock = Lock()
        self._is_over = False
        # Functions that cancel the operations that members have agreed on, by the members' parts.
        self._cancels: dict[frozenset[Part], Callable[[], object]] = {}
        # Parts that members have lost, before this member has agreed on their operations, if ever.
        self._lost: collections.deque[Part] = collections.deque(maxlen=KEPT_LOST)
        # Turns and their operations; (0, None): the communicator was aborted.
        self._agreed: queue.SimpleQueue[tuple[int, Callable[[], None] | None]] = queue.SimpleQueue()

    def is_ready(self) -> bool:
        """Whether the communicator can sum."""
        it = self.communicator
        return it is not None and it.ready and not it.broken

    def begin(self, communicator: Communicator) -> None:
        """Takes over a communicator and starts the thread that uses it until the epoch ends."""
        with self._lock:
            self.communicator = communicator
            if not self._is_over:
                threading.Thread(target=self._run, name="sums", daemon=True).start()
                return
        communicator.abort(over(self))

    def take_turn(self, turn: int, operation: Callable[[], None]) -> None:
        """Gives an operation to the thread of the epoch."""
        with self._lock:
            if not self._is_over:
                self._agreed.put((turn, operation))
                return
        raise over(self)

    def can_be_lost(self, parts: frozenset[Part], cancel: Callable[[], object]) -> None:
        """From now on, :meth:`lose` of one of the parts calls `cancel`."""
        with self._lock:
            is_lost = not parts.isdisjoint(self._lost)
            self._cancels[parts] = cancel
        if is_lost:
            cancel()

    def ended(self, parts: frozenset[Part]) -> None:
        with self._lock:
            self._cancels.pop(parts, None)

    def lose(self, part: Part) -> None:
        """A member has not learnt of an agreement, so it takes no part in the operation: cancels
        the operation here."""
        with self._lock:
            self._lost.append(part)
            found = [cancel for parts, cancel in self._cancels.items() if part in parts]
        for cancel in found:
            cancel()

    def abort(self, reason: BaseException) -> None:
        """Aborts the communicator. Operations that have turns still begin; their sums fail."""
        if self.communicator is not None:
            self.communicator.abort(reason)
            self._agreed.put((0, None))

    def end(self) -> None:
        """Aborts the communicator. The thread ends after its last operation."""
        with self._lock:
            self._is_over = True
        self.abort(over(self))

    def _run(self) -> None:
        """The epoch's thread: runs operations on the communicator, in rank 0's order."""
        waiting: dict[int, Callable[[], None]] = {}
        turn = 1
        while waiting or not self._is_over or not self._agreed.empty():
            number, operation = self._agreed.get()
            if operation is not None:
                waiting[number] = operation
            del operation  # an operation that has ended keeps no memory
            # A lost agreement leaves a gap. The communicator is broken then: any order will do.
            while waiting and (turn in waiting or not self.is_ready()):
                turn = min(waiting)
                waiting.pop(turn)()
                turn += 1

    def combine(self) -> Callable[[Any, Any], Any]:
        """The agreement's function, which runs at rank 0."""
        number: list[int] = []

        def join(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
            number.extend([] if number else [next(self.numbers)])
            same = a["ready"] and b["ready"] and a["what"] == b["what"]
            count = a.get("count", 1) + 1
            is_last = count == len(self.members)  # observers take no part
            turn = next(self.turns) if same and is_last else 0
            return {
                "ready": same,
                "what": a["what"],
                "count": count,
                "number": number[0],
                "turn": turn,
                "parts": [*a["parts"], *b["parts"]],
            }

        return join


def over(epoch: Epoch) -> GroupChanged:
    return GroupChanged(
        f"membership {epoch.number} of the group has ended, or its member of rank 0 is gone: "
        "call update(), then start the operation again"
    )
