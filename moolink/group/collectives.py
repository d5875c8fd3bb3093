"""The collectives of a group: trees of arrays as flat parts, and back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moolink._core import Future, GroupCore, Lock, call_later
from moolink.data.trees import Leaf, Structure, flatten, layout, overlap, unflatten
from moolink.errors import CancelledError, Error
from moolink.internal import deadlines
from moolink.internal.countdown import after_all
from moolink.internal.keywords import names_keywords

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter"]

# Trees that are stacked along a new first axis, an entry for each member.
STACKED_RESULT = {"all_gather", "gather"}


@names_keywords
class GroupFuture:
    """The future of a collective of :class:`moolink.Group`, such as ``all_reduce``.

    The result may be read as often as wanted and awaited by many.
    """

    def __init__(self, futures: list[Future], finish: Callable[[list[Any]], Any]) -> None:
        self._futures = futures
        self._finish = finish
        self._lock = Lock()
        self._finished = self._finishing = False
        self._watched = len(futures) == 1
        self._value: Any = None

    def __repr__(self) -> str:
        return f"<moolink.group.GroupFuture of {', '.join(map(repr, self._futures))}>"

    def _take(self, results: list[Any]) -> Any:
        with self._lock:
            if self._finishing:
                raise Error(f"the result of {self!r} is being made, and its making asks for it")
            if not self._finished:
                self._finishing = True
                try:
                    self._value = self._finish(results)
                finally:
                    self._finishing = False
                self._finished = True
        return self._value

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result, waiting for it.

        Args:
            timeout: seconds to wait; ``None`` waits until the operation itself ends.

        Raises:
            moolink.GroupChanged: the members changed before all had the result.
            moolink.TimeoutError: not ended within ``timeout``.
            moolink.RemoteError: the Python operation raised at the peer of rank 0.
            moolink.Error: the members' data differ in structure, shapes, dtypes, op or root.
        """
        if self._finished:
            return self._value
        if len(self._futures) == 1:
            return self._take([self._futures[0].result(timeout)])
        deadline = deadlines.after(timeout)
        self._end_with_the_first_that_fails()
        try:
            results = [future.result(deadlines.left(deadline)) for future in self._futures]
        except Error as error:
            raise (self.exception() or error) from None
        return self._take(results)

    def _end_with_the_first_that_fails(self) -> None:
        """Cancels all parts when one fails: without it there is no result."""
        with self._lock:
            if self._watched:
                return
            self._watched = True
        for future in self._futures:
            if not future.done():
                future.add_done_callback(self._part_ended)
            else:
                self._part_ended(future)

    def _part_ended(self, part: Future) -> None:
        if part.exception() is not None:
            self.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the operation, good or bad; returns whether it came in time."""
        deadline = deadlines.after(timeout)
        self._end_with_the_first_that_fails()
        over = all(future.wait(deadlines.left(deadline)) for future in self._futures)
        return over and self.done()

    def done(self) -> bool:
        """Whether the operation has ended; its outputs are written then."""
        over = all(future.done() for future in self._futures)
        if over and not self._finished and self.exception() is None:
            self.result()  # writes the results into their places
        return over

    def exception(self) -> BaseException | None:
        """Returns the error, or ``None``."""
        errors = [e for f in self._futures if (e := f.exception()) is not None]
        # Parts that were cancelled because another one had failed do not say why.
        causes = [error for error in errors if not isinstance(error, CancelledError)]
        return next(iter(causes or errors), None)

    def cancel(self) -> bool:
        """Gives the operation up, here and at the other members that have not ended it. Returns
        False if it has ended."""
        cancelled = [future.cancel() for future in self._futures]
        return any(cancelled)

    def add_done_callback(self, callback: Callable[[GroupFuture], object]) -> None:
        """Calls ``callback(future)`` on a worker thread once the operation has ended, good or
        bad; its outputs are written then."""
        self._end_with_the_first_that_fails()

        def ended() -> None:
            self.done()  # writes the results into their places
            callback(self)

        if not self._futures:  # there was nothing to reduce
            call_later(0, ended)
        count_down = after_all(len(self._futures), ended)
        for future in self._futures:
            future.add_done_callback(lambda _: count_down())

    def __await__(self) -> Generator[Any, Any, Any]:
        self._end_with_the_first_that_fails()
        parts = []
        try:
            for future in self._futures:
                parts.append((yield from future.__await__()))
        except Error as error:
            raise (self.exception() or error) from None
        return self._take(parts)


@dataclass
class Collective:
    """One operation on a tree, as it is asked for.

    Args:
        members: how many there are; ``rank``: this one's place among them; ``root``: a rank.
        out: the tree that the result is written into, or ``None``.
    """

    core: GroupCore
    kind: Kind
    name: str
    members: int
    rank: int
    op: str = "sum"
    root: int = 0
    out: Any = None
    retry: bool = False
    compress: str | None = None

    def begin(self, data: Any) -> GroupFuture:
        """Checks everything, then starts one operation for the leaves of each dtype."""
        leaves, structure = flatten(data)
        blocks = [self._block(leaf) for leaf in leaves]
        by_dtype: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_dtype.setdefault(leaf.dtype, []).append(index)
        if self.retry and len(by_dtype) > 1:
            raise ValueError(
                f"{self.kind} '{self.name}': data has elements of {', '.join(by_dtype)}, which go "
                "in one operation each; retries of several could end among different members. "
                'Use one call for each dtype, or one dtype, or on_change="raise"'
            )
        if self.kind in ("all_reduce", "reduce_scatter"):
            for dtype in by_dtype:
                self.core.check_reduction(self.op, dtype)
        targets = self.targets(data, leaves, blocks)
        # The layout that all members must have; without this member's own, such as a root's input.
        what = layout(leaves, blocks)
        futures, parts = [], []
        for number, (dtype, indices) in enumerate(by_dtype.items()):
            part = self.name if number == 0 else f"{self.name}, part {number + 1}"
            future, place = self._start(part, dtype, what, indices, leaves, blocks, targets)
            futures.append(future)
            parts.append((indices, place))

        def finish(results: list[Any]) -> Any:
            return self._finish(leaves, structure, blocks, targets, parts, results)

        return GroupFuture(futures, finish)

    def _is_root(self) -> bool:
        return self.rank == self.root

    def _block(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of one member's input or result."""
        shape = leaf.array.shape
        if self.kind == "reduce_scatter":
            if not shape or shape[0] % self.members:
                raise ValueError(
                    f"{self.kind} '{self.name}': {leaf.path} has shape {shape}, whose first "
                    f"dimension does not divide among {self.members} members"
                )
            return (shape[0] // self.members, *shape[1:])
        if self.kind == "scatter" and self._is_root():
            if not shape or shape[0] != self.members:
                raise ValueError(
                    f"scatter '{self.name}': {leaf.path} has shape {shape}; the root's data has an "
                    f"entry for each of the {self.members} members along the first dimension"
                )
            return shape[1:]
        return shape

    def _result_shape(self, block: tuple[int, ...]) -> tuple[int, ...]:
        return (self.members, *block) if self.kind in STACKED_RESULT else block

    def _has_result(self) -> bool:
        return self.kind != "gather" or self._is_root()

    def _gives(self) -> bool:
        return self.kind not in ("broadcast", "scatter") or self._is_root()

    def targets(
        self, data: Any, leaves: list[Leaf], blocks: list[tuple[int, ...]]
    ) -> list[Leaf] | None:
        """Returns the leaves of `out`. Raises ValueError if the result cannot be written there."""
        if self.out is None or not self._has_result():
            return None
        # Arrays on a device are copied once.
        targets = leaves if self.out is data else flatten(self.out, "out", read=False)[0]
        if len(targets) != len(leaves):
            raise ValueError(
                f"{self.kind} '{self.name}': out has {len(targets)} leaves, data {len(leaves)}"
            )
        for leaf, block, target in zip(leaves, blocks, targets, strict=True):
            shape = self._result_shape(block)
            if (target.array.shape, target.dtype) != (shape, leaf.dtype):
                raise ValueError(
                    f"{self.kind} '{self.name}': {target.path} is {target.dtype} "
                    f"{target.array.shape}, the result is {leaf.dtype} {shape}"
                )
            if not target.writable():
                raise ValueError(f"{self.kind} '{self.name}': {target.path} cannot be written")
        if both := overlap(leaves, targets):
            raise ValueError(
                f"{self.kind} '{self.name}': {both[0].path} and {both[1].path} overlap in memory; "
                "the result must be put where its data is (inplace) or where no data is"
            )
        return targets

    def _start(
        self,
        name: str,
        dtype: str,
        what: str,
        indices: list[int],
        leaves: list[Leaf],
        blocks: list[tuple[int, ...]],
        targets: list[Leaf] | None,
    ) -> tuple[Future, npt.NDArray[Any] | None]:
        """Returns the future, and the user's array if the result is written straight into it."""
        place = None
        # A retry needs the input as it was, and a result that ends may be begun again elsewhere.
        if targets is not None and len(indices) == 1 and not self.retry:
            array = targets[indices[0]].array
            place = array.reshape(-1) if array.flags.c_contiguous else None
        count = sum(_size(blocks[i]) for i in indices)
        flat = self._flat([leaves[i].array for i in indices])
        future = self.core.collective(
            name,
            self.kind,
            self.root,
            self.op,
            dtype,
            what,
            count,
            flat,
            place,
            self.retry,
            self.compress if self.compress is not None and dtype == "float32" else "none",
        )
        return future, place

    def _flat(self, arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """This member's input as one flat array; the user's own memory where that is possible."""
        if not self._gives():
            return np.empty(0, arrays[0].dtype)
        if len(arrays) == 1:
            return arrays[0]
        rows = self.members if self.kind in ("reduce_scatter", "scatter") else 1
        parts = [array.reshape(rows, -1) for array in arrays]
        width = sum(part.shape[1] for part in parts)
        memory = self.core.memory(rows * width * parts[0].itemsize)
        flat = memory.view(parts[0].dtype).reshape(rows, width)
        np.concatenate(parts, axis=1, out=flat)
        return flat.reshape(-1)

    def _finish(
        self,
        leaves: list[Leaf],
        structure: Structure,
        blocks: list[tuple[int, ...]],
        targets: list[Leaf] | None,
        parts: list[tuple[list[int], npt.NDArray[Any] | None]],
        results: list[Any],
    ) -> Any:
        if not self._has_result():
            return None
        arrays: list[Any] = [None] * len(leaves)
        for (indices, place), result in zip(parts, results, strict=True):
            if place is not None:
                continue
            for i, array in self._split(indices, blocks, result):
                arrays[i] = array
        if targets is None:
            restored = [leaf.restore(array) for leaf, array in zip(leaves, arrays, strict=True)]
            return unflatten(structure, restored)
        for target, array in zip(targets, arrays, strict=True):
            target.write(array)
        return self.out

    def _split(
        self, indices: list[int], blocks: list[tuple[int, ...]], flat: npt.NDArray[Any]
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        if len(indices) == 1:
            yield indices[0], flat.reshape(self._result_shape(blocks[indices[0]]))
            return
        rows = self.members if self.kind in STACKED_RESULT else 1
        table = flat.reshape(rows, -1)
        begin = 0
        for i in indices:
            end = begin + _size(blocks[i])
            yield i, table[:, begin:end].reshape(self._result_shape(blocks[i]))
            begin = end


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    return count
