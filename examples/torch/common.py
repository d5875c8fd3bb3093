"""Helpers of the torch learners: copies of weights and of data."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


def load_published(net: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Copies weights of a `moolink.Subscriber` with `arrays="numpy"` into a network.

    On a CPU that is one copy, from memory that the publisher shares.

    Raises:
        KeyError: the network has a parameter or buffer that the weights have not.
        ValueError: one has another shape.
    """
    for name, mine in net.state_dict().items():
        if mine.device.type == "cpu":
            np.copyto(mine.numpy(), weights[name])
        else:
            mine.copy_(torch.from_numpy(weights[name].copy()))  # torch takes writable arrays only


def make_deterministic() -> None:
    """The same operation has the same bits each time, however many cores there are."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    # As use_deterministic_algorithms(True), which also imports torch's compiler: 1.4 s.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # all of it is written here
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)  # a sum that is divided among threads has other bits


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. Once it returns, `x` may be overwritten.

    Copies to a GPU go through pinned memory, so that the host does not wait for them; torch reuses
    that memory once they are done. On the CPU it is `x` itself.
    """
    if torch.device(device).type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x).to(device, non_blocking=True)
