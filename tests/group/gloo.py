"""Sums by torch's gloo, on CPU tensors, in place of NCCL."""

from __future__ import annotations

import concurrent.futures
import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store

import moolink
from tests.waiting import TIMEOUT, formed, until

N = 5000  # elements of a tensor that a communicator sums


class Gloo:
    """See `moolink.torch.communicators.Backend`.

    Attributes:
        before_sum: called before each sum, with its number from 0.
        aborted: set when a communicator was aborted.
    """

    def __init__(
        self, before_sum: Callable[[int], object] = lambda number: None, is_there: bool = True
    ) -> None:
        self.before_sum = before_sum
        self.connected = self.sums = 0
        self.aborted = threading.Event()
        self._is_there = is_there

    def available(self) -> bool:
        return self._is_there

    def device_of(self, data: Any) -> torch.device:
        return torch.device("cpu")

    def make(self, store: Store, rank: int, size: int, device: torch.device) -> Any:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = datetime.timedelta(seconds=600)
        return ProcessGroupGloo(store, rank, size, options)

    def connect(self, group: Any) -> None:
        self.connected += 1

    def mark(self, tensor: torch.Tensor) -> Any:
        return "mark"

    def wait(self, mark: Any) -> None:
        assert mark == "mark"

    def sum(self, group: Any, tensor: torch.Tensor, mark: Any, divisor: int) -> torch.Tensor:
        self.before_sum(self.sums)
        self.sums += 1
        total = tensor.clone()
        group.allreduce([total]).wait()
        return total.div_(divisor)

    def abort(self, group: Any) -> None:
        self.aborted.set()


class Held(Gloo):
    """Sums wait for `goes_on` while `holds` is set."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.holds, self.waits, self.goes_on = (threading.Event() for _ in range(3))

    def _wait(self, number: int) -> None:
        if self.holds.is_set():
            self.waits.set()
            self.goes_on.wait(10 * TIMEOUT)  # longer than a test that fails


def at_all(groups: list[moolink.Group], start: Callable[[int], Any]) -> list[Any]:
    """Calls `start` for each rank in a thread of its own; returns the results by rank."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(start, range(len(groups)), timeout=TIMEOUT))


def sums(groups: list[moolink.Group], name: str = "x", **options: Any) -> list[Any]:
    """Sums tensors filled with rank + 1; returns each member's result."""

    def start(rank: int) -> Any:
        data = torch.full((N,), rank + 1.0)
        return groups[rank].all_reduce(name, data, **options).result(TIMEOUT)

    return at_all(groups, start)


def ways(group: moolink.Group) -> tuple[int, int]:
    """Numbers of sums that the members agreed to compute by a communicator, and by the group."""
    assert group._device_sums is not None
    return group._device_sums.by_communicator, group._device_sums.by_group


def connect(groups: list[moolink.Group]) -> None:
    """Sums repeatedly until the members use the communicator."""
    formed(groups)
    before = ways(groups[0])[0]

    def by_communicator() -> bool:
        assert all((total == total[0]).all() for total in sums(groups, "first"))
        return ways(groups[0])[0] > before

    until(by_communicator, "a communicator")


def start_held(groups: list[moolink.Group], held: Held, name: str = "x") -> list[Any]:
    """Starts a sum in which the member with this backend waits; returns the futures."""
    held.holds.set()
    futures = at_all(groups, lambda r: groups[r].all_reduce(name, torch.ones(N)))
    assert held.waits.wait(TIMEOUT)
    held.holds.clear()
    return futures
