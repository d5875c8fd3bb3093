"""A learner in gradient rounds of moolink and of DistributedDataParallel.

python -m benchmarks.backward_member HOST:PORT RANK/COUNT WIDTH LAYERS ROWS
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import distributed

import moolink
from tests.network.member import serve
from tests.waiting import until


class Learner:
    """A model for moolink, one for DistributedDataParallel, one for neither, and a batch."""

    def __init__(self, address: str, place: str, width: str, layers: str, rows: str) -> None:
        rank, count = map(int, place.split("/"))
        os.environ["GLOO_SOCKET_IFNAME"] = "uplink"
        host, port = address.rsplit(":", 1)
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{host}:{int(port) + 1}", rank=rank, world_size=count
        )
        self._count = count
        self._batch = torch.randn(int(rows), int(width))
        mine, theirs, bare = (
            torch.nn.Sequential(
                *[torch.nn.Linear(int(width), int(width)) for _ in range(int(layers))]
            )
            for _ in range(3)
        )
        self._mine, self._bare = mine, bare
        self._theirs = torch.nn.parallel.DistributedDataParallel(theirs)
        self._rpc = moolink.Rpc(f"learner-{rank}")
        self._rpc.connect(address)
        self._group = moolink.Group(self._rpc, "group")
        self._accumulator = moolink.Accumulator("model", mine.parameters(), group=self._group)
        self._accumulator.set_virtual_batch_size(count)

    def formed(self, members: list[str]) -> int:
        """Waits until all take part in rounds; returns the size of a model's gradients in bytes."""

        def ready() -> bool:
            self._pump()
            return len(self._group.members()) == self._count and self._accumulator.wants_gradients()

        until(ready, "the accumulator's members")
        return sum(p.numel() * p.element_size() for p in self._mine.parameters())

    def _pump(self) -> bool:
        accumulator = self._accumulator
        accumulator.update()
        if accumulator.wants_state():
            accumulator.set_state(None)
        if accumulator.has_new_state():
            accumulator.state()
        return accumulator.has_gradients() or accumulator.wants_gradients()

    def step(self, way: str) -> float:
        """Returns the seconds from a common start until the mean is in the gradients."""
        until(lambda: self._pump() and self._accumulator.wants_gradients(), "the next turn")
        models = {"backward": self._bare, "ddp": self._theirs}
        loss = models.get(way, self._mine)(self._batch).square().mean()
        ways: dict[str, Callable[[torch.Tensor], None]] = {
            "backward": torch.Tensor.backward,
            "ddp": torch.Tensor.backward,
            "after": self._after,
            "during": self._during,
        }
        distributed.barrier()
        begin = time.monotonic()
        ways[way](loss)
        seconds = time.monotonic() - begin
        if way in ("after", "during"):
            self._accumulator.zero_gradients()
        models.get(way, self._mine).zero_grad(set_to_none=False)
        return seconds

    def _after(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._accumulator.reduce_gradients(1)
        self._await_round()

    def _during(self, loss: torch.Tensor) -> None:
        with self._accumulator.reduce_during_backward(1):
            loss.backward()
        self._await_round()

    def _await_round(self) -> None:
        self._pump()
        while not self._accumulator.has_gradients():
            self._accumulator.wait(1.0)
            self._pump()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Learner(*sys.argv[1:]))
