"""The statistics by which observations are normalised, shared by peers whose group changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

import moolink
from examples.common.normalizer import INTERVAL, Normalizer
from examples.common.options import GroupOptions


class Ended:
    """An operation of the group that has ended."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Alone:
    """A group of one member, whose first operation fails."""

    def __init__(self) -> None:
        self.failures = 1

    def members(self) -> list[str]:
        return ["alone"]

    def all_reduce(self, name: str, data: Any) -> Ended:
        if self.failures:
            self.failures -= 1
            return Ended(moolink.GroupChanged("a member has joined"))
        return Ended(data)


def test_data_of_a_failed_exchange_go_with_the_next_one() -> None:
    envs = SimpleNamespace(observation_spaces={"x": spaces.Box(-1, 1, (2,), np.float32)})
    normalizer = Normalizer(GroupOptions(normalize=True), envs)
    group: Any = Alone()
    normalizer.observe({"x": np.full((3, 2), 2.0)})
    for _ in range(2):  # begins an exchange, and takes its result
        normalizer.exchange(group)
    assert not normalizer.state()["x"].any()
    normalizer.observe({"x": np.full((1, 2), 4.0)})
    for _ in range(INTERVAL):
        normalizer.exchange(group)
    assert group.failures == 0
    np.testing.assert_array_equal(normalizer.state()["x"], [[4, 4], [10, 10], [28, 28]])
