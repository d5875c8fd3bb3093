"""Checks that a prioritised table's probabilities are still exact after many updates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import moolink
from moolink.replay import Prioritized, Table

ITEMS = 20_000
BATCH = 5_000
SAMPLES = 50_000


def check_probabilities(updates: int) -> None:
    """Changes priorities `updates` times. The probabilities must then equal, to the last bit, those
    of a table that was given the last priorities at once."""
    random = np.random.default_rng(0)
    priorities = np.ones(ITEMS)
    updated, keys = _table(priorities)
    for _ in range(updates // BATCH):
        items = random.integers(0, ITEMS, BATCH)
        # Sizes differ so much that sums updated by differences would not be exact.
        priorities[items] = changed = random.random(BATCH) * 2.0 ** random.integers(0, 40, BATCH)
        # If an item occurs twice, numpy keeps its last priority, as the table does.
        assert updated.update_priorities(keys[items], changed) == BATCH
    anew, _ = _table(priorities)
    found, expected = _probabilities(updated), _probabilities(anew)
    both = ~np.isnan(found) & ~np.isnan(expected)
    assert both.sum() > ITEMS / 10
    np.testing.assert_array_equal(found[both], expected[both])


def _table(priorities: npt.NDArray[np.float64]) -> tuple[moolink.Replay, npt.NDArray[np.int64]]:
    replay = moolink.Replay(Table("t", ITEMS, Prioritized(1.0)), seed=0)
    return replay, replay.extend({"item": np.arange(ITEMS)}, priorities)


def _probabilities(replay: moolink.Replay) -> npt.NDArray[np.float64]:
    """Returns the probability of each item; NaN: it was not sampled."""
    batch = replay.sample(SAMPLES)
    found = np.full(ITEMS, np.nan)
    found[batch.data["item"]] = batch.probabilities
    return found
