"""A table of a replay, with torch's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from moolink.data import skeletons
from moolink.replay import Replay, ReplayClient
from moolink.replay.batch import Batch
from moolink.replay.reading import Items
from moolink.reports import ReplayTableStats

_KEYS = 1 << 32  # the smallest key of a table; smaller numbers are positions


def batch_of_one(data: Any) -> Any:
    """An item with a first dimension."""
    if isinstance(data, TensorDictBase):
        return data.unsqueeze(0)
    return torch.utils._pytree.tree_map(lambda leaf: torch.as_tensor(leaf)[None], data)


def has_no_items(data: Any) -> bool:
    """Whether it is a list or tuple without items, which has no tensors to tell their number."""
    return isinstance(data, list | tuple) and not data


def first_of(data: Any) -> Any:
    """The first item."""
    if isinstance(data, TensorDictBase):
        return data[0]
    return torch.utils._pytree.tree_map(lambda leaf: leaf[0], data)


def _is_tensordict(tree: dict[Any, Any]) -> bool:
    return all(
        isinstance(key, str)
        and (_is_tensordict(value) if isinstance(value, dict) else isinstance(value, Tensor))
        for key, value in tree.items()
    )


class TableView:
    """The table of a buffer, which its storage, sampler and writer share.

    Args:
        replay: a replay of this process, or a client of one.
        table: the table's name; None: the only one.
        timeout: seconds for which an insert or a sample waits.
        device: of the tensors; None: the CPU.
    """

    def __init__(
        self, replay: Replay | ReplayClient, table: str | None, timeout: float | None, device: Any
    ) -> None:
        self.replay = replay
        self.table = table
        self._timeout = timeout
        self.device = None if device is None else torch.device(device)
        self.greatest = 1.0  # the greatest priority so far: new items get it, as in TorchRL

    def stats(self) -> ReplayTableStats:
        tables = self.replay.stats()["tables"]
        name = next(iter(tables)) if self.table is None and len(tables) == 1 else self.table
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the tables are {', '.join(tables)}")
        return tables[name]

    @property
    def max_size(self) -> int:
        tables = {table.name: table for table in self.replay.tables()}
        name = next(iter(tables)) if self.table is None else self.table
        return tables[name].max_size

    def insert(self, data: Any, priorities: np.ndarray) -> Tensor:
        """Inserts the items along the first dimension; returns their keys."""
        tree = data.to_dict() if isinstance(data, TensorDictBase) else data
        keys = self.replay.extend(tree, priorities, table=self.table, timeout=self._timeout)
        self.greatest = priorities.max(initial=self.greatest)
        return torch.from_numpy(keys)

    def sample(self, batch_size: int) -> tuple[Batch, Any]:
        """A batch, and its data as tensors.

        Raises:
            RuntimeError: there is no time limit, and the table is empty.
        """
        if self._timeout is None and not self.stats()["size"]:
            raise RuntimeError(
                "Cannot sample from an empty storage: give the buffer a timeout to wait for items"
            )
        batch = self.replay.sample(batch_size, table=self.table, timeout=self._timeout)
        return batch, self._with_batch(batch.data, len(batch))

    def items(self, index: Any = None) -> tuple[Items, Any]:
        """Items, and their data as tensors. `index`: keys, or positions counted from the oldest
        item, in any form of numpy's indexing; None: all.

        Raises:
            IndexError: there is no item at such a position.
            KeyError: there is no item with such a key.
        """
        keys = None if index is None else self._keys_at(index)
        _, items = self.replay._items(None if keys is None else keys.reshape(-1), self.table)
        columns = [
            torch.from_numpy(np.array(data))
            .reshape(-1)
            .view(getattr(torch, dtype))
            .reshape(tuple(shape))
            for data, dtype, shape in items.columns
        ]
        if not columns:
            return items, TensorDict({}, [0])
        return items, self._with_batch(
            skeletons.unflatten(items.skeleton, columns), len(items.keys)
        )

    def _keys_at(self, index: Any) -> np.ndarray:
        if not isinstance(index, slice):
            given = np.asarray(index)
            if given.dtype != bool and given.size and (given >= _KEYS).all():
                return given.astype(np.int64)
            index = given
        there, _ = self.replay._items(np.empty(0, np.int64), self.table)
        return np.asarray(there[index])

    def _with_batch(self, tree: Any, size: int) -> Any:
        """A TensorDict for a dict of which one can be made; other trees as they are."""
        if isinstance(tree, dict) and _is_tensordict(tree):
            data = TensorDict(tree, batch_size=[size])
            return data if self.device is None else data.to(self.device)
        if self.device is None:
            return tree
        return torch.utils._pytree.tree_map(lambda tensor: tensor.to(self.device), tree)
