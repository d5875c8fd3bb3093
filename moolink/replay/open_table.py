"""A table of a replay, with the layout of its items."""

from __future__ import annotations

import dataclasses

from moolink.data.skeletons import Skeleton
from moolink.internal.integers import integer_of
from moolink.replay.layout import Layout
from moolink.replay.options import Table

_LARGEST_BATCH = 4 << 30  # bytes
_LARGEST_FIRST_BATCH = 1 << 20  # items, while their size is not known yet
_OF_EACH = 64  # bytes of an item in a batch besides its arrays


@dataclasses.dataclass
class OpenTable:
    """A table of a replay. `skeleton` is None until the table has had its first item."""

    index: int
    options: Table
    skeleton: Skeleton = None
    framework: str = "numpy"
    steps: tuple[Layout, int] | None = None  # layout and pattern of items of one step
    item_bytes: int | None = None  # of the largest item; None: there has been no item yet

    def has_items_of(self, size: int) -> None:
        """Records that the table has items of `size` bytes."""
        self.item_bytes = max(size, self.item_bytes or 0)

    def batch_size_of(self, given: int) -> int:
        """The batch size that a program or a peer has given, checked.

        Raises:
            TypeError, ValueError: it is not an integer, is below 1, or exceeds the memory limit.
        """
        most = _LARGEST_FIRST_BATCH
        if self.item_bytes is not None:
            most = max(1, _LARGEST_BATCH // (self.item_bytes + _OF_EACH))
        return integer_of(given, "batch_size", least=1, most=most)
