"""A broker and peers of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import moolink


@pytest.fixture
def join(broker_address: str) -> Iterator[Callable[..., moolink.Group]]:
    """Returns a function that makes a peer and lets it join a group."""
    with contextlib.ExitStack() as stack:

        def join_(name: str, group: str = "group", sort: int = 0) -> moolink.Group:
            rpc = stack.enter_context(moolink.Rpc(name))
            rpc.connect(broker_address)
            member = stack.enter_context(moolink.Group(rpc, group))
            if sort:
                member.set_sort_order(sort)
            return member

        yield join_
