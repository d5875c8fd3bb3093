"""The storage, sampler and writer that a buffer gives to TorchRL's code, and the table that
TorchRL's own components describe."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage
from torchrl.data.replay_buffers import samplers, storages, writers

from moolink import files
from moolink.errors import FileError
from moolink.replay import Prioritized, Replay, Table, Uniform
from moolink.torchrl.table_view import TableView, batch_of_one, first_of, has_no_items

_FILE = "items.pt"
_MOST_ITEMS = 2**32 - 1  # of a table
_KIND, _VERSION = "buffer", 2


def not_changed() -> NoReturn:
    """Refuses to change items."""
    raise TypeError("items of a replay do not change: other processes may be reading them")


class TableStorage(storages.Storage):  # type: ignore[misc]
    """The items of a table. An index is a position, counted from the oldest item, or a key."""

    def __init__(self, view: TableView) -> None:
        # Not the base's constructor: the table determines the size, and may be on a server.
        self._view = view
        self._compilable = False
        self.checkpointer = None
        self.device = view.device

    @property
    def max_size(self) -> int:
        """The most items that the table can hold."""
        return self._view.max_size

    def __len__(self) -> int:
        return self._view.stats()["size"]

    def get(self, index: Any) -> Any:
        """The items at these positions, or with these keys."""
        _, data = self._view.items(index)
        one = not isinstance(index, slice) and np.ndim(index) == 0
        return first_of(data) if one else data

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Refused."""
        not_changed()

    def contains(self, item: Any) -> Any:
        """Whether there is an item at this position, or with this key."""
        there, _ = self._view.replay._items(np.empty(0, np.int64), self._view.table)
        index = torch.as_tensor(item)
        return torch.isin(index, torch.from_numpy(there)) | ((index >= 0) & (index < len(there)))

    def state_dict(self) -> dict[str, Any]:
        """All items with their priorities."""
        items, data = self._view.items()
        tree = data.to_dict() if isinstance(data, TensorDictBase) else data
        return {"data": tree, "priorities": torch.from_numpy(np.array(items.priorities))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Empties the table, and inserts the items, which get new keys."""
        self._empty()
        if len(priorities := state_dict["priorities"]):
            self._view.insert(state_dict["data"], priorities.numpy())

    def dumps(self, path: Any) -> None:
        """Writes `state_dict()` into a folder, whole or not at all.

        Raises:
            OSError: it cannot be written; the former file stays.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        state = self.state_dict()
        # Items may be private to the user.
        with files.written(Path(path) / _FILE, mode=0o600) as file:
            torch.save(state, file)
            files.seal(file, _KIND, _VERSION)

    def loads(self, path: Any) -> None:
        """As `load_state_dict`, from a folder.

        Raises:
            FileError: the file is damaged; the table is as it was.
            OSError: the file cannot be read.
        """
        name = Path(path) / _FILE
        with files.naming(name), files.open_data(name) as file:
            files.check_seal(file, name, _KIND, _VERSION)
            file.seek(0)
            try:
                state = torch.load(file, weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                # Its checksum is right: another program has written it.
                raise FileError(f"{name} is not understood: {error}", path=str(name)) from error
        self.load_state_dict(state)

    def _empty(self) -> None:
        self._view.replay.reset(table=self._view.table)


class _Stateless:
    """The state is in the table."""

    def __init__(self, view: TableView) -> None:
        super().__init__()
        self._view = view

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def dumps(self, path: Any) -> None:
        """Writes nothing."""

    def loads(self, path: Any) -> None:
        """Reads nothing."""


class TableSampler(_Stateless, samplers.Sampler):  # type: ignore[misc]
    """The table's sampler."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """The keys of a sample, and an empty dict."""
        return torch.from_numpy(self._view.sample(batch_size)[0].keys), {}

    @property
    def default_priority(self) -> float:
        """The priority of an item that is inserted without one."""
        return self._view.greatest

    def _empty(self) -> None:
        """The storage empties the table."""


class TableWriter(_Stateless, writers.Writer):  # type: ignore[misc]
    """Inserts into the table."""

    def add(self, data: Any) -> int:
        """Inserts an item; returns its key."""
        return int(self.extend(batch_of_one(data))[0])

    def extend(self, data: Any) -> Tensor:
        """Inserts the items along the first dimension; returns their keys."""
        if has_no_items(data):
            return torch.empty(0, dtype=torch.int64)
        size = len(torch.utils._pytree.tree_leaves(data)[0])
        return self._view.insert(data, np.full(size, self._view.greatest))

    @property
    def _write_count(self) -> int:
        return self._view.stats()["inserts"]

    @property
    def _cursor(self) -> int:
        return self._write_count % self._view.max_size

    def _empty(self, empty_write_count: bool = True) -> None:
        """The storage empties the table."""


def described(
    storage: Any, sampler: Any, writer: Any, generator: torch.Generator | None
) -> tuple[Replay, float, Any]:
    """A replay of one table as TorchRL's components describe it, the exponent of the importance
    weights, and the device of samples.

    Raises:
        TypeError: a table cannot do what one of them does.
    """
    sampler = _made(sampler, samplers.Sampler)
    writer = _made(writer, writers.Writer)
    beta = 1.0
    selector: Any = Uniform()
    if type(sampler) is samplers.PrioritizedSampler:
        selector, beta = Prioritized(sampler._alpha), sampler._beta
    elif type(sampler) not in (type(None), samplers.RandomSampler):
        raise _other("sampler", sampler, "a RandomSampler or a PrioritizedSampler")
    if type(writer) not in (
        type(None),
        writers.RoundRobinWriter,
        writers.TensorDictRoundRobinWriter,
    ):
        raise _other("writer", writer, "a RoundRobinWriter")
    replay, device = stored_like(storage, selector, generator)
    return replay, float(beta), device


def stored_like(
    storage: Any, selector: Any, generator: torch.Generator | None
) -> tuple[Replay, Any]:
    """A replay of one table of a storage's size with a seed that `generator` draws, and the device
    of samples.

    Raises:
        TypeError: a table cannot do what the storage does.
    """
    storage = ListStorage(1000) if storage is None else _made(storage, storages.Storage)
    if type(storage) not in (ListStorage, LazyTensorStorage, LazyMemmapStorage):
        raise _other("storage", storage, "a ListStorage, LazyTensorStorage or LazyMemmapStorage")
    if storage.ndim != 1 or len(storage):
        raise TypeError("a storage describes a table if it has one dimension and no items yet")
    folder = getattr(storage, "scratch_dir", None)
    device = getattr(storage, "device", None)
    on_host = device in (None, "auto") or torch.device(device).type == "cpu"
    # TorchRL's own lists have no limit unless one is given.
    table = Table("buffer", min(storage.max_size, _MOST_ITEMS), selector)
    replay = Replay(table, seed=_drawn(generator), spill=folder)
    return replay, None if on_host else device


def _drawn(generator: torch.Generator | None) -> int | None:
    if generator is None:
        return None
    return int(torch.randint(1 << 62, (), generator=generator, device=generator.device))


def _made(component: Any, kind: type) -> Any:
    """The component; TorchRL also takes a function that makes it."""
    return component if component is None or isinstance(component, kind) else component()


def _other(name: str, given: Any, like: str) -> TypeError:
    return TypeError(
        f"a table has no {name} like {type(given).__name__}: give {like}, or a moolink replay with "
        "the table that you want"
    )
