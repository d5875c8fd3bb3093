"""A finding of ``moolink doctor``."""

from __future__ import annotations

import dataclasses
from typing import Literal

State = Literal["ok", "absent", "failed"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. "absent": an optional feature is missing. "failed": must be fixed."""

    topic: str
    state: State
    text: str
