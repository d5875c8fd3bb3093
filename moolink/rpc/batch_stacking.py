"""The arguments of several calls as those of one, in memory that is used again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from moolink._core import Lock
from moolink.data import batch_layout, nodes
from moolink.data.batch_layout import Mode, Nest, Node, is_array
from moolink.rpc.batch_replies import BatchReturn, BatchRules, Return

_MOST_EMPTY_ROWS = 1 << 16  # of a call; they cost it nothing, and the batch much


class Call(NamedTuple):
    """A call, or a batch of calls: answer with ``reply(value)`` or ``reply.error(exception)``."""

    reply: Return
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Misfit(ValueError):
    """A call that cannot be in a batch: the fault is its caller's."""


class _Arguments(NamedTuple):
    """The parts of a call that are batched; messages about leaves use these names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How the calls of a function are batched; :class:`moolink.Rpc` explains each option.

    Raises:
        ValueError: the options contradict one another, or no batch can be made on the device.
    """

    batch_size: int | None = None
    device: str = "cpu"
    dynamic: bool = False
    mode: Mode = "stack"
    max_latency: float | None = None
    pad: bool = False
    bucket_sizes: tuple[int, ...] | None = None
    rules: BatchRules = BatchRules()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        for size in (self.batch_size, *(self.bucket_sizes or ())):
            if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
                raise ValueError(f"a number of calls or rows is an int, got {size!r}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.mode not in ("stack", "cat"):
            raise ValueError(f"mode must be 'stack' or 'cat', got {self.mode!r}")
        if self.dynamic:
            self._check_dynamic()
        else:
            self._check_static()
        _require_device(self.device)

    def _check_dynamic(self) -> None:
        if self.max_latency is not None or self.pad:
            raise ValueError(
                "max_latency and pad are for batches of a fixed size: dynamic batching takes the "
                "calls that wait, and pads to bucket_sizes"
            )
        sizes = self.bucket_sizes
        if sizes is not None and (not sizes or min(sizes) < 1 or sorted(set(sizes)) != list(sizes)):
            raise ValueError(f"bucket_sizes must rise from at least 1, got {sizes}")
        if sizes is not None and self.batch_size is not None and self.batch_size > sizes[-1]:
            raise ValueError(
                f"batch_size={self.batch_size} does not fit into the largest of {sizes=}"
            )

    def _check_static(self) -> None:
        if self.mode == "cat" or self.bucket_sizes is not None:
            raise ValueError("mode='cat' and bucket_sizes need dynamic_batching=True")
        if self.batch_size is None:
            raise ValueError("batch_size is needed: without it calls are not batched")
        if self.max_latency is not None and not self.max_latency >= 0:
            raise ValueError(f"max_latency must not be negative, got {self.max_latency}")
        if self.pad and self.max_latency is None:
            raise ValueError("pad needs max_latency: without it no batch is incomplete")

    @property
    def limit(self) -> int | None:
        """The most calls of a batch (``cat``: rows); None: no limit."""
        return self.batch_size or (self.bucket_sizes[-1] if self.bucket_sizes else None)

    def padded(self, rows: int) -> int:
        """How many rows a batch has into which ``rows`` are put."""
        if self.pad and self.batch_size is not None:
            return self.batch_size
        return next((size for size in self.bucket_sizes or () if size >= rows), rows)

    def require_bucket(self, call: Call) -> None:
        """Raises Misfit if the call alone brings more rows than the largest bucket has."""
        if self.mode != "cat":
            return
        shapes = [leaf.shape for leaf in _leaves(call[1:]) if _rank(leaf) > 0]
        for shape in shapes:
            if shape[0] > _MOST_EMPTY_ROWS and 0 in shape[1:]:
                raise Misfit(f"it brings {shape[0]} rows without elements")
        if self.bucket_sizes is None:
            return
        largest = self.bucket_sizes[-1]
        if shapes and (rows := shapes[0][0]) > largest:
            raise Misfit(
                f"it brings {rows} rows, and a batch has at most {largest} "
                f"(bucket_sizes={self.bucket_sizes}): make several calls of it"
            )


class Stacker:
    """Makes batches of calls; the caller holds ``lock``, but for :meth:`require_fit`."""

    def __init__(self, options: BatchOptions) -> None:
        self.lock = Lock()
        self._options = options
        self._layout: Node | None = None
        self._capacity = 0
        self._settled = False

    def require_fit(self, call: Call) -> None:
        """Raises Misfit if the call cannot be in a batch with those that were served so far."""
        self._options.require_bucket(call)
        if self._settled:
            self._check(call)

    def sift(self, calls: list[Call]) -> list[Call]:
        """Returns those that fit together; answers the others with the reason."""
        if self._layout is not None and all(self._misfit(call) is None for call in calls):
            return calls
        if not self._settled:
            calls = self._follow_most(calls)
        fitting = []
        for call in calls:
            misfit = self._misfit(call)
            if misfit is None:
                fitting.append(call)
            else:
                call.reply.reject(str(misfit))
        return fitting

    def try_stack(self, calls: list[Call]) -> Call | None:
        """Makes one call of those given if all are like those before; else returns None."""
        if self._layout is None or self._options.mode == "cat":
            return None
        try:
            return self.stack(calls)
        except ValueError:
            return None  # Rows that were filled are filled again.

    def stack(self, calls: list[Call]) -> Call:
        """Makes one call of those that were sifted, in the memory of the batch."""
        options = self._options
        cat = options.mode == "cat"
        sizes = [rows_of(call) for call in calls] if cat else None
        used = sum(sizes) if sizes is not None else len(calls)
        rows = options.padded(used)
        layout = self._with_room(rows, calls[0])
        start = 0
        for i, call in enumerate(calls):
            arguments = _Arguments(call.args, call.kwargs)
            if sizes is None:
                layout.put_row(arguments, i)
            else:
                layout.put_rows(arguments, start, sizes[i], 0)
                start += sizes[i]
        layout.pad(used, rows)
        batch = layout.take(rows)
        layout.allocate()  # Gives up the rows that were put there.
        succeeded = functools.partial(self._settle, layout)
        returns = [call.reply for call in calls]
        reply = BatchReturn(returns, sizes, rows, succeeded, options.rules)
        return Call(reply, batch.args, batch.kwargs)

    def _settle(self, layout: Node) -> None:
        """The first batch that was served fixes the layout of batches of a fixed size."""
        if not self._settled and not self._options.dynamic:
            self._layout, self._settled = layout, True

    def _check(self, call: Call) -> None:
        assert self._layout is not None
        arguments = _Arguments(call.args, call.kwargs)
        try:
            self._layout.check(arguments)
            if self._options.mode == "cat":
                batch_layout.count_rows(self._layout.rows(arguments))
        except ValueError as wrong:
            raise Misfit(f"it does not fit into the batch: {wrong}") from None

    def _misfit(self, call: Call) -> Misfit | None:
        try:
            self._check(call)
        except Misfit as wrong:
            return wrong
        return None

    def _follow_most(self, calls: list[Call]) -> list[Call]:
        """Makes the layout that fits most of the calls, in a draw the oldest ones.

        Returns the calls but those of which no batch can be made: they are answered.
        """
        groups: dict[Any, list[Call]] = {}
        for call in calls:
            groups.setdefault(_signature(call[1:], self._options.mode), []).append(call)
        refused: set[int] = set()
        for group in sorted(groups.values(), key=len, reverse=True):
            try:
                self._layout = self._build(group[0], max(self._options.limit or 1, len(calls)))
                break
            except ValueError as wrong:
                for call in group:
                    call.reply.reject(f"no batch can be made of it: {wrong}")
                refused.update(id(call) for call in group)
        return [call for call in calls if id(call) not in refused]

    def _build(self, call: Call, capacity: int) -> Node:
        options = self._options
        spec = batch_layout.Spec(options.mode, capacity, 0, options.device, options.rules.values)
        arguments = _Arguments(call.args, call.kwargs)
        layout = batch_layout.build(arguments, spec)
        if options.mode == "cat":
            batch_layout.count_rows(layout.rows(arguments))
        layout.allocate()
        self._capacity = capacity
        return layout

    def _with_room(self, rows: int, like: Call) -> Node:
        if self._layout is None or rows > self._capacity:
            self._layout = self._build(like, 1 << (rows - 1).bit_length())
        return self._layout


def _require_device(device: str) -> None:
    """Raises ValueError if no batch can be made there."""
    if device == "cpu":
        return
    try:
        import torch

        if torch.device(device).type == "cuda":  # without beginning to use it, which forks forbid
            _require_cuda(torch.device(device).index or 0)
        else:
            torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError) as wrong:
        raise ValueError(f"no batch can be made on {device=}: {wrong}") from None


def _require_cuda(index: int) -> None:
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(f"torch finds {count} such devices")


def rows_of(call: Call) -> int:
    """The rows that a call brings to a batch in mode cat; 1 if it has none."""
    return next((leaf.shape[0] for leaf in _leaves(call[1:]) if _rank(leaf) > 0), 1)


def _rank(leaf: Any) -> int:
    return len(leaf.shape) if is_array(leaf) else 0


def _leaves(nest: Nest) -> Iterable[Any]:
    node = nodes.apart(nest)
    if node is None:
        yield nest
        return
    for part in node.parts:
        yield from _leaves(part)


def _signature(nest: Nest, mode: Mode) -> Any:
    """The structure that two calls must share to be in one batch."""
    if isinstance(nest, dict):
        return dict, frozenset((key, _signature(part, mode)) for key, part in nest.items())
    node = None if nest is None else nodes.apart(nest)
    if node is not None:
        return type(nest), tuple(_signature(part, mode) for part in node.parts)
    if is_array(nest):
        return type(nest), tuple(nest.shape)[mode == "cat" :], str(nest.dtype)
    return None
