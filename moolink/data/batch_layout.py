"""Where a Batcher puts the leaves of a nest: preallocated arrays, one copy per item and leaf.

A layout is made from the first item. Every later item must have its structure, and its leaves the
same shapes and dtypes; errors name a leaf that differs by its path, as ``state[1].h``.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from moolink._core import check_array
from moolink.data import nodes
from moolink.data.frameworks import as_numpy, check_copied, is_torch
from moolink.data.warm_memory import SMALL, WarmMemory
from moolink.internal.shown import shown

Nest: TypeAlias = Any  # a node of nests (see moolink.data.nodes) except None; else a leaf
Mode: TypeAlias = Literal["stack", "cat"]
Values: TypeAlias = Literal["list", "tuple", "first"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The batches that a Batcher makes: of `size` along `dim`, on `device`. A value that is no
    array becomes a list or a tuple of all rows' values, or the first row's."""

    mode: Mode
    size: int
    dim: int
    device: str
    values: Values = "list"


class Node(abc.ABC):
    """A part of the layout; it holds the batch being filled."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abc.abstractmethod
    def allocate(self) -> None:
        """Makes room for a new batch; the old one belongs to its taker."""

    @abc.abstractmethod
    def check(self, item: Nest) -> None:
        """Raises ValueError unless `item` has this node's structure, shape and dtype."""

    @abc.abstractmethod
    def put_row(self, item: Nest, row: int) -> None:
        """Copies `item` to `row`, checking it on the way (the caller has not): for stack."""

    @abc.abstractmethod
    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        """Copies rows `offset` ... `offset + count` of a checked `item` to row `start`: for cat."""

    @abc.abstractmethod
    def pad(self, start: int, stop: int) -> None:
        """Fills rows that no item has filled: arrays with zeros, values with None."""

    @abc.abstractmethod
    def take(self, rows: int | None = None) -> Nest:
        """Returns this node's part of the batch, or of its first ``rows`` rows. Only arrays can be
        written after that, before the next `allocate`."""

    @abc.abstractmethod
    def rows(self, item: Nest) -> list[tuple[str, int]]:
        """For cat: the path and number of rows along dim of each array in `item`."""

    @property
    def name(self) -> str:
        """The path, or words for the nest's root, which has none."""
        return self.path or "the item"


def build(item: Nest, spec: Spec, path: str = "") -> Node:
    """Makes the layout for items like `item`."""
    if isinstance(item, dict):
        prefix = f"{path}." if path else ""
        return _Dict(path, {key: build(item[key], spec, f"{prefix}{key}") for key in item})
    node = None if item is None else nodes.apart(item)  # None is a value like any other here
    if node is not None:
        prefix = f"{path}." if path else ""
        paths = [
            f"{prefix}{key}" if isinstance(key, str) else f"{path}[{key}]" for key in node.keys
        ]
        children = [build(part, spec, path) for part, path in zip(node.parts, paths, strict=True)]
        if isinstance(item, list | tuple):
            return _Sequence(path, type(item), children)
        return _Fields(path, node, children)
    check_copied(item, path or "the item", spec.device)
    if is_torch(item):
        return _TorchLeaf(path, item, spec)
    if is_array(item):
        array = as_numpy(item)
        if spec.device != "cpu":
            import torch

            return _TorchLeaf(path, torch.from_numpy(array), spec)
        return _NumpyLeaf(path, array, spec)
    return _ValueLeaf(path, spec)


def is_array(item: object) -> bool:
    """Tells whether `item` is stored in an array; Python's own numbers are not."""
    if isinstance(item, np.ndarray | np.generic) or is_torch(item):
        return True
    return hasattr(item, "__dlpack__") or hasattr(item, "__array_interface__")


def _is_node(item: Nest) -> bool:
    return item is not None and nodes.apart(item) is not None


def count_rows(rows: list[tuple[str, int]]) -> int:
    """Returns the number of rows that all arrays of an item have (see :meth:`Node.rows`).

    Raises:
        ValueError: they differ, or there is no array.
    """
    if not rows:
        raise ValueError("the item holds no array, so it has no rows to concatenate")
    first_name, count = rows[0]
    for name, found in rows:
        if found != count:
            raise ValueError(f"{name}: expected {count} rows as in {first_name}, got {found}")
    return count


class _Dict(Node):
    def __init__(self, path: str, children: dict[Any, Node]) -> None:
        super().__init__(path)
        self._children = children
        self._items = list(children.items())
        self._puts = [(key, child.put_row) for key, child in self._items]

    def allocate(self) -> None:
        for _, child in self._items:
            child.allocate()

    def check(self, item: Nest) -> None:
        if not isinstance(item, dict):
            raise ValueError(f"{self.name}: expected a dict, got {type(item).__name__}")
        if item.keys() != self._children.keys():
            missing = [str(key) for key in self._children if key not in item]
            extra = [str(key) for key in item if key not in self._children]
            raise ValueError(f"{self.name}: missing keys {missing}, unexpected keys {extra}")
        for key, child in self._items:
            child.check(item[key])

    def put_row(self, item: Nest, row: int) -> None:
        if type(item) is not dict or len(item) != len(self._puts):
            self.check(item)
        for key, put_row in self._puts:
            try:
                part = item[key]
            except KeyError:
                self.check(item)  # Raises, and says which keys are missing.
                raise
            put_row(part, row)

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        for key, child in self._items:
            child.put_rows(item[key], start, count, offset)

    def pad(self, start: int, stop: int) -> None:
        for _, child in self._items:
            child.pad(start, stop)

    def take(self, rows: int | None = None) -> Nest:
        return {key: child.take(rows) for key, child in self._items}

    def rows(self, item: Nest) -> list[tuple[str, int]]:
        return [found for key, child in self._items for found in child.rows(item[key])]


class _Sequence(Node):
    def __init__(self, path: str, kind: Any, children: list[Node]) -> None:
        super().__init__(path)
        self._kind = kind
        self._children = children

    def allocate(self) -> None:
        for child in self._children:
            child.allocate()

    def check(self, item: Nest) -> None:
        if type(item) is not self._kind:
            expected, got = self._kind.__name__, type(item).__name__
            raise ValueError(f"{self.name}: expected a {expected}, got {got}")
        if len(item) != len(self._children):
            raise ValueError(f"{self.name}: expected {len(self._children)} parts, got {len(item)}")
        for child, part in zip(self._children, item, strict=True):
            child.check(part)

    def put_row(self, item: Nest, row: int) -> None:
        if type(item) is not self._kind or len(item) != len(self._children):
            self.check(item)
        for child, part in zip(self._children, item, strict=True):
            child.put_row(part, row)

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        for child, part in zip(self._children, item, strict=True):
            child.put_rows(part, start, count, offset)

    def pad(self, start: int, stop: int) -> None:
        for child in self._children:
            child.pad(start, stop)

    def take(self, rows: int | None = None) -> Nest:
        parts = [child.take(rows) for child in self._children]
        return nodes.maker(self._kind)(parts)

    def rows(self, item: Nest) -> list[tuple[str, int]]:
        parts = zip(self._children, item, strict=True)
        return [found for child, part in parts for found in child.rows(part)]


class _Fields(Node):
    """A dataclass, or a node of a registered type."""

    def __init__(self, path: str, node: nodes.Node, children: list[Node]) -> None:
        super().__init__(path)
        self._kind = node.kind
        self._rebuild = node.rebuild
        self._children = children

    def _parts(self, item: Nest) -> list[Any]:
        node = None if item is None else nodes.apart(item)
        if node is None or node.kind != self._kind:
            expected = self._kind.__name__ if isinstance(self._kind, type) else self._kind
            raise ValueError(f"{self.name}: expected a {expected}, got {_describe(item)}")
        return node.parts

    def allocate(self) -> None:
        for child in self._children:
            child.allocate()

    def check(self, item: Nest) -> None:
        for child, part in zip(self._children, self._parts(item), strict=True):
            child.check(part)

    def put_row(self, item: Nest, row: int) -> None:
        for child, part in zip(self._children, self._parts(item), strict=True):
            child.put_row(part, row)

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        for child, part in zip(self._children, self._parts(item), strict=True):
            child.put_rows(part, start, count, offset)

    def pad(self, start: int, stop: int) -> None:
        for child in self._children:
            child.pad(start, stop)

    def take(self, rows: int | None = None) -> Nest:
        return self._rebuild([child.take(rows) for child in self._children])

    def rows(self, item: Nest) -> list[tuple[str, int]]:
        parts = zip(self._children, self._parts(item), strict=True)
        return [found for child, part in parts for found in child.rows(part)]


class _ValueLeaf(Node):
    """A leaf that is no array: a batch holds each row's value, or the first one's."""

    def __init__(self, path: str, spec: Spec) -> None:
        super().__init__(path)
        self._size = spec.size
        self._shown = spec.values

    def allocate(self) -> None:
        self._values: list[Any] = [None] * self._size

    def check(self, item: Nest) -> None:
        if check_array(item, self.name) or is_array(item) or _is_node(item):
            raise ValueError(f"{self.name}: expected a plain value, got {_describe(item)}")

    def put_row(self, item: Nest, row: int) -> None:
        self.check(item)
        self._values[row] = item

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        self._values[start : start + count] = [item] * count

    def pad(self, start: int, stop: int) -> None:
        self._values[start:stop] = [None] * (stop - start)

    def take(self, rows: int | None = None) -> Nest:
        # Moved out: the values' destructors run when the caller drops them.
        values, self._values = self._values, []
        if self._shown == "first":
            return values[0]
        values = values if rows is None else values[:rows]
        return tuple(values) if self._shown == "tuple" else values

    def rows(self, item: Nest) -> list[tuple[str, int]]:
        return []


class _ArrayLeaf(Node):
    """The common part of the leaves that are arrays: the batch's shape, and its dim."""

    def __init__(self, path: str, shape: Sequence[int], spec: Spec) -> None:
        super().__init__(path)
        self._stack = spec.mode == "stack"
        dims = len(shape) + self._stack
        if not -dims <= spec.dim < dims:
            raise ValueError(
                f"{self.name}: dim {spec.dim} is out of range for {spec.mode} of shape "
                f"{tuple(shape)}"
            )
        self._dim = spec.dim % dims
        self._batch_shape = (
            *shape[: self._dim],
            spec.size,
            *shape[self._dim + (not self._stack) :],
        )
        self._row_shape = self._batch_shape[: self._dim] + self._batch_shape[self._dim + 1 :]

    def rows(self, item: Nest) -> list[tuple[str, int]]:
        # Producers of DLPack need not have a shape.
        shape = item.shape if hasattr(item, "shape") else as_numpy(item).shape
        return [(self.name, shape[self._dim])]

    def _copy_rows(self, target: Any, source: Any, start: int, count: int, offset: int) -> None:
        """Copies rows of `source` into `target`; both are numpy arrays, or both torch tensors."""
        before = (slice(None),) * self._dim
        rows = source[(*before, slice(offset, offset + count))]
        target[(*before, slice(start, start + count))] = rows

    def _first(self, batch: Any, rows: int | None) -> Any:
        return batch if rows is None else batch[(*(slice(None),) * self._dim, slice(rows))]

    def _has_shape(self, shape: Sequence[int]) -> bool:
        if self._stack:
            return shape == self._row_shape
        dim = self._dim
        return (
            len(shape) == len(self._batch_shape)
            and (*shape[:dim], *shape[dim + 1 :]) == self._row_shape
        )

    def _mismatch(self, dtype: object, item: Nest) -> ValueError:
        shape = [str(size) for size in self._batch_shape]
        if self._stack:
            del shape[self._dim]
        else:
            shape[self._dim] = "any"
        text = f"({', '.join(shape)}{',' if len(shape) == 1 else ''})"
        return ValueError(f"{self.name}: expected {text} {dtype}, got {_describe(item)}")


class _NumpyLeaf(_ArrayLeaf):
    def __init__(self, path: str, first: npt.NDArray[Any], spec: Spec) -> None:
        super().__init__(path, first.shape, spec)
        self._dtype = first.dtype
        self._memory = WarmMemory()
        self._batch: Any = None
        self._rows: Any = None

    def allocate(self) -> None:
        self._batch = self._rows = None  # or this would keep the last batch's memory
        self._batch = self._memory.empty(self._batch_shape, self._dtype)
        self._rows = np.moveaxis(self._batch, self._dim, 0) if self._dim else self._batch

    def check(self, item: Nest) -> None:
        if type(item) is not np.ndarray:
            check_array(item, self.name)
            if is_torch(item) or not is_array(item):
                raise self._mismatch(f"{self._dtype} (numpy)", item)
            item = as_numpy(item, self.name)
        if item.dtype != self._dtype or not self._has_shape(item.shape):
            raise self._mismatch(self._dtype, item)

    def put_row(self, item: Nest, row: int) -> None:
        if type(item) is not np.ndarray:
            self.check(item)
            item = as_numpy(item, self.name)
        if item.dtype is not self._dtype or item.shape != self._row_shape:
            self.check(item)
        self._rows[row] = item

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        self._copy_rows(self._batch, as_numpy(item), start, count, offset)

    def pad(self, start: int, stop: int) -> None:
        self._rows[start:stop] = np.zeros((), self._dtype)

    def take(self, rows: int | None = None) -> Nest:
        return self._first(self._batch, rows)


class _TorchLeaf(_ArrayLeaf):
    def __init__(self, path: str, first: Any, spec: Spec) -> None:
        super().__init__(path, first.shape, spec)
        self._dtype = first.dtype
        self._device = spec.device
        self._memory = WarmMemory()
        self._batch: Any = None
        self._rows: Any = None
        # Numpy copies a small row in a third of torch's time.
        self._numpy_rows: Any = None
        self._numpy_dtype = _numpy_dtype(first.dtype) if spec.device == "cpu" else None

    def allocate(self) -> None:
        import torch

        self._batch = self._rows = self._numpy_rows = None  # as in _NumpyLeaf
        shape, itemsize = self._batch_shape, self._dtype.itemsize
        if self._numpy_dtype is not None:
            memory = self._memory.empty(shape, self._numpy_dtype)
            self._batch = torch.from_numpy(memory)
            self._numpy_rows = np.moveaxis(memory, self._dim, 0) if self._dim else memory
        elif self._device == "cpu" and math.prod(shape) * itemsize >= SMALL:
            memory = self._memory.empty((*shape, itemsize), np.uint8)
            self._batch = torch.from_numpy(memory).view(self._dtype).squeeze(-1)
        else:
            self._batch = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._rows = self._batch.movedim(self._dim, 0) if self._dim else self._batch

    def check(self, item: Nest) -> None:
        if not is_torch(item):
            # Numpy leaves are allowed where the device asks for torch.
            if self._device == "cpu" or not isinstance(item, np.ndarray):
                raise self._mismatch(f"{self._dtype} (torch)", item)
            import torch

            item = torch.from_numpy(item)
        check_copied(item, self.name, self._device)
        if item.dtype != self._dtype or not self._has_shape(item.shape):
            raise self._mismatch(self._dtype, item)

    def put_row(self, item: Nest, row: int) -> None:
        if self._numpy_rows is not None:
            check_array(item, self.name)  # before its address is taken
            try:
                source = item.numpy()
            except (AttributeError, TypeError, RuntimeError):
                pass  # Not torch, on a device, part of an autograd graph, or conjugated.
            else:
                if source.dtype is not self._numpy_rows.dtype or source.shape != self._row_shape:
                    self.check(item)
                self._numpy_rows[row] = source
                return
        self.check(item)
        self._rows[row] = _detached(item)

    def put_rows(self, item: Nest, start: int, count: int, offset: int) -> None:
        self._copy_rows(self._batch, _detached(item), start, count, offset)

    def pad(self, start: int, stop: int) -> None:
        self._rows[start:stop] = 0

    def take(self, rows: int | None = None) -> Nest:
        return self._first(self._batch, rows)


def _numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Numpy's dtype for one of torch's, None where there is none, as for bfloat16."""
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def _detached(item: Any) -> Any:
    import torch

    return torch.from_numpy(item) if isinstance(item, np.ndarray) else item.detach()


def _describe(item: Nest) -> str:
    if is_array(item):
        return f"{tuple(item.shape)} {item.dtype}"
    if _is_node(item):
        return f"a {type(item).__name__}"
    return f"{shown(item)} of type {type(item).__name__}"
