"""Peers with accumulators, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import moolink
from tests.accumulator.loops import Make


@pytest.fixture
def make(broker_address: str) -> Iterator[Make]:
    """Returns a function that makes a peer with an accumulator."""
    with contextlib.ExitStack() as stack:

        def make_(name: str, parameters: list[torch.Tensor], *args: object, **options: object):
            version = options.pop("version", 0)
            rpc = stack.enter_context(moolink.Rpc(name))
            group = stack.enter_context(moolink.Group(rpc, "group"))
            peer = stack.enter_context(
                moolink.Accumulator("model", parameters, *args, group=group, **options)
            )
            peer.set_model_version(version)
            rpc.connect(broker_address)  # from now on a group may begin
            return peer

        yield make_
