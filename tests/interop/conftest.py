"""Two peers of this process, in one group, and functions that run at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import moolink
from tests.waiting import until

Join = Callable[..., moolink.Group]
Together = Callable[..., list[Any]]


@pytest.fixture
def join(broker_address: str) -> Iterator[Join]:
    """Returns a function that makes a peer and lets it join a group."""
    with contextlib.ExitStack() as stack:

        def join_one(name: str, group: str = "group") -> moolink.Group:
            rpc = stack.enter_context(moolink.Rpc(name))
            rpc.connect(broker_address)
            return stack.enter_context(moolink.Group(rpc, group))

        yield join_one


def all_see(groups: list[moolink.Group], members: int) -> None:
    """Updates the groups until each shows that many members, in the same epoch."""

    def seen() -> bool:
        for group in groups:
            group.update()
        return {len(group.members()) for group in groups} == {members} and (
            len({group.epoch() for group in groups}) == 1
        )

    until(seen, f"{members} members")


@pytest.fixture
def groups(join: Join) -> tuple[moolink.Group, moolink.Group]:
    """Two members, a and b, of one group."""
    a, b = join("a"), join("b")
    a.set_sort_order(-1)
    all_see([a, b], 2)
    return a, b


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions at the same time; returns their results, or what they raised."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results
