"""A replay's table with the methods of TorchRL's replay buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from moolink.replay import Replay, ReplayClient
from moolink.reports import ReplayTableStats

INDEX = "index"
WEIGHT = "priority_weight"  # TorchRL's losses and users read the weights from this key


class ReplayBuffer:
    """A table of a :class:`moolink.Replay` or :class:`moolink.ReplayClient` with the methods of
    `torchrl.data.TensorDictReplayBuffer`, for TorchRL's collectors, trainers and losses:

        table = moolink.replay.Table("steps", 100_000, sampler=moolink.replay.Prioritized(0.6))
        buffer = moolink.torchrl.ReplayBuffer(moolink.Replay(table), batch_size=256, beta=0.4)

    An item is a TensorDict without a batch dimension. Samples have the items' keys as `"index"`
    and importance weights as `"priority_weight"`, both [batch_size].

    Args:
        replay: a replay of this process, or a client of one. Any number of buffers may share it.
        table: the table's name; may be left out if the replay has only one table.
        batch_size: the batch size of `sample()` without an argument, and of iteration.
        priority_key: the entry of a TensorDict that has the priority of each item.
        beta: the exponent of the importance weights.
        timeout: seconds for which an insert or a sample waits for the table's limiter and for room;
            None: no limit.
        device: the device of samples; None: the CPU.
    """

    def __init__(
        self,
        replay: Replay | ReplayClient,
        *,
        table: str | None = None,
        batch_size: int | None = None,
        priority_key: str = "td_error",
        beta: float = 1.0,
        timeout: float | None = None,
        device: Any = None,
    ) -> None:
        self._replay = replay
        self._table = table
        self._batch_size = batch_size
        self._priority_key = priority_key
        self._beta = beta
        self._timeout = timeout
        self._device = device
        self._greatest = 1.0  # the greatest priority so far: new items get it, as in TorchRL

    @property
    def batch_size(self) -> int | None:
        """The batch size of `sample()` without an argument."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """The number of items that anyone inserted since the table was made or emptied."""
        return self._stats()["inserts"]

    def __len__(self) -> int:
        return self._stats()["size"]

    def add(self, data: TensorDictBase) -> int:
        """Inserts an item; returns its key."""
        return int(self.extend(data.unsqueeze(0))[0])

    def extend(self, tensordicts: TensorDictBase) -> Tensor:
        """Inserts the items along the first batch dimension; returns their keys, int64.

        An item's priority is its entry `priority_key`, or else the greatest one so far.

        Raises:
            ValueError: there is no batch dimension, or the priorities do not fit the items.
            TimeoutError: the table's limiter or lack of room kept items out until `timeout`.
        """
        if not tensordicts.batch_dims:
            raise ValueError("extend() takes a TensorDict with a batch dimension; add() takes one")
        given = tensordicts.get(self._priority_key, None)
        priorities = _each(self._greatest if given is None else given, tensordicts.shape[:1])
        keys = self._replay.extend(
            tensordicts.exclude(INDEX, WEIGHT, self._priority_key).to_dict(),
            priorities,
            table=self._table,
            timeout=self._timeout,
        )
        self._greatest = priorities.max(initial=self._greatest)
        return torch.from_numpy(keys)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Samples items that the table's sampler chooses.

        Returns:
            A TensorDict of batch size [batch_size], or of fewer items where time was up before the
            limiter had granted all; with `return_info`, a tuple of it and a dict
            with `"index"`, `"probabilities"`, `"priorities"` and `"times_sampled"`.

        Raises:
            ValueError: neither this call nor the constructor gives a batch size.
            TimeoutError: the limiter granted no item within `timeout`.
        """
        size = self._size(batch_size)
        batch = self._replay.sample(size, table=self._table, timeout=self._timeout)
        data = self._tensordict(batch)
        if not return_info:
            return data
        info = {name: getattr(batch, name) for name in ("probabilities", "priorities")}
        return data, {INDEX: data[INDEX], **info, "times_sampled": batch.times_sampled}

    def __iter__(self) -> Iterator[TensorDict]:
        """Yields samples without end and without a time limit, and samples two of them ahead."""
        with self._replay.batches(self._size(None), table=self._table) as batches:
            yield from map(self._tensordict, batches)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sets the priorities of the items with these keys; skips items that are gone.

        Raises:
            ValueError: a priority is negative or not finite, or `priority` is neither a number nor
                of a shape that begins with that of `index`.
        """
        keys = torch.as_tensor(index, dtype=torch.int64, device="cpu")
        priorities = _each(priority, keys.shape)
        self._replay.update_priorities(keys.reshape(-1).numpy(), priorities, table=self._table)
        self._greatest = priorities.max(initial=self._greatest)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of a sample's items to its entry `priority_key`.

        Raises:
            KeyError: it has no such entry.
        """
        self.update_priority(data[INDEX], data[self._priority_key])

    def empty(self) -> None:
        """Removes all items, and starts the counts anew."""
        self._replay.reset(table=self._table)

    def _stats(self) -> ReplayTableStats:
        tables = self._replay.stats()["tables"]
        name = next(iter(tables)) if self._table is None and len(tables) == 1 else self._table
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; the tables are {', '.join(tables)}")
        return tables[name]

    def _size(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("give a batch_size, here or to the buffer")
        return size

    def _tensordict(self, batch: Any) -> TensorDict:
        data = TensorDict(batch.data, batch_size=[len(batch)])
        data[INDEX] = torch.from_numpy(batch.keys)
        data[WEIGHT] = torch.from_numpy(batch.weights(self._beta))
        return data if self._device is None else data.to(self._device)


def _each(priorities: Any, items: torch.Size) -> np.ndarray:
    """One for each item: of several numbers the mean of their magnitudes."""
    values = torch.as_tensor(priorities).detach().to("cpu", torch.float64).abs()
    if values.dim() == 0:
        values = values.expand(items)
    if values.shape[: len(items)] != items:
        raise ValueError(
            f"items of shape {tuple(items)} need one priority each or more, got "
            f"{tuple(values.shape)}"
        )
    return values.reshape(items.numel(), values.shape[len(items) :].numel()).mean(-1).numpy()
