"""Trees of arrays: flattening to numpy and back, keeping each leaf's framework."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.data import nodes
from moolink.data.device_arrays import torch_on_device
from moolink.data.frameworks import is_jax, is_torch


@dataclass
class Leaf:
    """One array of a tree, seen as numpy, and how to make its like again.

    numpy itself knows no bfloat16 and no 8-bit floats: such arrays are seen as unsigned integers,
    and ``dtype`` names the real type. For an array on a device, ``array`` is a copy.
    """

    array: npt.NDArray[Any]
    dtype: str
    kind: Literal["numpy", "torch", "jax", "cupy", "number"]
    path: str
    original: Any = None  # the dtype of a numpy or JAX array that is seen as another
    tensor: Any = None  # torch's or CuPy's own
    device: Any = None  # the framework's device, or JAX's sharding; None: the host
    pending: bool = False  # the tensor's elements have not been copied to the array

    def restore(self, array: npt.NDArray[Any]) -> Any:
        """Returns ``array`` as this leaf's type; a number as an array if it has dimensions."""
        if self.original is not None:
            array = array.view(self.original)
        if self.kind == "numpy":
            return array
        if self.kind == "number":
            return array.item() if array.ndim == 0 else array
        if self.kind == "jax":
            jax = sys.modules["jax"]
            if self.device is not None:
                return jax.device_put(array, self.device)
            return jax.numpy.asarray(array)
        if self.kind == "cupy":
            with self.device:
                return sys.modules["cupy"].asarray(array)
        tensor = as_torch(array, self.dtype)
        return tensor if self.device is None else self._on_device(tensor)

    def _on_device(self, tensor: Any) -> Any:
        return (
            torch_on_device(tensor, self.device)
            if self.device.type == "cuda"
            else tensor.to(self.device)
        )

    def writable(self) -> bool:
        """Whether writing into ``array`` writes into the object of which this leaf was made."""
        return self.on_device() or (self.kind in ("numpy", "torch") and self.array.flags.writeable)

    def on_device(self) -> bool:
        """Whether this leaf's object lies on a device and can be written there."""
        return self.tensor is not None and self.device is not None

    def write(self, array: npt.NDArray[Any] | None) -> None:
        """Copies ``array`` into this leaf's object; ``None``: it is there already."""
        if self.on_device():
            self._write_to_device(self.array if array is None else array)
            return
        if array is not None:
            np.copyto(self.array, array)
        if self.tensor is not None:
            note_written(self.tensor)

    def _write_to_device(self, array: npt.NDArray[Any]) -> None:
        if self.kind == "cupy":
            with self.device:
                self.tensor[...] = sys.modules["cupy"].asarray(array)
            return
        with sys.modules["torch"].no_grad():
            self.tensor.copy_(self._on_device(as_torch(array, self.dtype)))

    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and of the one after the last."""
        begin = self.array.ctypes.data
        if self.array.flags.c_contiguous:
            return begin, begin + self.array.nbytes
        end = begin + self.array.itemsize
        for size, stride in zip(self.array.shape, self.array.strides, strict=True):
            begin += min(0, (size - 1) * stride)
            end += max(0, (size - 1) * stride)
        return begin, end

    def is_same_memory(self, other: Leaf) -> bool:
        """Whether the elements of both are the same ones, in the same order."""
        mine, theirs = self.array, other.array
        return (self.span(), mine.shape, mine.strides) == (
            other.span(),
            theirs.shape,
            theirs.strides,
        )


def as_torch(array: npt.NDArray[Any], dtype: str | None = None) -> Any:
    """An array as torch's tensor, without a copy if it is contiguous. `dtype` is the elements'
    type where numpy sees their bits only; torch takes those of ml_dtypes by their bits, too."""
    import torch

    name = array.dtype.name if dtype is None else dtype
    bits = array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array
    tensor = torch.from_numpy(np.asarray(bits, order="C"))
    return tensor if bits.dtype.name == name else tensor.view(getattr(torch, name))


def note_written(array: Any) -> None:
    """Tells torch, if ``array`` is a tensor, that it was written, which autograd has to know."""
    if is_torch(array) and not array.is_inference():
        import torch

        torch.autograd.graph.increment_version(array)


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which numpy builds anew each time


LAYOUT_LENGTH = 400  # characters of a layout in words

# A tree's structure: a container with the structures of its children, or None for a leaf.
Structure = tuple[Any, list["Structure"]] | None


def flatten(tree: Any, name: str = "data", read: bool = True) -> tuple[list[Leaf], Structure]:
    """Returns the leaves of a tree (see :mod:`moolink.data.nodes`) in order, and its structure.

    Args:
        name: the beginning of the paths to leaves.
        read: whether elements are needed; without them, arrays of device tensors are undefined.

    Raises:
        TypeError: a leaf is no array, tensor or number, or the tree is None; the message gives the
            path.
    """
    if tree is None:  # a node within a tree, but alone no data
        raise _no_data(tree, name)
    leaves: list[Leaf] = []
    structure = _walk(tree, name, leaves)
    if read:
        _read_devices(leaves)
    return leaves, structure


def _read_devices(leaves: list[Leaf]) -> None:
    """Copies the leaves that lie on devices, waiting for them once."""
    pending = [leaf for leaf in leaves if leaf.pending]
    if pending:
        _core.copy_to_host([leaf.tensor for leaf in pending], [leaf.array for leaf in pending])
    for leaf in pending:
        leaf.pending = False


# Not a closure: one that calls itself is a cycle, which would keep the arrays until a collection.
def _walk(value: Any, path: str, leaves: list[Leaf]) -> Structure:
    node = nodes.apart(value)
    if node is None:
        leaves.append(_leaf(value, path))
        return None
    order = list(range(len(node.keys)))
    if isinstance(value, dict):
        # By sorted keys, so that the order of insertion may differ between members.
        order.sort(key=lambda i: str(node.keys[i]))
    children = []
    for i in order:
        key = i if isinstance(value, tuple) else node.keys[i]
        name = f".{key}" if isinstance(key, str) and not isinstance(value, dict) else f"[{key!r}]"
        children.append(_walk(node.parts[i], path + name, leaves))
    return (_rebuild_in(order, node.rebuild), children)


def _rebuild_in(order: list[int], rebuild: Callable[[list[Any]], Any]) -> Any:
    """`rebuild` for parts in another order. Keeps no reference to the node, which holds arrays."""

    def sorted_back(children: list[Any]) -> Any:
        parts: list[Any] = [None] * len(order)
        for i, child in zip(order, children, strict=True):
            parts[i] = child
        return rebuild(parts)

    return sorted_back


def layout(leaves: list[Leaf], shapes: list[tuple[int, ...]]) -> str:
    """The leaves' paths, dtypes and shapes in words; of bounded length, yet different for trees
    that differ in a path, a shape or a dtype.

    Args:
        shapes: of the leaves, or of each member's part of them.
    """
    return layout_text(
        (leaf.path, leaf.dtype, shape) for leaf, shape in zip(leaves, shapes, strict=True)
    )


def layout_text(leaves: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """The same of each leaf's path, dtype and shape."""
    parts = [f"{path}: {dtype} {shape}" for path, dtype, shape in leaves]
    text = ", ".join(parts)
    if len(text) <= LAYOUT_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:LAYOUT_LENGTH]}... ({len(parts)} leaves, hash {digest})"


def overlap(inputs: list[Leaf], outputs: list[Leaf]) -> tuple[Leaf, Leaf] | None:
    """An input and an output that may share memory, except an output in its own input's place."""
    spans = [(*leaf.span(), False, i) for i, leaf in enumerate(inputs) if leaf.array.size]
    spans += [(*leaf.span(), True, i) for i, leaf in enumerate(outputs) if leaf.array.size]
    furthest: dict[bool, tuple[int, int]] = {}  # of inputs and outputs: the end, and whose it is
    for begin, end, is_output, index in sorted(spans):
        other_end, other = furthest.get(not is_output, (0, 0))
        if begin < other_end:
            given, place = (other, index) if is_output else (index, other)
            if given != place or not inputs[given].is_same_memory(outputs[place]):
                return inputs[given], outputs[place]
        furthest[is_output] = max(furthest.get(is_output, (0, 0)), (end, index))
    return None


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Builds the tree again from its structure and new leaves in order."""
    return _build(structure, iter(leaves))


def _build(node: Structure, remaining: Iterator[Any]) -> Any:
    if node is None:
        return next(remaining)
    rebuild, children = node
    return rebuild([_build(child, remaining) for child in children])


def _leaf(value: Any, path: str) -> Leaf:
    if _core.check_array(value, path) and isinstance(value, np.ndarray):
        return _numpy_leaf(value, "numpy", path)
    if isinstance(value, (bool, int, float)):
        array = np.asarray(value)
        return Leaf(array, _name(array.dtype), "number", path)
    if isinstance(value, np.generic):
        array = np.asarray(value)
        array.flags.writeable = False  # a scalar cannot be written
        return _numpy_leaf(array, "numpy", path)
    if is_torch(value):
        return _torch_leaf(value, path)
    if is_jax(value):
        leaf = _numpy_leaf(np.asarray(value), "jax", path)
        if any(device.platform != "cpu" for device in value.devices()):
            leaf.device = value.sharding
        return leaf
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        leaf = _numpy_leaf(cupy.asnumpy(value), "cupy", path)
        leaf.tensor, leaf.device = value, value.device
        return leaf
    if hasattr(value, "__dlpack__"):
        return _numpy_leaf(_core.as_array(value), "numpy", path)
    raise _no_data(value, path)


def _no_data(value: object, path: str) -> TypeError:
    return TypeError(
        f"{path} is a {type(value).__qualname__}: only arrays, tensors and numbers can "
        "be given, except to all_reduce with a callable op"
    )


def _numpy_leaf(array: npt.NDArray[Any], kind: Literal["numpy", "jax", "cupy"], path: str) -> Leaf:
    dtype = array.dtype
    if dtype.kind == "V" and dtype.isbuiltin == 2:  # of ml_dtypes
        return Leaf(array.view(f"u{dtype.itemsize}"), dtype.name, kind, path, dtype)
    if dtype.kind not in "biufc":
        raise TypeError(f"{path} is an array of {dtype}: only numbers can be reduced")
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False  # not the user's
    return Leaf(array, _name(dtype), kind, path)


def seen_as(dtype: str, item_size: int) -> str:
    """The name of numpy's dtype for elements of a dtype of torch's."""
    if dtype == "bfloat16" or dtype.startswith("float8"):
        return "uint16" if item_size == 2 else "uint8"
    return dtype


def _torch_leaf(value: Any, path: str) -> Leaf:
    import torch

    tensor = value.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bool:
        name = "bool"
    if tensor.is_cuda:
        array = np.empty(tuple(tensor.shape), seen_as(name, tensor.element_size()))
        return Leaf(array, name, "torch", path, tensor=value, device=value.device, pending=True)
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if seen_as(name, tensor.element_size()) != name:
        tensor = tensor.view(torch.uint16 if tensor.element_size() == 2 else torch.uint8)
    array = tensor.numpy()
    device = None if value.is_cpu else value.device
    if device is None and tensor.data_ptr() != value.data_ptr():
        array.flags.writeable = False  # it is a copy: writing there does not change the tensor
    return Leaf(array, name, "torch", path, tensor=value, device=device)
