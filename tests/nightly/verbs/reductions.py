"""Reductions that members do by RDMA, and whether their results are right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.network.member import elements

COUNT = 100_001
REDUCTIONS: dict[str, dict[str, Any]] = {
    "small": {"count": 5},
    "large": {"count": 3 * COUNT},
    "integers": {"count": COUNT, "dtype": "int32"},
    "compressed": {"count": COUNT, "compress": "bf16"},
}


def reduced_right(
    answers: list[dict[str, Any]],
    members: Iterable[str],
    count: int,
    dtype: str = "float32",
    compress: str = "",
) -> bool:
    """Whether all answers of ``Member.reduce`` are the same, and the sum of all members."""
    expected = sum(elements(member, count, dtype)[:8] for member in members)
    same = len({answer["digest"] for answer in answers}) == 1
    error = 2**-4 if compress else 1e-5
    return same and np.allclose(answers[0]["head"], expected, atol=error)
