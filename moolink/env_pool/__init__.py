"""EnvPool: batches of environments, stepped by worker processes through shared memory."""

from moolink.env_pool.pool import EnvPool
from moolink.env_pool.stepper import EnvStepper, EnvStepperFuture

__all__ = ["EnvPool", "EnvStepper", "EnvStepperFuture"]
