"""A member that sums large tensors repeatedly and writes the results to a file.

Each line of the file: the number of members at the call, the result's smallest and largest element,
and the number of sums so far that the members agreed to compute by a communicator. gloo sums
tensors on the CPU. The fourth argument is the moment at which the process kills itself: "asked"
(rank 0 asks whether it has gloo), "connect", "before" or "after" the communicator's tenth sum. With
"stops", the process stops itself when it is asked. The fifth argument is the device.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import moolink
from moolink.torch.device_sums import LEAST, DeviceSums
from tests.group.gloo import Gloo

ELEMENTS = 100_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Gloo):
    def __init__(self, moment: str) -> None:
        super().__init__(lambda number: die() if (moment, number) == ("before", 9) else None)
        self._moment = moment

    def available(self) -> bool:
        if self._moment == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._moment == "asked":
            die()
        return super().available()

    def make(self, *arguments: Any) -> Any:
        if self._moment == "connect":
            die()
        return super().make(*arguments)

    def sum(self, *arguments: Any) -> torch.Tensor:
        total = super().sum(*arguments)
        if self._moment == "after" and self.sums == 10:
            die()
        return total


def main(name: str, broker: str, path: Path, moment: str, device: str) -> None:
    """Runs until it is killed."""
    torch.set_num_threads(1)
    data = torch.ones(ELEMENTS if device == "cpu" else LEAST // 4, device=device)
    with moolink.Rpc(name) as rpc, path.open("w", buffering=1) as lines:
        rpc.connect(broker)
        group = moolink.Group(rpc, "group")
        group.set_timeout(3.0)
        if device == "cpu":
            group._device_sums = DeviceSums(group, Mortal(moment), least=data.nbytes)
        sums = group._device_sums
        assert sums is not None
        while True:
            group.update()
            if not group.active():
                continue
            members = len(group.members())
            try:
                total = group.all_reduce("x", data).result()
            except (moolink.GroupChanged, moolink.Closed, moolink.TimeoutError):
                continue
            lines.write(f"{members} {total.min():g} {total.max():g} {sums.by_communicator}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5])
