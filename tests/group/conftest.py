"""A broker and peers of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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


@pytest.fixture
def member(join: Callable[..., moolink.Group]) -> Iterator[Callable[..., moolink.Group]]:
    """Returns a function that makes a member with a backend of communicators."""
    from moolink.torch.device_sums import DeviceSums
    from tests.group.gloo import Gloo, N

    with contextlib.ExitStack() as stack:

        def make(name: str, backend: Any = None) -> moolink.Group:
            group = join(name)
            group._device_sums = DeviceSums(group, backend or Gloo(), least=4 * N)
            stack.callback(group.close)
            return group

        yield make
