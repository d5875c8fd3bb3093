"""Means of floating-point values over the contributions of all members."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from moolink.accumulate import Totals
from moolink.accumulate.totals import with_means
from moolink.dashboard.report import read
from moolink.rpc import report as rpc_report
from tests.accumulator.loops import Make, connect, pump
from tests.waiting import until


def totals(*contributions: dict[str, object]) -> Totals:
    """Of these contributions, in any order: their counters are added as the rounds do it."""
    sums = Totals()
    for means in contributions:
        for name, value in (with_means(None, means) or {}).items():
            sums[name] = sums.get(name, 0) + value
    return sums


def test_a_mean_is_exact_in_any_order() -> None:
    values = [0.1, 1e8, -1e8, 1e-9, 3.0]
    there = totals(*({"return": value} for value in values))
    back = totals(*({"return": value} for value in reversed(values)))
    assert there == back
    rounded = [round(value * 2**32) for value in values]
    assert there.mean("return") == sum(rounded) / 2**32 / 5


def test_a_contribution_has_any_number_of_values() -> None:
    several = totals({"return": [1.0, 2.0]}, {"return": []}, {"return": torch.tensor([6.0])})
    assert several.mean("return") == 3.0
    assert totals({"return": torch.tensor(2.5, requires_grad=True)}).mean("return") == 2.5
    assert math.isnan(totals({"return": []}).mean("return"))
    assert math.isnan(Totals().mean("return"))


def test_a_mean_since_earlier_totals() -> None:
    before = totals({"a": 1.0, "b": 5.0})
    after = totals({"a": 1.0, "b": 5.0}, {"a": [2.0, 4.0]})
    assert after.mean("a", since=before) == 3.0
    assert after.means(since=before) == {"a": 3.0}
    assert after.means() == {"a": 7 / 3, "b": 5.0}
    assert after.counters() == {}


def test_what_is_not_finite_makes_the_mean_nan() -> None:
    before = totals({"loss": [1.0, math.nan, math.inf]})
    assert math.isnan(before.mean("loss"))
    after = Totals(before)
    for name, value in (with_means(None, {"loss": 2.0}) or {}).items():
        after[name] += value
    assert after.mean("loss", since=before) == 2.0


@pytest.mark.parametrize(
    "value", ["high", "35", ["1"], [1.0, None], object(), torch.ones(2, 2), np.ones((2, 2))]
)
def test_a_value_is_a_number(value: object) -> None:
    with pytest.raises(TypeError, match="the mean 'loss' takes a number or an iterable of numbers"):
        with_means(None, {"loss": value})  # type: ignore[dict-item]


def test_too_large_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the mean 'loss' have a sum of 2\*\*31"):
        with_means(None, {"loss": 3e9})
    with pytest.raises(ValueError, match=r"the mean 'loss' have a sum of 2\*\*31"):
        with_means(None, {"loss": [2.0**31 - 2.0**-22, *[1.2e-10] * 2000]})  # of rounded ones


def test_a_mean_is_rounded_once() -> None:
    sums = Totals()
    for value in range(1, 400):
        for name, part in (with_means(None, {"x": [value * 7919.3, 1 / value]}) or {}).items():
            sums[name] += part
        exact = Fraction(sums["x (sum, 2^-32)"], sums["x (count)"] << 32)
        assert sums.mean("x") == float(exact)


def test_counters_have_other_names_than_parts_of_means() -> None:
    with pytest.raises(ValueError, match=r"the counter 'm \(count\)' needs another name"):
        with_means({"m (count)": 5}, {"m": [1.0]})
    with pytest.raises(ValueError, match=r"the counter 'm \(count\)' needs another name"):
        with_means({"m (count)": 5}, None)


def test_reports_to_the_broker_stay_readable(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    peer = make("alone", [weight])
    for step in peer.training_steps(lambda: None, until={"n": 3}):
        weight.grad = torch.ones(2)
        step.reduce(1, {"steps": 2**63 - 1, "n": 1}, means={"return": 2.0**30})
    told = rpc_report._report(peer._group.rpc)
    known = read(told)
    assert known.steps == {peer._group.name(): 2.0**63}
    assert "return" not in json.dumps(known.raw)


def test_members_have_the_same_means(make: Make) -> None:
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    peers = [make(f"peer-{i}", [weight]) for i, weight in enumerate(weights)]
    for peer in peers:
        peer.set_virtual_batch_size(2)
    connect(peers)
    for peer, values in zip(peers, (0.1, [0.2, 0.4]), strict=True):
        peer.reduce_gradients(1, with_means({"n": 1}, {"return": values}))

    def delivered() -> bool:
        pump(peers)
        return all(peer.has_gradients() for peer in peers)

    until(delivered, "a round")
    means = [Totals(peer.get_gradient_stats()["counters"]).mean("return") for peer in peers]
    assert means[0] == means[1] == pytest.approx(0.7 / 3, abs=2**-32)


def test_until_may_ask_for_a_mean(make: Make) -> None:
    weight = torch.zeros(2, requires_grad=True)
    peer = make("alone", [weight])
    turns = 0
    for step in peer.training_steps(lambda: None, until=lambda totals: totals.mean("x") > 1.5):
        weight.grad = torch.ones(2)
        step.reduce(1, means={"x": float(turns)})
        turns += 1
    assert turns == 5, "0 + 1 + 2 + 3 + 4 = 10, a mean of 2"
