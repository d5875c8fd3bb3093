"""Environments stepped by worker processes through shared memory: EnvPool and VectorEnv.

VectorEnv, in `moolink.env_pool.vector_env`, needs gymnasium and is not imported here.
"""

from typing import TYPE_CHECKING

from moolink.env_pool.pool import EnvPool
from moolink.env_pool.stepper import EnvStepper, EnvStepperFuture
from moolink.internal.lazy import lazy

if TYPE_CHECKING:
    from moolink.env_pool.driving import Driven

__all__ = ["Driven", "EnvPool", "EnvStepper", "EnvStepperFuture"]

__getattr__, __dir__ = lazy(__name__, {"Driven": "moolink.env_pool.driving"})
