"""From the reply to a batch to the replies of its calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moolink._core import check_array
from moolink.data import nodes
from moolink.data.batch_layout import Values, is_array
from moolink.data.frameworks import as_numpy, is_torch
from moolink.internal.countdown import after_all


class Return(Protocol):
    """The way back of a call, such as an RpcDeferredReturn."""

    def __call__(self, value: Any = None) -> None: ...
    def error(self, exception: BaseException) -> None: ...
    def refuse(self, reason: str) -> None: ...
    def reject(self, reason: str) -> None: ...
    def cancelled(self) -> bool: ...
    def add_cancel_callback(self, callback: Callable[[], object]) -> None: ...


@dataclasses.dataclass(frozen=True)
class BatchRules:
    """How a batch shows values that are no arrays, and which parts of a reply hold one for each
    call; a list or tuple that does not is structure."""

    values: Values = "tuple"
    list_has_entries: bool = True
    tuple_has_entries: bool = True


class BatchReturn:
    """The way back of a batch: call it once with the reply to the whole batch, from any thread.

    Each call of the batch gets:

    - of an array with as many rows as the batch: its row (``mode="cat"``: its rows);
    - of a list: its entry; the list has one for each call, in order (entries for the batch's
      padding may follow); so has a tuple without containers and arrays;
    - of a dict, a namedtuple, a dataclass, a type registered as a pytree with JAX, or a tuple that
      holds containers or arrays: the same with its part of each;
    - of None and of any other value, scalars among them: that value.

    An exception instance as an entry is raised, as RemoteError, at that call alone. A reply that
    cannot be split makes all calls fail with the reason.
    """

    def __init__(
        self,
        returns: Sequence[Return],
        sizes: Sequence[int] | None,
        rows: int,
        succeeded: Callable[[], object],
        rules: BatchRules,
    ) -> None:
        self._rules = rules
        self._returns = returns
        self._sizes = sizes
        self._rows = rows
        self._succeeded = succeeded

    def __len__(self) -> int:
        """The number of calls in the batch, padding not counted."""
        return len(self._returns)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each call in the batch."""
        return [1] * len(self._returns) if self._sizes is None else list(self._sizes)

    def __call__(self, value: Any = None) -> None:
        """Sends each call its part of the reply."""
        if isinstance(value, BaseException):
            self.error(value)
            return
        try:
            values = self._split(value, "the reply")
        except (TypeError, ValueError) as wrong:
            self.error(wrong)
            return
        self._succeeded()
        for reply, part in zip(self._returns, values, strict=True):
            if isinstance(part, BaseException):
                reply.error(part)
            else:
                reply(part)

    def error(self, exception: BaseException) -> None:
        """Makes all calls of the batch fail."""
        for reply in self._returns:
            reply.error(exception)

    def refuse(self, reason: str) -> None:
        """Makes all calls of the batch fail with QueueFull: they did not run."""
        for reply in self._returns:
            reply.refuse(reason)

    def reject(self, reason: str) -> None:
        """Makes all calls of the batch fail: they cannot be served."""
        for reply in self._returns:
            reply.reject(reason)

    def cancelled(self) -> bool:
        """Whether no caller waits any more for any of the calls."""
        return all(reply.cancelled() for reply in self._returns)

    def add_cancel_callback(self, callback: Callable[[], object]) -> None:
        """Calls ``callback()`` on a worker thread once no caller waits for any of the calls."""
        count_down = after_all(len(self._returns), callback)
        for reply in self._returns:
            reply.add_cancel_callback(count_down)

    # Splitting: each returns a list with one part for each call.

    def _split(self, value: Any, path: str) -> list[Any]:
        if _has_rows(value):
            return self._split_rows(value, path)
        if isinstance(value, dict):
            parts = {key: self._split(part, f"{path}[{key!r}]") for key, part in value.items()}
            return self._join(list(parts.values()), lambda own: dict(zip(parts, own, strict=True)))
        if self._has_entries(value):
            return self._split_entries(value, path)
        node = nodes.apart(value)
        if node is None:
            return [value] * len(self)
        of_node = zip(node.keys, node.parts, strict=True)
        split = [self._split(part, f"{path}[{key!r}]") for key, part in of_node]
        return self._join(split, node.rebuild)

    def _has_entries(self, value: Any) -> bool:
        if isinstance(value, list):
            return self._rules.list_has_entries
        return self._rules.tuple_has_entries and isinstance(value, tuple) and _is_flat(value)

    def _join(self, parts: list[list[Any]], make: Callable[[Any], Any]) -> list[Any]:
        """Makes each call's reply of its parts; an exception among them is all of it."""
        joined = []
        for i in range(len(self)):
            own = [part[i] for part in parts]
            wrong = [part for part in own if isinstance(part, BaseException)]
            joined.append(wrong[0] if wrong else make(own))
        return joined

    def _split_rows(self, value: Any, path: str) -> list[Any]:
        if value.shape[0] != self._rows:
            raise ValueError(
                f"{path}: an array has one row for each of the batch: expected {self._rows}, got "
                f"shape {tuple(value.shape)}"
            )
        check_array(value, path)
        rows = value.detach().cpu() if is_torch(value) else as_numpy(value)
        if self._sizes is None:
            return [rows[i] for i in range(len(self))]
        ends = list(itertools.accumulate(self._sizes))
        return [rows[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]

    def _split_entries(self, value: Sequence[Any], path: str) -> list[Any]:
        padded = len(self) if self._sizes is not None else self._rows
        if len(value) not in (len(self), padded):
            raise ValueError(
                f"{path}: a {type(value).__name__} has one entry for each call of the batch: "
                f"expected {len(self)}, got {len(value)} (what is made of several batched arrays "
                "is a tuple or a dict of them)"
            )
        return list(value[: len(self)])


def _has_rows(value: Any) -> bool:
    return is_array(value) and len(value.shape) > 0


def _is_flat(value: tuple[Any, ...]) -> bool:
    if not value or hasattr(value, "_fields"):
        return False
    return not any(_is_container(part) or _has_rows(part) for part in value)


def _is_container(part: Any) -> bool:
    return part is not None and nodes.apart(part) is not None
