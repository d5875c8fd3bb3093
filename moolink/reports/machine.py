"""The core's facts about this machine, for `moolink doctor` and tests. Not for users."""

from __future__ import annotations

from typing import TypedDict


class OpenSslInfo(TypedDict):
    """The library that encrypts tcp."""

    usable: bool
    version: str
    where: str  # the file that it was found in
    reason: str  # why there is none that can be used


class VerbsInfo(TypedDict):
    """The library and the device that RDMA uses."""

    usable: bool
    library: str  # the file that libibverbs was loaded from; empty: it was not
    chosen: str  # device, port and GID or LID
    reason: str  # why RDMA is not used
    devices: list[str]  # each port that was examined, with the reason against it
