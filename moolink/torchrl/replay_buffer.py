"""A replay's table with the methods of TorchRL's replay buffers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn.utils import _set_dispatch_td_nn_modules
from torch import Tensor
from torchrl.data import ReplayBuffer as AnyReplayBuffer
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.utils import pin_memory_output

from moolink.replay import Prioritized, Replay, ReplayClient
from moolink.torchrl import components
from moolink.torchrl.table_view import TableView, batch_of_one, has_no_items

INDEX = "index"
WEIGHT = "priority_weight"  # TorchRL's losses and users read the weights from this key

_OPTIONS = {
    *("collate_fn", "pin_memory", "prefetch", "transform", "transform_factory"),
    "dim_extend",
}
"""Arguments that TorchRL's constructor takes with their meaning."""

_DEFAULTS = inspect.signature(AnyReplayBuffer.__init__).parameters
"""Other arguments may be given with TorchRL's default."""


class ReplayBuffer(TensorDictReplayBuffer):  # type: ignore[misc]
    """A table of a :class:`moolink.Replay` or :class:`moolink.ReplayClient` with the methods of
    `torchrl.data.TensorDictReplayBuffer`, for TorchRL's collectors, trainers and losses:

        table = moolink.replay.Table("steps", 100_000, sampler=moolink.replay.Prioritized(0.6))
        buffer = moolink.torchrl.ReplayBuffer(moolink.Replay(table), batch_size=256, beta=0.4)

    An item is a TensorDict without a batch dimension, or a tensor, or a tuple of tensors. Samples
    that are TensorDicts have the items' keys as `"index"` and importance weights as
    `"priority_weight"`, both [batch_size].

    Args:
        replay: a replay of this process, or a client of one. Any number of buffers may share it.
            None: a replay of its own, as `storage`, `sampler` and `writer` describe it.
        table: the table's name; may be left out if the replay has only one table.
        batch_size: the batch size of `sample()` without an argument, and of iteration.
        priority_key: the entry of a TensorDict that has the priority of each item.
        beta: the exponent of the importance weights; None: that of `sampler`, or else 1.
        timeout: seconds for which an insert or a sample waits for items, for the table's limiter
            and for room. None: no limit, but a sample of an empty table fails at once.
        device: the device of samples; None: the CPU.
        storage: TorchRL's `ListStorage`, `LazyTensorStorage` or `LazyMemmapStorage`, without items:
            its size is the table's, its folder the replay's `spill`, its device that of samples.
        sampler: TorchRL's `RandomSampler` or `PrioritizedSampler`.
        writer: TorchRL's `RoundRobinWriter` or `TensorDictRoundRobinWriter`.
        generator: one draw of it is the seed of the new replay.
        compilable, delayed_init: without effect: a table is never part of a compiled graph, and a
            buffer is initialized at once.
        options: `collate_fn`, `pin_memory`, `prefetch`, `transform`, `transform_factory` and
            `dim_extend` (0), as for TorchRL's buffer; its other arguments with their default.

    Raises:
        TypeError: a table cannot do what one of TorchRL's components does, there is a replay
            besides components, or an option is unknown.
        ValueError: `dim_extend` is not 0.
    """

    def __init__(
        self,
        replay: Replay | ReplayClient | None = None,
        *,
        table: str | None = None,
        batch_size: int | None = None,
        priority_key: str = "td_error",
        beta: float | None = None,
        timeout: float | None = None,
        device: Any = None,
        storage: Any = None,
        sampler: Any = None,
        writer: Any = None,
        generator: torch.Generator | None = None,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        **options: Any,
    ) -> None:
        others = options.keys() - _OPTIONS
        if refused := [name for name in others if not _is_default(name, options[name])]:
            raise TypeError(f"a replay's table has no {', '.join(sorted(refused))}")
        for name in others:
            del options[name]
        described = 1.0
        if replay is None:
            replay, described, place = components.described(storage, sampler, writer, generator)
            device = place if device is None else device
        elif not (storage is sampler is writer is generator is None):
            raise TypeError(
                "give a replay, or the storage, sampler, writer and generator of a new one"
            )
        self._beta = described if beta is None else beta
        self._view = TableView(replay, table, timeout, device)
        super().__init__(
            priority_key=priority_key,
            storage=components.TableStorage(self._view),
            sampler=components.TableSampler(self._view),
            writer=components.TableWriter(self._view),
            batch_size=batch_size,
            delayed_init=False,
            **options,
        )
        if self.dim_extend:
            raise ValueError("items lie along the first dimension: dim_extend is 0")

    def add(self, data: Any) -> int:
        """Inserts an item; returns its key."""
        return int(self.extend(batch_of_one(data))[0])

    def extend(self, tensordicts: Any, *, update_priority: bool | None = None) -> Tensor:
        """Inserts the items along the first batch dimension, or those of a list; returns their
        keys, int64.

        An item's priority is its entry `priority_key`, or else the greatest one so far; with
        `update_priority=False` the greatest one.

        Raises:
            ValueError: there is no batch dimension, or the priorities do not fit the items.
            TimeoutError: the table's limiter or lack of room kept items out until `timeout`.
        """
        if has_no_items(tensordicts):
            return torch.empty(0, dtype=torch.int64)
        data = (
            torch.utils._pytree.tree_map(_stacked, *tensordicts)
            if _is_list(tensordicts)
            else tensordicts
        )
        if len(self._transform):
            data = _applied(self._transform.inv, data)
        if data is None:
            return torch.zeros((0, 1), dtype=torch.int64)
        given = None
        if isinstance(data, TensorDictBase):
            if not data.batch_dims:
                raise ValueError(
                    "extend() takes a TensorDict with a batch dimension; add() takes one"
                )
            if update_priority is not False:
                given = data.get(self.priority_key, None)
            size = data.shape[:1]
            data = data.exclude(INDEX, WEIGHT, self.priority_key)
        else:
            size = torch.as_tensor(torch.utils._pytree.tree_leaves(data)[0]).shape[:1]
        priorities = _each(self._view.greatest if given is None else given, size)
        return self._view.insert(data, priorities)

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: Any = None
    ) -> Any:
        """Samples items that the table's sampler chooses.

        Returns:
            A TensorDict of batch size [batch_size], or of fewer items where time was up before the
            limiter had granted all; with `return_info`, a tuple of it and a dict
            with `"index"`, `"priority_weight"`, `"probabilities"`, `"priorities"` and
            `"times_sampled"`.

        Raises:
            RuntimeError: neither this call nor the constructor gives a batch size, or the table is
                empty and there is no `timeout`.
            TimeoutError: the limiter granted no item within `timeout`.
        """
        data, info = AnyReplayBuffer.sample(self, batch_size, return_info=True)
        return (data, info) if return_info else data

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sets the priorities of the items with these keys; skips items that are gone.

        Raises:
            ValueError: a priority is negative or not finite, or `priority` is neither a number nor
                of a shape that begins with that of `index`.
        """
        keys = torch.as_tensor(index, dtype=torch.int64, device="cpu")
        priorities = _each(priority, keys.shape)
        view = self._view
        view.replay.update_priorities(keys.reshape(-1).numpy(), priorities, table=view.table)
        view.greatest = priorities.max(initial=view.greatest)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of a sample's items to its entry `priority_key`.

        Raises:
            KeyError: it has no such entry.
        """
        self.update_priority(data[INDEX], data[self.priority_key])

    def set_at_(self, key: Any, value: Any, index: Any) -> NoReturn:
        """Refused: items do not change."""
        components.not_changed()

    def set_(self, key: Any, value: Any) -> NoReturn:
        """Refused: items do not change."""
        components.not_changed()

    def update_(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused: items do not change."""
        components.not_changed()

    def set_storage(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refused: a buffer keeps its table."""
        raise TypeError("a buffer keeps its table: make another buffer")

    set_sampler = set_writer = set_storage

    def share(self, shared: bool = True) -> Any:
        """Refused: a ReplayServer shares a replay."""
        if shared:
            raise TypeError("share a replay by a moolink.ReplayServer, and use its clients")
        return super().share(shared)

    @pin_memory_output  # type: ignore[untyped-decorator]
    def _sample(self, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, data = self._view.sample(batch_size)
        weights = torch.from_numpy(batch.weights(self._beta))
        info = {INDEX: torch.from_numpy(batch.keys), WEIGHT: weights}
        if isinstance(data, TensorDictBase):
            for name, values in info.items():
                data[name] = values
        for name in ("probabilities", "priorities", "times_sampled"):
            info[name] = getattr(batch, name)
        data = self._collate_fn(data)
        return _applied(self._transform, data) if len(self._transform) else data, info

    def _get_collate_fn(self, collate_fn: Any) -> None:
        self._collate_fn = (lambda data: data) if collate_fn is None else collate_fn


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a table of its own that samples by priorities, as
    `torchrl.data.TensorDictPrioritizedReplayBuffer`.

    Args:
        alpha: the exponent of the priorities.
        beta: the exponent of the importance weights.
        storage, generator, options: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        storage: Any = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        replay, device = components.stored_like(storage, Prioritized(alpha), generator)
        super().__init__(replay, beta=beta, device=options.pop("device", device), **options)


def _is_default(name: str, value: Any) -> bool:
    return name in _DEFAULTS and value is _DEFAULTS[name].default


def _applied(transform: Callable[[Any], Any], data: Any) -> Any:
    # Else a transform takes a dict or a tensor for the entries of a TensorDict.
    with _set_dispatch_td_nn_modules(isinstance(data, TensorDictBase)):
        return transform(data)


def _is_list(data: Any) -> bool:
    return isinstance(data, list)


def _stacked(*leaves: Any) -> Tensor:
    return torch.stack([torch.as_tensor(leaf) for leaf in leaves])


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
