"""moolib's EnvPool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import moolink
from moolink.compat.moolib.arguments import with_runtime_errors
from moolink.env_pool import EnvStepper, EnvStepperFuture, starting
from moolink.errors import Error
from moolink.internal import logs

__all__ = ["EnvPool", "EnvRunner", "EnvStepper", "EnvStepperFuture"]


@with_runtime_errors("__init__", "step")
class EnvPool(moolink.env_pool.EnvPool):
    """Environments in worker processes, as :class:`moolink.env_pool.EnvPool`.

    Args:
        start: as in moolink.env_pool.EnvPool; None: "fork" if this process can be forked, else
            "program".
        others: as in moolink.env_pool.EnvPool.
    """

    def __init__(
        self,
        create_env: Callable[..., Any],
        num_processes: int,
        batch_size: int,
        num_batches: int = 1,
        *,
        start: starting.Start | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            create_env,
            num_processes,
            batch_size,
            num_batches,
            start=start or _possible_start(),
            **options,
        )


def _possible_start() -> starting.Start:
    try:
        starting.require_forkable()
    except Error as error:
        logs.logger.info("the EnvPool's workers are a fresh program's: %s", error)
        return "program"
    return "fork"


class EnvRunner:
    """moolib's name of a worker, which has no constructor there either."""

    def __init__(self) -> NoReturn:
        raise TypeError("an EnvPool runs its environments by itself: there is no EnvRunner to make")
