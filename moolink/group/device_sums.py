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

    Raises:
        ValueError: `MOOLINK_NCCL` is set, but is neither 0 nor 1.
    """
    setting = os.environ.get("MOOLINK_NCCL", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"MOOLINK_NCCL is {setting!r}: 1 turns it on, 0 turns it off")
    if setting != "1" or importlib.util.find_spec("torch") is None:
        return None
    from moolink.torch.communicators import Nccl
    from moolink.torch.device_sums import DeviceSums

    return lambda group: DeviceSums(group, Nccl())
