"""Writers: steps are appended one by one, and items are made of the last of them."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from moolink.data import nodes, skeletons
from moolink.data.skeletons import Skeleton
from moolink.internal import deadlines
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords


@dataclasses.dataclass(frozen=True)
class Item:
    """How an item is made of `width` steps: its tree, and for each of its arrays (column, first
    step, number of steps, 0 for one step without a dimension of steps)."""

    skeleton: Skeleton
    width: int
    pieces: list[tuple[int, int, int]]


class Steps(abc.ABC):
    """Where a writer's steps are: the replay's own memory, or on the way to its server."""

    skeleton: Skeleton
    columns: list[tuple[str, str, tuple[int, ...]]]
    oldest: int  # the number of the oldest step that is kept; the writer's first one has 0

    @property
    @abc.abstractmethod
    def end(self) -> int:
        """The number of the next step."""

    @abc.abstractmethod
    def append(self, step: Any) -> None:
        """Copies a step."""

    @abc.abstractmethod
    def forget(self, first: int) -> None:
        """Makes `first` the oldest step: no item will be made of those before it."""

    @abc.abstractmethod
    def insert(
        self, item: Item, first: int, priority: float, table: str | None, timeout: float | None
    ) -> int | None:
        """Inserts an item of the steps from number `first` on. Returns its key where it is known
        at once."""

    def flush(self, timeout: float | None = None) -> None:
        """Waits until the inserted items are in the table."""
        deadlines.check(timeout)

    def close(self) -> None:
        """The writer has ended."""
        return None


@nodes.leaf
@dataclasses.dataclass(slots=True)
class Part:
    """One array of a writer's steps, in one step or several: a part of an item."""

    column: int
    first: int  # counted from the writer's first step
    count: int  # 0: one step, without a dimension of steps


class Column:
    """One array of all steps of the episode; an index or a slice of it is a part of an item."""

    def __init__(self, writer: Writer, column: int) -> None:
        self._writer = writer
        self._column = column

    def __getitem__(self, index: int | slice) -> Part:
        steps = self._writer.steps_at(index)
        if isinstance(steps, int):
            return Part(self._column, steps, 0)
        return Part(self._column, steps.start, len(steps))


@names_keywords
class Writer:
    """Appends the steps of an episode, and makes items of them. Items that overlap share their
    steps. For one thread; made by `writer(keep)` of a replay or of its client.

    A step is a tree of arrays, which are copied; all steps of a writer are alike. `create_item`
    takes a tree of parts of `history`, which has the step's tree:

        writer.append({"obs": obs, "action": action, "reward": reward})
        history = writer.history
        writer.create_item({"obs": history["obs"][-4:], "action": history["action"][-1]})

    `history["obs"][-4:]` is an array of the last four steps, `[-1]` the array of the last one.
    """

    def __init__(self, steps: Callable[[Any], Steps], keep: int) -> None:
        self._open = steps
        self._keep = integer_of(keep, "keep", least=1)
        self._steps: Steps | None = None
        self._history: Any = None
        self._begin = 0  # of the episode
        self._item = Item((), 0, [])  # the layout of the last item

    def append(self, step: Any) -> None:
        """Copies a step: a tree of arrays.

        Raises:
            TypeError, ValueError: it differs from the writer's first one.
            TimeoutError: over a network, as :meth:`flush` without a time limit.
        """
        if self._steps is None:
            self._steps = self._open(step)
            columns = [Column(self, i) for i in range(len(self._steps.columns))]
            self._history = skeletons.unflatten(self._steps.skeleton, columns)
        self._steps.append(step)
        self._forget(self._steps.end - self._keep)

    @property
    def history(self) -> Any:
        """The step's tree, with a Column in each array's place.

        Raises:
            ValueError: no step was appended yet.
        """
        if self._history is None:
            raise ValueError("a writer has no history before its first step")
        return self._history

    def __len__(self) -> int:
        """Steps of the episode."""
        return self._end - self._begin

    def create_item(
        self,
        parts: Any,
        priority: float = 1.0,
        *,
        table: str | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Inserts an item: a tree of parts of `history`.

        Args:
            priority: finite and not negative.
            timeout: seconds to wait for limiter and room, 0: do not wait, None: for ever. Over a
                network a writer waits for the items before this one: not at all for 0, and for
                None as long as :meth:`flush`.

        Returns:
            The item's key; None: over a network, where it is not known yet.

        Raises:
            QueueFull, TimeoutError: it was not inserted in time.
            ValueError: a step is not kept any more, or the table has items of another layout.
        """
        skeleton = self._item.skeleton
        leaves = skeletons.leaves_like(parts, skeleton)
        if leaves is None:
            leaves, skeleton = skeletons.flatten(parts)
        steps = self._steps
        if not leaves or steps is None:
            raise ValueError("an item is made of at least one array")
        first, end = steps.end, 0
        for part in leaves:
            if not isinstance(part, Part):
                raise TypeError(
                    f"an item is made of parts of a history, not of a {type(part).__name__}"
                )
            first = min(first, part.first)
            end = max(end, part.first + (part.count or 1))
        if first < steps.oldest:
            raise ValueError(
                f"the item needs the last {steps.end - first} steps, and the writer keeps "
                f"{self._keep}: make it with a larger `keep`"
            )
        pieces = [(part.column, part.first - first, part.count) for part in leaves]
        if skeleton is not self._item.skeleton or pieces != self._item.pieces:
            self._item = Item(skeleton, end - first, pieces)
        return steps.insert(self._item, first, priority, table, timeout)

    def end_episode(self) -> None:
        """No later item reaches back beyond here."""
        self._begin = self._end
        self._forget(self._end)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all items are in their tables; over a network, raises an earlier error.

        Args:
            timeout: seconds to wait at most; None: over a network, as long as the server is there,
                and for the time limit of the `Rpc` once it is not.

        Raises:
            TimeoutError: some were not delivered in time; the message gives their number. They
                are kept, and sent once the server is back.
        """
        if self._steps is None:
            deadlines.check(timeout)
        else:
            self._steps.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flushes, and gives up the steps that no item refers to. A `with` statement that an
        exception ends does not flush.

        Args:
            timeout: as for :meth:`flush`.

        Raises:
            TimeoutError: as :meth:`flush`; the writer is not closed then.
        """
        self.flush(timeout)
        self._abandon()

    def _abandon(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self.end_episode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def steps_at(self, index: int | slice) -> int | range:
        """Which steps an index of the episode means, counted from the writer's first step."""
        if not isinstance(index, slice):
            step = operator.index(index) + (self._end if index < 0 else self._begin)
            if not self._begin <= step < self._end:
                raise IndexError(f"step {index} of an episode that has {len(self)} steps")
            return step
        episode = range(self._begin, self._end)
        if index.step not in (None, 1):
            raise ValueError("an item's steps follow one another: a slice has no step")
        steps = episode[index]
        if not steps:
            raise ValueError("an item has at least one step")
        return steps

    @property
    def _end(self) -> int:
        return 0 if self._steps is None else self._steps.end

    def _forget(self, first: int) -> None:
        if self._steps is not None and first > self._steps.oldest:
            self._steps.forget(first)
