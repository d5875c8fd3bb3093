"""A table with the layout of its items."""

from __future__ import annotations

import dataclasses

from moolink.data.skeletons import Skeleton
from moolink.replay.layout import Layout
from moolink.replay.options import Table


@dataclasses.dataclass
class OpenTable:
    """A table of a replay. There is no skeleton until the first item is there."""

    index: int
    options: Table
    skeleton: Skeleton = None
    framework: str = "numpy"
    steps: tuple[Layout, int] | None = None  # layout and pattern of items of one step
