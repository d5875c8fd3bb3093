"""A table with what its items look like."""

from __future__ import annotations

import dataclasses

from moolink.data.skeletons import Skeleton
from moolink.internal.integers import integer_of
from moolink.replay.layout import Layout
from moolink.replay.options import Table

_LARGEST_BATCH = 4 << 30  # bytes
_LARGEST_FIRST_BATCH = 1 << 20  # items, where their bytes are not known yet
_OF_EACH = 64  # bytes of an item in a batch beside its arrays


@dataclasses.dataclass
class OpenTable:
    """A table of a replay. There is no skeleton until the first item is there."""

    index: int
    options: Table
    skeleton: Skeleton = None
    framework: str = "numpy"
    steps: tuple[Layout, int] | None = None  # layout and pattern of items of one step
    item_bytes: int | None = None  # of the largest item; None: there was none yet

    def has_items_of(self, size: int) -> None:
        """There are items of so many bytes."""
        self.item_bytes = max(size, self.item_bytes or 0)

    def batch_size_of(self, given: int) -> int:
        """How many items a program or a peer may sample at once.

        Raises:
            TypeError, ValueError: it is no integer, below 1, or the items take too much memory.
        """
        most = _LARGEST_FIRST_BATCH
        if self.item_bytes is not None:
            most = max(1, _LARGEST_BATCH // (self.item_bytes + _OF_EACH))
        return integer_of(given, "batch_size", least=1, most=most)
