"""A member of a group that does what it is told: ``python -m tests.network.member broker name``.

Takes one JSON object a line on standard input, answers each with one on standard output.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any, Literal

import numpy as np

import moolink
from tests.numpy_accumulator import NumpyAccumulator
from tests.waiting import until


def elements(name: str, count: int, dtype: str) -> np.ndarray:
    """What the peer of this name contributes: ``count`` elements, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = np.random.default_rng(seed)
    if np.issubdtype(np.dtype(dtype), np.floating):
        return generator.standard_normal(count).astype(dtype)
    return generator.integers(1, 100, count).astype(dtype)


class Member:
    """One peer in one group.

    Args:
        transports: as of Rpc.
    """

    def __init__(self, broker: str, name: str, transports: list[str] | None = None) -> None:
        self.rpc = moolink.Rpc(name, transports=transports)
        self.rpc.define("echo", lambda x: x)
        self.rpc.connect(broker)
        self.name = name
        self.group = moolink.Group(self.rpc, "group")
        self._data: np.ndarray | None = None

    def formed(self, members: list[str]) -> list[str]:
        """Waits until these, in any order, are the members; returns them by rank."""

        def there() -> bool:
            self.group.update()
            return sorted(self.group.members()) == sorted(members)

        until(there, f"members {members}; there are {self.group.members()}")
        return self.group.members()

    def echo(self, peer: str, value: Any) -> Any:
        """Calls another member."""
        return self.rpc.sync(peer, "echo", value)

    def path(self, peer: str) -> str:
        """The kind of path in use to another member."""
        path = self.rpc.explain(peer)["path"]
        return path if isinstance(path, str) else path["kind"]

    def formed_path(self, peer: str, path: str) -> float:
        """Waits until a peer is reached by this kind of path; returns the time (monotonic)."""
        until(
            lambda: self.path(peer) == path,
            f"{path} to '{peer}': {self.rpc.explain(peer)}",
        )
        return time.monotonic()

    def epoch(self) -> int:
        """The number of the group's view."""
        return self.group.epoch()

    def written(self) -> dict[str, int]:
        """Bytes written so far, by kind of path."""
        return {kind: path["bytes_written"] for kind, path in self.rpc.stats()["paths"].items()}

    def why(self, peer: str, path: str) -> str:
        """Returns why a path to a peer is not in use."""
        (state,) = [one for one in self.rpc.explain(peer)["paths"] if one["path"] == path]
        return state["reason"]

    def reduce(
        self,
        name: str,
        count: int,
        dtype: str = "float32",
        in_common: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Reduces this peer's :func:`elements` with those of the others.

        Args:
            in_common: wait for the others before.

        Returns:
            The result's digest and first elements, and the seconds that it took: of the clock,
            and of this process on the processors.
        """
        if self._data is None or (self._data.size, self._data.dtype) != (count, np.dtype(dtype)):
            self._data = elements(self.name, count, dtype)
        if in_common:
            self.group.all_reduce("start", 0, on_change="retry").result(60)
        begin, used = time.monotonic(), time.process_time()
        result = self.group.all_reduce(name, self._data, on_change="retry", **options).result(60)
        seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - used
        return {
            "digest": hashlib.sha256(result.tobytes()).hexdigest(),
            "head": result[:8].tolist(),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }

    def join_training(
        self, count: int, members: int, role: Literal["member", "observer"] = "member"
    ) -> None:
        """Makes an accumulator of ``count`` float32 whose rounds have ``members`` contributions,
        and waits until all members take part: the first ones give the others the state. An observer
        waits for itself only."""
        weights = np.zeros(count, np.float32)
        self._accumulator = NumpyAccumulator("model", weights, self.group, role=role)
        self._accumulator.set_virtual_batch_size(members)

        def takes_part() -> bool:
            self.group.update()
            self._update()
            return self._accumulator.connected()

        until(takes_part, "the accumulator to take part")
        if role == "observer":  # it takes no part in operations of the group
            return
        everyone = self.group.all_reduce("everyone takes part", 0, on_change="retry")

        def all_take_part() -> bool:
            self._update()
            return everyone.done()

        until(all_take_part, "the accumulators of all members to take part")

    def train(self, rounds: int) -> dict[str, Any]:
        """Contributes this peer's :func:`elements` to so many rounds.

        Returns:
            The sum of the rounds' means: its digest and first elements; how often each peer
            contributed to each round; and the seconds from the first contribution to the last
            round, of the clock and of this process on the processors.
        """
        accumulator = self._accumulator
        gradient = elements(self.name, accumulator.weights.size, "float32")
        total = np.zeros_like(gradient)
        contributions: list[dict[str, int]] = []
        begin, used = time.monotonic(), time.process_time()
        while len(contributions) < rounds:
            self._update()
            if accumulator.has_gradients():
                total += accumulator.gradients
                contributions.append(accumulator.get_gradient_stats()["counters"])
                accumulator.zero_gradients()
            elif accumulator.wants_gradients():
                accumulator.gradients[:] = gradient
                accumulator.reduce_gradients(1, counters={self.name: 1})
            else:
                accumulator.wait(1)
        return {
            "digest": hashlib.sha256(total.tobytes()).hexdigest(),
            "head": total[:8].tolist(),
            "contributions": contributions,
            "seconds": time.monotonic() - begin,
            "cpu_seconds": time.process_time() - used,
        }

    def _update(self) -> None:
        self._accumulator.update()
        if self._accumulator.wants_state():
            self._accumulator.set_state(None)
        if self._accumulator.has_new_state():
            self._accumulator.state()


def serve(member: object) -> None:
    """Does what it is told until the end of the input."""
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(member, asked.pop("do"))(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(Member(sys.argv[1], sys.argv[2]))
