"""The machine of a trajectory queue, simulated beside a second implementation of its rules."""

from __future__ import annotations

import random

import pytest

from moolink.trajectories.backlog import Backlog, Item


class Model:
    """The rules in the plainest way: one list, searched each time."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.version = 0
        self.all: list[tuple[int, int, bool]] = []  # number, first version, whether it is in

    def put(self, number: int, begin: int) -> bool:
        room = sum(is_in for _, _, is_in in self.all) < self.max_size
        self.all.append((number, begin, room))
        return room

    def expire(self, max_lag: int) -> None:
        self.all = [one for one in self.all if self.version - one[1] <= max_lag]

    def admit(self) -> list[int]:
        admitted = []
        for i, (number, begin, is_in) in enumerate(self.all):
            if not is_in and sum(one[2] for one in self.all) < self.max_size:
                self.all[i] = (number, begin, True)
                admitted.append(number)
        return admitted

    def take(self, count: int) -> list[int]:
        taken = [number for number, _, is_in in self.all if is_in][:count]
        self.all = [one for one in self.all if one[0] not in taken]
        return taken

    def withdraw(self, number: int) -> bool:
        before = len(self.all)
        self.all = [one for one in self.all if one[0] != number or one[2]]
        return len(self.all) < before


def numbers(items: list[Item[int]]) -> list[int]:
    return [item.payload for item in items]


def simulate(seed: int, steps: int = 150) -> list[str]:
    """Random events; returns what happened."""
    draw = random.Random(seed)
    size = draw.randint(1, 6)
    backlog: Backlog[int] = Backlog(size)
    model = Model(size)
    begun: dict[int, int] = {}
    taken: list[int] = []
    ended = 0  # dropped, or withdrawn
    trace = []
    for number in range(steps):
        event = draw.random()
        if event < 0.45:
            begun[number] = max(0, model.version - draw.randint(0, 5))
            result: object = backlog.put(number, begun[number], model.version)
            assert result == model.put(number, begun[number])
        elif event < 0.6:
            model.version += draw.randint(0, 2)
            backlog.advance(model.version)
            result = model.version
        elif event < 0.7 and begun:
            payload = draw.choice(sorted(begun))
            result = backlog.withdraw(payload)
            assert result == model.withdraw(payload)
            ended += bool(result)
        else:
            max_lag = draw.randint(0, 4)
            waited = len(model.all)
            backlog.expire(max_lag)
            model.expire(max_lag)
            ended += waited - len(model.all)
            assert numbers(backlog.admit()) == model.admit()
            items = backlog.take(draw.randint(1, 4))
            result = numbers(items)
            assert result == model.take(len(items))
            assert all(model.version - begun[n] <= max_lag for n in result), "an item too old"
            assert numbers(backlog.admit()) == model.admit()
            taken += result
        assert len(backlog) == sum(is_in for _, _, is_in in model.all) <= size
        trace.append(f"{number} {event:.3f} {result}")
    assert len(taken) == len(set(taken)), "an item was taken twice"
    assert taken == sorted(taken), "a later item was taken first"
    counts = backlog.counts
    assert counts.put == len(begun)
    assert counts.taken == len(taken)
    assert counts.put == len(taken) + ended + len(model.all)
    assert counts.dropped + counts.withdrawn == ended
    assert counts.largest_lag <= 4
    return trace


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 250):
        simulate(seed)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulate(11) == simulate(11)


def test_a_version_does_not_go_back() -> None:
    backlog: Backlog[int] = Backlog(1)
    backlog.advance(3)
    with pytest.raises(ValueError, match="version 2 is below the one before, 3"):
        backlog.advance(2)


def test_lags_add_up() -> None:
    backlog: Backlog[str] = Backlog(4)
    backlog.advance(5)
    backlog.put("a", 1, 3)
    backlog.advance(9)
    backlog.take(1)
    counts = backlog.counts
    assert (counts.lag_acting, counts.lag_in_flight, counts.lag_in_queue) == (2, 2, 4)
    assert counts.largest_lag == 8


def takes_the_newest(self: Backlog[int], count: int) -> list[Item[int]]:
    return [self._items.pop() for _ in range(min(count, len(self._items)))]


def counts_age_from_the_end(self: Backlog[int], item: Item[int]) -> int:
    return self.version - item.end


def keeps_what_is_late(self: Backlog[int], max_lag: int) -> list[Item[int]]:
    return []


def lets_all_in(self: Backlog[int]) -> list[Item[int]]:
    admitted = list(self._line)
    self._items += self._line
    self._line.clear()
    return admitted


def withdraws_what_is_in(self: Backlog[int], payload: int) -> bool:
    for item in self._items:
        if item.payload == payload:
            self._items.remove(item)
            return True
    return False


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("take", takes_the_newest),
        ("lag", counts_age_from_the_end),
        ("expire", keeps_what_is_late),
        ("admit", lets_all_in),
        ("withdraw", withdraws_what_is_in),
    ],
)
def test_the_simulation_catches(
    method: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backlog, method, mistake)
    with pytest.raises(AssertionError):
        for seed in range(50):
            simulate(seed)
