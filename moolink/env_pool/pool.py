"""EnvPool: the face of the package."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

from moolink.env_pool import channel, fork_server, starting
from moolink.env_pool.options import PoolOptions
from moolink.env_pool.stepper import (
    FINAL_OBS,
    RESULTS,
    EnvStepper,
    EnvStepperFuture,
    Framework,
    OutputOptions,
)
from moolink.env_pool.supervisor import Supervisor
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords

_BEHAVIOUR = channel.Behaviour(
    autoreset="same",
    first_step_resets=True,
    infos=False,
    infer=True,
    any_space=False,
    compare="spaces",
    numpy_numbers=False,
)


@names_keywords
class EnvPool(Closing):
    """`num_batches` batches of `batch_size` environments, run by worker processes.

    Environments have the API of Gymnasium or of the old Gym (`reset` without info, steps of three
    or four values), and Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple spaces, the same
    for all. Where they declare no spaces, or observations that are not in them, the first
    observation decides the layout, and undeclared actions are int64 numbers; a warning says so.
    With two batches the workers step one while the policy thinks about the other:

        with EnvPool(make_env, num_processes=4, batch_size=32, num_batches=2) as pool:
            futures = [pool.step(0, actions), pool.step(1, actions)]
            while True:
                for i in (0, 1):
                    outputs = futures[i].result()
                    futures[i] = pool.step(i, policy(outputs))

    By default the workers are forked from a fresh program, not from this process: a pool can be
    made at any time, beside threads, an Rpc, CUDA or other pools. Ctrl-C does not reach them. They
    end with the pool, at the latest with this process, even if that is killed.

    Args:
        create_env: makes an environment. It must be importable by the workers (defined at the top
            level of a module; with functools.partial for arguments), unless start is "fork". If it
            has a required parameter, or its first one is called "index", it is given the
            environment's index: batch x batch_size + row.
        num_processes: number of workers, at most `batch_size` (more would have nothing to do).
        batch_size: environments of a batch; each worker runs equally many of them, or one more.
        num_batches: number of batches.
        seed: each environment's first reset gets a seed derived from this one and from its index.
        copy: whether outputs are copies. Otherwise they are views of shared memory, and change
            at the next step of their batch.
        arrays: "numpy" or "torch" outputs; "auto" gives torch if the actions were torch tensors.
        final_obs: whether outputs have "final_obs": the last observation of
            each episode that ended in this step; other rows are undefined.
        on_crash: "raise" `EnvError` when an environment raises or a worker dies, or "restart":
            make the environments concerned anew, cut off their episodes (done and truncated are
            True, the reward is 0) and log a warning. An environment that fails repeatedly raises.
        check_actions: whether actions outside of their space (and NaN) are refused.
        start: "program" forks the workers from a fresh program, which takes lambdas and local
            functions if cloudpickle is installed; "fork" from this process, so that create_env
            sees this process's globals.
        start_timeout: seconds in which all environments have to be made; None: no limit.

    Raises:
        EnvError: an environment could not be made.
        TimeoutError: the environments were not made within `start_timeout`.
        Error: create_env cannot be sent to the workers; or start is "fork" while threads, an Rpc,
            CUDA or JAX run.
        ValueError, TypeError: an argument is wrong, or create_env takes too many.
    """

    def __init__(
        self,
        create_env: Callable[..., Any],
        num_processes: int,
        batch_size: int,
        num_batches: int = 1,
        *,
        seed: int | None = None,
        copy: bool = False,
        arrays: Framework = "auto",
        final_obs: bool = False,
        on_crash: Literal["raise", "restart"] = "raise",
        check_actions: bool = True,
        start: starting.Start = "program",
        start_timeout: float | None = 300.0,
    ) -> None:
        num_processes = integer_of(num_processes, "num_processes", least=1)
        batch_size = integer_of(batch_size, "batch_size", least=1)
        num_batches = integer_of(num_batches, "num_batches", least=1)
        if arrays not in ("auto", "numpy", "torch"):
            raise ValueError(f'arrays must be "auto", "numpy" or "torch", got {arrays!r}')
        if not callable(create_env):
            raise TypeError(f"create_env must be callable, got {create_env!r}")
        fork_server.require_loaded_main("EnvPool")
        self.num_processes = min(num_processes, batch_size)
        self.batch_size = batch_size
        self.num_batches = num_batches
        options = PoolOptions(
            create_env,
            self.num_processes,
            num_batches,
            batch_size,
            seed,
            final_obs,
            "float32",
            start,
            on_crash,
            _BEHAVIOUR,
            start_timeout,
        )
        self._supervisor = Supervisor(options)
        # Runs at the interpreter's exit, too.
        self._close = weakref.finalize(self, self._supervisor.close)
        try:
            _require_free_names(self._supervisor.shape.observation)
        except ValueError:
            self._close()
            raise
        output = OutputOptions(copy, arrays, check_actions)
        self._steppers = [EnvStepper._of(self._supervisor, i, output) for i in range(num_batches)]

    def step(self, batch_index: int, action: Any) -> EnvStepperFuture:
        """Has the environments of a batch take their actions; returns at once.

        The first step of a batch resets its environments instead, and its actions are ignored: it
        gives the first observations, rewards of 0, and done False.

        Args:
            batch_index: 0 to num_batches - 1.
            action: array of shape (batch_size, *action shape), numpy, torch or of any framework
                with DLPack; a dict or tuple of them for Dict and Tuple spaces. It is captured
                before this returns.

        Returns:
            A future of a dict of arrays, the first dimension of each being the batch:
            the observation (the keys of a Dict space; "state" for other spaces), after a reset if
            the episode ended;
            "reward" float32; "terminated", "truncated" and "done" (either of them) bool;
            "episode_return" float32 and "episode_step" int64, of the episode so far, including the
            step that ends it; and "final_obs" if asked for.

        Raises:
            ValueError, TypeError: wrong shape, dtype, structure or value, named by its place.
            IndexError: there is no such batch.
            Error: the result of the batch's last step was not taken yet.
            EnvError: the pool has failed before.
            Closed: the pool is closed.
        """
        if not 0 <= batch_index < self.num_batches:
            raise IndexError(f"there is no batch {batch_index}: num_batches is {self.num_batches}")
        return self._steppers[batch_index].step(action)

    @property
    def num_envs(self) -> int:
        """Number of environments in all batches."""
        return self.batch_size * self.num_batches

    @property
    def observation_space(self) -> Any:
        """The space of one environment's observation."""
        return self._spaces[0]

    @property
    def action_space(self) -> Any:
        """The space of one environment's action."""
        return self._spaces[1]

    @functools.cached_property  # Each is one object, which keeps its seed.
    def _spaces(self) -> tuple[Any, Any]:
        spaces: tuple[Any, Any] = self._supervisor.spaces_of_rows()[0]
        return spaces

    def close(self) -> None:
        """Ends the workers, closing their environments. Outputs already taken remain readable."""
        self._close()

    def __repr__(self) -> str:
        return (
            f"<moolink.env_pool.EnvPool of {self.num_batches} x {self.batch_size} environments in "
            f"{self.num_processes} processes, {self._supervisor.state()}>"
        )


def _require_free_names(observation: Any) -> None:
    taken = {*RESULTS, FINAL_OBS}
    if isinstance(observation, dict) and (clash := sorted(taken & observation.keys())):
        raise ValueError(
            f"the observation space has the keys {clash}, which EnvPool's own outputs use: rename "
            "them with a wrapper"
        )
