"""Broker: where the peers of groups meet."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from moolink._core import BrokerCore
from moolink.internal.keywords import names_keywords
from moolink.rpc import Rpc
from moolink.rpc.report import define_for_the_job

if TYPE_CHECKING:
    from moolink.tokens import Identity, Key

MEASURE = "moolink.broker/measure"  # takes a value: for `moolink doctor HOST:PORT`
GROUPS = "moolink.broker/groups"  # returns names of groups with their numbers of members
_MOST_GROUPS = 64  # of an answer


@names_keywords
class Broker(BrokerCore):
    """Where the peers of groups meet: it alone numbers the views of a group.

    It is outside of the data path and keeps nothing that its members cannot tell it again: training
    goes on while it is away. Needs no pumping. It is a context manager that closes itself.

    With the job's token it serves every group of the job, members that hold the key of one group
    among them, each of which sees and reaches its own group only. With a group's key it serves that
    group.

    Args:
        rpc: the peer to be a broker on; default: a new one, called "broker".
        first: whether it is known that no members of an earlier broker can be around; then the
            first group forms at once instead of after a second of listening.
        token, token_file, insecure: of the new peer, as of Rpc.

    Raises:
        moolink.AuthError: as Rpc.
        TypeError: `rpc` is neither an Rpc nor None.
        ValueError: the arguments contradict one another.
    """

    __module__ = "moolink"  # the name that users know

    def __init__(
        self,
        rpc: Rpc | None = None,
        *,
        first: bool = False,
        token: str | os.PathLike[str] | Key | Identity | None = None,
        token_file: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        if not isinstance(rpc, Rpc | None):
            raise TypeError(f"a Broker is made of a moolink.Rpc or without one, not of {rpc!r}")
        if rpc is not None and (token is not None or token_file is not None or insecure):
            raise ValueError("the token of a broker on an Rpc is that of the Rpc")
        # An Rpc without references is closed.
        # Its messages are few and small: RDMA would cost a queue pair a member and gain nothing.
        self.rpc = rpc or Rpc(
            "broker",
            transports=["shm", "tcp"],
            token=token,
            token_file=token_file,
            insecure=insecure,
        )
        super().__init__(self.rpc, first=first, owns=rpc is None)
        if rpc is None:
            self.rpc.define(MEASURE, lambda value: None)
            of = weakref.ref(self)  # a broker without other references is closed
            define_for_the_job(self.rpc, GROUPS, lambda: _sizes(of()))


def _sizes(broker: Broker | None) -> dict[str, int]:
    if broker is None:
        return {}
    return {name: len(broker.members(name)) for name in broker.groups()[:_MOST_GROUPS]}
