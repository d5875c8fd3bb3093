"""A process that receives arrays on a device, for test_ipc.py and, with a fake driver, for others.

    python -m tests.cuda.receiver [same|cpu]

Prints its address and ends with its standard input.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import moolink
from moolink import _core
from moolink.data import device_arrays


def empty(shape: tuple[int, ...], dtype: str, device: int) -> tuple[Any, int, None]:
    """Replaces torch's allocation on a device: this torch has no CUDA."""
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    return tensor, tensor.data_ptr(), None


if not torch.cuda.is_available():
    device_arrays.empty_of_torch = empty


def main() -> None:
    with moolink.Rpc("receiver", arrays="torch", device=sys.argv[1], timeout=20) as rpc:
        rpc.define("echo", lambda value: value)
        rpc.define("write", lambda tensor: tensor.add_(1))
        rpc.define("cuda_info", _core.cuda_info)
        # Another peer of this process, which wants arrays in the host's memory.
        with moolink.Rpc("host", timeout=20) as host:
            host.define("echo", lambda value: value)
            host.define("write", lambda array: array.__iadd__(1))
            print(rpc.listen("127.0.0.1:0")[0], host.listen("127.0.0.1:0")[0], flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
