"""Helpers of the torch learners: networks and checkpoints, copies of weights and of data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import moolink.torch
from examples.common import checkpoint
from examples.common.environments import Environments, random_means
from examples.common.options import Options

N = TypeVar("N", bound=nn.Module)


def device_of(o: Options) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device


def make_net(kind: type[N], envs: Environments, o: Options, saved: dict[str, Any] | None) -> N:
    """A network `kind(envs, means of random play, options)` on its device: with the parameters of a
    checkpoint, or new and equal at all peers."""
    torch.manual_seed(o.seed)
    if saved is None:
        means = random_means(envs, o.seed, seed_envs=getattr(o, "deterministic", False))
    else:
        spaces = envs.observation_spaces.items()
        means = {k: np.zeros(s.shape, np.float32) for k, s in spaces if s.dtype == np.uint8}
    net = kind(envs, means, o)
    if saved is not None:
        load_saved(net, o, saved)
    torch.manual_seed(o.acting_seed)  # no two peers take the same actions
    return net.to(device_of(o))


def load_saved(net: nn.Module, o: Options, saved: dict[str, Any]) -> None:
    """Takes the parameters and buffers of a checkpoint. Raises moolink.FileError if they are of
    another network."""
    found = checkpoint.parameters(o, saved, net.state_dict())
    net.load_state_dict({name: torch.from_numpy(x) for name, x in found.items()})


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The model for a checkpoint."""
    optimizer_state = moolink.torch.optimizer_state(optimizer)
    return {"parameters": net.state_dict(), "optimizer": optimizer_state}


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


def to_device(x: Any, device: torch.device | str) -> Any:
    """A tree of dicts and tuples of arrays as tensors on a device. Once it returns, the arrays may
    be overwritten, except on the CPU, where the tensors share their memory.

    Copies to a GPU go through pinned memory, so that the host does not wait for them; torch reuses
    that memory once they are done.
    """
    if isinstance(x, dict):
        return {name: to_device(part, device) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(to_device(part, device) for part in x)
    x = x if isinstance(x, Tensor) else torch.from_numpy(x)
    if torch.device(device).type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x).to(device, non_blocking=True)
