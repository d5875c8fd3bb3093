"""moolink.jax.all_reduce inside of functions that are compiled for a CUDA device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import moolink


def test_a_compiled_function_on_a_device(jax: Any, two: list[moolink.Group]) -> None:
    import moolink.jax as mj

    device = jax.devices("cuda")[0]

    def step(rank: int) -> Any:
        group = two[rank]

        @jax.jit
        def reduce(x: Any, token: Any) -> Any:
            results = []
            for _ in range(3):
                x, token = mj.all_reduce(group, "x", x * 2, token=token)
                results.append(x)
            return results

        x = jax.device_put(np.arange(1000, dtype=np.float32) + rank, device)
        with mj.translate_errors():
            return jax.block_until_ready(reduce(x, jax.device_put(mj.token(group), device)))

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(step, range(2)))
    first = 4 * np.arange(1000) + 2
    for results in both:
        assert {device_ for result in results for device_ in result.devices()} == {device}
        for result, expected in zip(results, (first, 4 * first, 16 * first), strict=True):
            assert (np.asarray(result) == expected).all()
