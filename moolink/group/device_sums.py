"""Whether a group sums large CUDA tensors by NCCL."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moolink.group.group import Group
    from moolink.torch.device_sums import DeviceSums


def device_sums() -> Callable[[Group], DeviceSums] | None:
    """Returns a function that makes a group's `DeviceSums`; None unless `MOOLINK_NCCL` is 1 and
    torch is installed.

    This imports torch, which takes seconds, so call it before the peer joins the group: rank 0 may
    ask a new member at once, and takes a member without the function for one without NCCL.
    """
    if os.environ.get("MOOLINK_NCCL") != "1" or importlib.util.find_spec("torch") is None:
        return None
    from moolink.torch.communicators import Nccl
    from moolink.torch.device_sums import DeviceSums

    return lambda group: DeviceSums(group, Nccl())
