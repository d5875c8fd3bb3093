"""moolib's Group and Broker."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, NoReturn

import moolink
from moolink.compat.moolib.arguments import with_runtime_errors
from moolink.errors import Error
from moolink.internal.exceptions import copied

_LEAST_TIMEOUT = 1.0  # seconds: moolink notices a death at once, and other silence not earlier


class AllReduce(moolink.group.GroupFuture):
    """The future of a reduction, as :class:`moolink.group.GroupFuture`."""

    def __await__(self) -> Generator[Any, None, Any]:
        """Waits in an event loop, which always gets a turn: programs of moolib try again at once
        after an error, while another task of theirs calls update()."""
        if self.done():
            yield from asyncio.sleep(0).__await__()
        result = yield from super().__await__()
        return result

    __iter__ = __await__


class _FailedReduce(AllReduce):
    """The future of a reduction that could not be begun."""

    def __init__(self, error: Error) -> None:
        super().__init__([], lambda results: None)
        self._error = copied(error)

    def result(self, timeout: float | None = None) -> NoReturn:
        raise copied(self._error)

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException:
        return copied(self._error)

    def __await__(self) -> Generator[Any, None, NoReturn]:
        yield from asyncio.sleep(0).__await__()
        raise copied(self._error)

    __iter__ = __await__


@with_runtime_errors("__init__", "all_reduce", "set_sort_order", "set_timeout", "update")
class Group(moolink.Group):
    """An elastic set of peers, as :class:`moolink.Group`."""

    def set_timeout(self, seconds: float) -> None:
        """Sets how long a peer may be silent, at least 1 s."""
        super().set_timeout(max(seconds, _LEAST_TIMEOUT))

    def sync_id(self) -> int:
        """The number of the view, as :meth:`moolink.Group.epoch`."""
        return self.epoch()

    def all_reduce(
        self,
        name: str,
        data: Any,
        op: Any = None,
        *,
        num_trees: int | None = None,
        **options: Any,
    ) -> AllReduce:
        """Combines ``data`` of all members; see :meth:`moolink.Group.all_reduce`. ``num_trees`` has
        no effect."""
        try:
            made = super().all_reduce(name, data, op, **options)
        except Error as error:  # As in moolib, it is the future's: such as one of another epoch.
            return _FailedReduce(error)
        return AllReduce(made._futures, made._finish)


@with_runtime_errors("__init__", "listen", "set_name")
class Broker(moolink.Broker):
    """Where the peers of groups meet, as :class:`moolink.Broker`. By default it is the `first` one:
    programs of moolib expect their groups within a second."""

    __module__ = "moolib"

    def __init__(
        self, rpc: moolink.Rpc | None = None, *, first: bool = True, **options: Any
    ) -> None:
        super().__init__(rpc, first=first, **options)

    def update(self) -> None:
        """Does nothing: a broker of moolink needs no calls."""
