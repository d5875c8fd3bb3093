"""The user's options of a pool, and their limits."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable
from typing import Any, Literal

from moolink.env_pool import channel, starting

MOST_ENVIRONMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class PoolOptions:
    """The user's options; see EnvPool and VectorEnv for the meaning."""

    create_env: Callable[..., Any]
    workers: int
    batches: int
    batch_size: int
    seed: int | None
    final_obs: bool
    reward: str
    start: starting.Start
    on_crash: Literal["raise", "restart"]
    behaviour: channel.Behaviour
    start_timeout: float | None

    def __post_init__(self) -> None:
        """Raises ValueError for a size that no pool has, and for an unknown word."""
        if self.batch_size * self.batches > MOST_ENVIRONMENTS:
            raise ValueError(
                f"a pool has at most {MOST_ENVIRONMENTS} environments, not {self.batch_size} x "
                f"{self.batches}"
            )
        # For each worker a doorbell and a pair of sockets, for each batch a bell that two hold.
        needed = 3 * self.workers + 2 * self.batches
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if needed > limit:
            raise ValueError(
                f"a pool of {self.workers} processes and {self.batches} batches needs {needed} "
                f"file descriptors, and this process may have {limit}: make it smaller, or raise "
                "the limit with `ulimit -n`"
            )
        if self.on_crash not in ("raise", "restart"):
            raise ValueError(f'on_crash must be "raise" or "restart", got {self.on_crash!r}')
        if self.start not in ("program", "fork"):
            raise ValueError(f'start must be "program" or "fork", got {self.start!r}')
