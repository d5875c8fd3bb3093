"""Trees of arrays: flattening to numpy and back, keeping each leaf's framework."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt


@dataclass
class Leaf:
    """One array of a tree, seen as numpy, and how to make its like again.

    numpy knows no bfloat16: such a tensor is seen as uint16, and ``dtype`` says what the bits mean.
    """

    array: npt.NDArray[Any]
    dtype: str
    kind: Literal["numpy", "torch", "number"]
    path: str

    def restore(self, array: npt.NDArray[Any]) -> Any:
        """Returns ``array`` as what this leaf was."""
        if self.kind == "numpy":
            return array
        if self.kind == "number":
            return array.item()
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.dtype != "bfloat16" else tensor.view(torch.bfloat16)


LAYOUT_LENGTH = 400  # characters of a layout in words

# A tree's structure: a container with the structures of its children, or None for a leaf.
Structure = tuple[Any, list["Structure"]] | None


def flatten(tree: Any) -> tuple[list[Leaf], Structure]:
    """Returns the leaves of a tree of dicts, lists and tuples in order, and its structure.

    Raises:
        TypeError: a leaf is no array, tensor or number; the message gives its path.
    """
    leaves: list[Leaf] = []

    def walk(node: Any, path: str) -> Structure:
        if isinstance(node, dict):
            # By sorted keys, so that the order of insertion may differ between members.
            keys = sorted(node, key=str)
            return (_rebuild_dict(node, keys), [walk(node[k], f"{path}[{k!r}]") for k in keys])
        if isinstance(node, (list, tuple)):
            children = [walk(child, f"{path}[{i}]") for i, child in enumerate(node)]
            return (_rebuild_sequence(type(node)), children)
        leaves.append(_leaf(node, path))
        return None

    return leaves, walk(tree, "data")


def layout(leaves: list[Leaf]) -> str:
    """What the leaves are and where in the tree, in words; of bounded length, yet different for
    trees that differ in a path, a shape or a dtype."""
    text = ", ".join(f"{leaf.path}: {leaf.dtype} {leaf.array.shape}" for leaf in leaves)
    if len(text) <= LAYOUT_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:LAYOUT_LENGTH]}... ({len(leaves)} leaves, hash {digest})"


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Builds the tree again from its structure and new leaves in order."""
    remaining = iter(leaves)

    def build(node: Structure) -> Any:
        if node is None:
            return next(remaining)
        rebuild, children = node
        return rebuild([build(child) for child in children])

    return build(structure)


def _rebuild_dict(original: dict[Any, Any], keys: list[Any]) -> Any:
    order = list(original)

    def rebuild(children: list[Any]) -> Any:
        values = dict(zip(keys, children, strict=True))
        return {key: values[key] for key in order}

    return rebuild


def _rebuild_sequence(kind: type) -> Any:
    if hasattr(kind, "_fields"):  # a namedtuple takes its children as arguments
        return lambda children: kind(*children)
    return kind


def _leaf(value: Any, path: str) -> Leaf:
    if isinstance(value, (bool, int, float)):
        array = np.asarray(value)
        return Leaf(array, array.dtype.name, "number", path)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return Leaf(array, array.dtype.name, "numpy", path)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        return Leaf(tensor.numpy(), name, "torch", path)
    raise TypeError(
        f"{path} is a {type(value).__qualname__}: only arrays, tensors and numbers can be reduced "
        "without a callable op"
    )
