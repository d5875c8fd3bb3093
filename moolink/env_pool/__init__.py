"""Environments stepped by worker processes through shared memory: EnvPool and VectorEnv.

VectorEnv, in `moolink.env_pool.vector_env`, needs gymnasium and is not imported here.
"""

from moolink.env_pool.pool import EnvPool
from moolink.env_pool.stepper import EnvStepper, EnvStepperFuture

__all__ = ["EnvPool", "EnvStepper", "EnvStepperFuture"]
