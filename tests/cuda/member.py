"""A member of a group of two processes that share a CUDA device; ends with 0 if all went well."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import moolink
from tests.waiting import formed


def main(name: str, broker: str) -> None:
    """Joins, and computes with the other one."""
    with moolink.Rpc(name, device="same", timeout=60) as rpc:
        rpc.connect(broker)
        rpc.define("echo", lambda value: value)
        with moolink.Group(rpc, "processes") as group:
            formed([group], 2)
            rank = group.members().index(name)
            for size in (1, 5000, 3_000_000):
                tensor = torch.full((size,), float(rank + 1), device="cuda")
                total = group.all_reduce(f"sum {size}", tensor).result(60)
                assert total.is_cuda
                assert (total == 3).all()
                group.all_reduce(f"in place {size}", tensor, inplace=True).result(60)
                assert (tensor == 3).all()
                other = group.members()[1 - rank]
                echoed = rpc.sync(other, "echo", tensor)
                assert echoed.is_cuda
                assert torch.equal(echoed, tensor)
            group.barrier("end").result(60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
