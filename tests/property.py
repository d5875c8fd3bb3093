"""The number of examples that a property test tries.

Each property tries a fixed set of examples, the same in every run. `MOOLINK_EXAMPLES=100` tries a
hundred times as many, and others each time: `MOOLINK_EXAMPLES=100 pytest tests/values`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SCALE = int(os.environ.get("MOOLINK_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Settings of a property that is tried with `count` examples, or a multiple of it."""
    return settings(
        max_examples=count * SCALE,
        derandomize=SCALE == 1,
        deadline=None,
        # Fixtures are connected peers, the same for all examples.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
