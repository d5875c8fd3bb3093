"""moolib's Batcher."""

from __future__ import annotations

from typing import Any

import moolink
from moolink.compat.moolib.arguments import with_runtime_errors
from moolink.data.batch_layout import Values


@with_runtime_errors("__init__", "cat", "get", "stack")
class Batcher(moolink.Batcher):
    """Collects items into batches, as :class:`moolink.Batcher`. A value that is no array is the
    first item's."""

    _values: Values = "first"

    def __init__(self, size: int, device: Any = "cpu", dim: int = 0, **options: Any) -> None:
        super().__init__(size, str(device), dim, **options)
