"""A rank of torch.distributed's gloo, which takes commands as ``tests/network/member.py`` does.

    python -m benchmarks.gloo_member HOST:PORT RANK/COUNT

Rank 0 serves the ranks' store at the next port.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import distributed

from tests.network.member import elements, serve


class Rank:
    """One rank, which gives and gets what a member of a moolink group does."""

    def __init__(self, address: str, place: str) -> None:
        self.name = place
        rank, count = map(int, place.split("/"))
        os.environ["GLOO_SOCKET_IFNAME"] = "uplink"
        host, port = address.rsplit(":", 1)  # of moolink's broker; the store is beside it
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{host}:{int(port) + 1}", rank=rank, world_size=count
        )
        self._data: torch.Tensor | None = None

    def reduce(self, name: str, count: int, dtype: str = "float32") -> dict[str, Any]:
        """Reduces in place, as gloo always does; the time is from a common start."""
        if self._data is None or len(self._data) != count:
            self._data = torch.from_numpy(elements(self.name, count, dtype))
        distributed.barrier()
        begin, used = time.monotonic(), time.process_time()
        distributed.all_reduce(self._data)
        return {
            "digest": name,
            "seconds": time.monotonic() - begin,
            "cpu_seconds": time.process_time() - used,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Rank(*sys.argv[1:]))
