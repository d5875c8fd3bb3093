"""VectorEnv: a pool as Gymnasium's vector environment, in step or first ready, first served."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate

from moolink.env_pool import calls, channel, fork_server, starting
from moolink.env_pool.actions import ActionWriter
from moolink.env_pool.board import Command
from moolink.env_pool.options import PoolOptions
from moolink.env_pool.outputs import Outputs
from moolink.env_pool.ready import Ready
from moolink.env_pool.requests import Requests
from moolink.env_pool.supervisor import Supervisor
from moolink.env_pool.vector_arguments import (
    checked_environments,
    checked_mask,
    checked_workers,
    require_async_arguments,
    require_sensible,
    require_whole_batches,
)
from moolink.env_pool.vector_errors import (
    VectorClosed,
    VectorNotBegun,
    VectorPending,
    VectorTimeout,
)
from moolink.errors import Closed, EnvError
from moolink.internal.closing import Closing
from moolink.internal.keywords import names_keywords

Array = npt.NDArray[Any]
Step = tuple[Any, Array, Array, Array, dict[str, Any]]

_MODES = {
    AutoresetMode.SAME_STEP: "same",
    AutoresetMode.NEXT_STEP: "next",
    AutoresetMode.DISABLED: "never",
}


@names_keywords
class VectorEnv(GymnasiumVectorEnv[Any, Any, Any], Closing):
    """`num_envs` environments run by worker processes, as a `gymnasium.vector.VectorEnv`.

    In step, like Gymnasium's AsyncVectorEnv:

        envs = moolink.VectorEnv(make_env, num_envs=64)
        observations, infos = envs.reset(seed=0)
        observations, rewards, terminated, truncated, infos = envs.step(actions)

    Or first ready, first served, so that a slow environment delays its worker only:

        envs = moolink.VectorEnv(make_env, num_envs=64, batch_size=32)
        envs.async_reset()
        while True:
            observations, rewards, terminated, truncated, infos = envs.recv()  # 32 of them
            envs.send(policy(observations), infos["env_id"])

    Args:
        create_env: makes an environment, as for `EnvPool`; or a sequence of functions without
            arguments, one an environment. It may make vector environments, all of one number of
            rows and in the autoreset mode given here; the rows of one are stepped together.
        num_envs: number of environments, or of rows of vector environments; with a sequence of
            functions, their number.
        num_workers: number of processes; by default as many as this process may use cores. Each
            steps its environments one after the other.
        batch_size: environments of which `recv` gives the results; by default all.
        autoreset_mode: the reset after an episode: SAME_STEP resets at once (the observation is
            the next episode's first, the last one is in ``infos["final_obs"]``, its info in
            ``infos["final_info"]``); NEXT_STEP in the next step, whose action is ignored; DISABLED
            leaves it to ``reset(options={"reset_mask": mask})``.
        observation_mode: "same": all environments have the same observation space; "different":
            their bounds may differ; or a tuple of the batched and the single space.
        copy: whether observations are copies. Otherwise they are views of shared memory where they
            can be, and change at the next step.
        on_crash: "raise" or "restart", as for `EnvPool`. An episode cut off by a restart is
            truncated.
        check_actions: whether actions outside of their space are refused.
        start: "program" or "fork", as for `EnvPool`.
        start_timeout: seconds in which all environments have to be made; None: no limit.
        env_fns: AsyncVectorEnv's name for a sequence of functions as `create_env`.
        max_concurrency: the most environments that run at a time; an upper bound of `num_workers`.
        shared_memory, context, daemon, worker: accepted as arguments of AsyncVectorEnv, without
            effect. Observations are in shared memory where their space allows it. `start` decides
            how workers start; they end with this process, and may have children. The loop of a
            worker is moolink's; a warning says so if another one is given.

    Attributes:
        copies: whether observations are copies.

    Spaces without a fixed shape (Text, Sequence, Graph, OneOf, your own) are possible: their values
    are pickled, batched as in Gymnasium, and not checked, unlike the parts beside them that have
    one.

    Raises:
        EnvError: an environment could not be made; also in every method: one raised, or its worker
            died.
        TimeoutError: the environments were not made within `start_timeout`.
        RuntimeError: the environments' spaces differ.
        Error: the environments, or their spaces, cannot be pickled.
    """

    def __init__(
        self,
        create_env: Callable[..., Any] | Sequence[Callable[[], Any]] | None = None,
        num_envs: int | None = None,
        *,
        num_workers: int | None = None,
        batch_size: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        observation_mode: str | tuple[Any, Any] = "same",
        copy: bool = True,
        on_crash: Literal["raise", "restart"] = "raise",
        check_actions: bool = False,
        start: starting.Start = "program",
        start_timeout: float | None = 300.0,
        env_fns: Sequence[Callable[[], Any]] | None = None,
        max_concurrency: int | None = None,
        shared_memory: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., Any] | None = None,
    ) -> None:
        del shared_memory, daemon  # Without effect: see above.
        require_async_arguments(context, worker)
        create_env, num_envs = checked_environments(create_env, num_envs, env_fns)
        batch_size = num_envs if batch_size is None else batch_size
        require_sensible(num_envs, batch_size, observation_mode)
        fork_server.require_loaded_main("VectorEnv")
        self.num_envs = num_envs
        self.batch_size = batch_size
        self.copies = copy
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._supervisor = Supervisor(
            _options(
                create_env,
                checked_workers(num_workers, max_concurrency, num_envs),
                num_envs,
                _MODES[self.autoreset_mode],
                on_crash,
                start,
                start_timeout,
            )
        )
        # Runs at the interpreter's exit, too.
        self._finalize = weakref.finalize(self, self._supervisor.close)
        try:
            self._take_face(observation_mode)
            require_whole_batches(batch_size, self._supervisor.rows)
        except BaseException:
            self._finalize()
            raise
        self._prepare(check_actions)

    def _prepare(self, check_actions: bool) -> None:
        """Makes what writes the requests, and reads their results."""
        self._requests = Requests(self._supervisor, 0)
        memory, shape = self._supervisor.memory, self._supervisor.shape
        self._actions = None
        if memory.action is not None:
            self._actions = ActionWriter(shape.action, memory.action, check=check_actions)
        self._outputs = Outputs(
            shape,
            memory,
            self.single_observation_space,
            same_step=self.autoreset_mode == AutoresetMode.SAME_STEP,
            copy=self.copies,
            together=self._supervisor.rows,
        )
        self._ready = Ready(self._requests, shape, self.batch_size, self._supervisor.rows)
        self._waiting_for = ""  # "reset", "step" or "call": begun and not waited for.
        self._goal = 0

    def _take_face(self, observation_mode: str | tuple[Any, Any]) -> None:
        """Takes spaces, metadata, render_mode and spec over from the environments."""
        face: channel.Face = pickle.loads(self._supervisor.face)
        self.metadata = face.metadata | {"autoreset_mode": self.autoreset_mode}
        self.render_mode = face.render_mode
        self.spec = face.spec
        spaces = self._supervisor.spaces_of_rows()
        first, self.single_action_space = spaces[0]
        for name, space in (("observation_space", first), ("action_space", spaces[0][1])):
            if space is None:
                raise TypeError(
                    f"the environments declare no {name}, which a VectorEnv needs: declare it, or "
                    "use an EnvPool"
                )
        if any(action != self.single_action_space for _, action in spaces):
            raise RuntimeError(
                f"some environments have another action space than {self.single_action_space}"
            )
        same = all(observation == first for observation, _ in spaces)
        if isinstance(observation_mode, tuple):
            self.observation_space, self.single_observation_space = observation_mode
        elif observation_mode == "different" and not same:
            self.single_observation_space = first
            self.observation_space = batch_differing_spaces([pair[0] for pair in spaces])
        else:
            if not same:
                raise RuntimeError(
                    "VectorEnv(..., observation_mode='same') however some of the sub-environments "
                    "observation spaces are not equivalent. If this is intentional, use "
                    "`observation_mode='different'` instead."
                )
            self.single_observation_space = first
            self.observation_space = batch_space(first, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    # In step.

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or those of ``options["reset_mask"]``.

        Args:
            seed: environment i gets seed + i, or the i-th of a list.
            options: those of each environment's `reset`; "reset_mask", a bool array [num_envs], is
                taken out of it.

        Returns:
            observations and infos of all environments.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begins a `reset`; `reset_wait` gives its results."""
        self._require_idle("reset_async")
        seeds = self._seeds(seed)
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = checked_mask(options.pop("reset_mask"), self.num_envs)
        of_row = {row: (seeds[row], options) for row in np.flatnonzero(mask).tolist()}
        self._begin("reset", Command.RESET, channel.Arguments(of_row, None))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits, for at most `timeout` seconds, for `reset_async`; may be called again then."""
        self._wait("reset", timeout)
        observations, _, _, _, infos = self._outputs.all(self._requests.results(), reset=True)
        return observations, infos

    def step(self, actions: Any) -> Step:
        """Has each environment take its action.

        Args:
            actions: a batch of `action_space`: numpy, torch, lists, or any DLPack array.

        Returns:
            observations (a batch of `observation_space`), rewards float64 [num_envs], terminated
            and truncated bool [num_envs], infos: for each key of an environment's info an array
            [num_envs], and under "_key" a mask of those that have it.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begins a `step`; `step_wait` gives its results."""
        self._require_idle("step_async")
        self._begin("step", Command.STEP, self._write(actions))

    def step_wait(self, timeout: float | None = None) -> Step:
        """Waits, for at most `timeout` seconds, for `step_async`; may be called again then."""
        self._wait("step", timeout)
        return self._outputs.all(self._requests.results())

    # First ready, first served.

    def async_reset(self, seed: int | Sequence[int | None] | None = None) -> None:
        """Resets all environments; `recv` gives their first observations, those ready first."""
        self._require_idle("async_reset")
        seeds = self._seeds(seed)
        of_row = {row: (given, None) for row, given in enumerate(seeds)}
        self._ready.request(list(of_row), channel.Arguments(of_row, None), Command.RESET)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Has the environments `env_ids` take their actions; returns at once.

        Args:
            actions: one for each of `env_ids`.
            env_ids: ints [n]; by default those of the last `recv`.

        Raises:
            Error: an environment is under way; its result has to be received first.
            ValueError, TypeError, IndexError: the actions or the ids are not valid.
        """
        self._require_idle("send")
        rows = self._ready.checked(env_ids)
        if self._actions is None:
            space = batch_space(self.single_action_space, len(rows))
            given = dict(zip(rows, iterate(space, actions), strict=True))
            self._ready.request(rows, channel.Arguments(given, None), Command.STEP)
        else:
            self._actions.write_rows(actions, np.asarray(rows, np.intp))
            self._ready.request(rows, None, Command.STEP)

    def recv(self, timeout: float | None = None) -> Step:
        """Waits until `batch_size` environments are ready; returns the results of these.

        Returns:
            as `step`, with `batch_size` rows; ``infos["env_id"]``, int64 [batch_size], tells which
            environments they are.

        Raises:
            TimeoutError: they were not ready within `timeout` seconds; ask again if you like.
            Error: fewer are under way.
        """
        self._require_open()
        rows = self._ready.take(timeout)
        if rows is None:
            raise VectorTimeout(
                f"fewer than {self.batch_size} environments were ready within {timeout:g} s: "
                f"{self._requests.unfinished()}"
            )
        return self._outputs.of_rows(rows, self._requests.results(rows))

    # The environments' own.

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls each environment's method `name`, or gets the attribute; a tuple of the results.

        Raises:
            EnvError: one raised, named with its traceback; the pool goes on.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begins a `call`; `call_wait` gives its results."""
        self._require_idle("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"use VectorEnv.{name}, not call({name!r})")
        self._begin_call(calls.call, name, dict.fromkeys(range(self.num_envs), (args, kwargs)))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits, for at most `timeout` seconds, for `call_async`; may be called again then."""
        answers = self._answers(timeout)
        return tuple(answers[row] for row in range(self.num_envs))

    def call_some(
        self, function: Callable[..., Any], name: str, of_row: dict[int, Any]
    ) -> dict[int, Any]:
        """Calls ``function(env, name, *positional, **keywords)`` with some environments.

        Args:
            function: one that the workers can import, as `moolink.env_pool.calls` has them.
            name: its name in errors.
            of_row: (positional, keywords) for each environment that is to be called.

        Returns:
            its result for each.
        """
        self._require_idle("call_some")
        self._begin_call(function, name, of_row)
        return self._answers()

    def reset_some(
        self, of_row: dict[int, tuple[int | None, dict[str, Any] | None]]
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Resets some environments, each with a (seed, options) of its own.

        Returns:
            observations of all environments, and each environment's info.
        """
        self._require_idle("reset_some")
        self._begin("reset", Command.RESET, channel.Arguments(dict(of_row), None))
        self._wait("reset", None)
        observations, _, _, _, infos = self._outputs.apart(self._requests.results(), reset=True)
        return observations, infos

    def step_wait_apart(self) -> tuple[Any, Array, Array, Array, list[dict[str, Any]]]:
        """Waits for `step_async`; returns each environment's own info, without batching."""
        self._wait("step", None)
        return self._outputs.apart(self._requests.results())

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns each environment's attribute `name`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets each environment's attribute `name`, to its own of a list or tuple or all to one."""
        self._require_idle("set_attr")
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ValueError(
                f"values must be one, or a list or tuple of {self.num_envs}, got {len(each)}"
            )
        of_row: dict[int, Any] = {row: ((value,), {}) for row, value in enumerate(each)}
        self._begin_call(calls.assign, name, of_row)
        self.call_wait()

    def render(self) -> tuple[Any, ...] | None:
        """Returns each environment's rendering."""
        return self.call("render")

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the environments' random generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # As in AsyncVectorEnv: it is not set.
    def np_random(self) -> Any:
        """Copies of the environments' random generators."""
        return self.get_attr("np_random")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers; called by `close`. Does not wait for requests under way."""
        if self._waiting_for and not self.closed:
            gymnasium.logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._waiting_for}` to "
                "complete."
            )
        self._finalize()

    # Requests that were begun.

    def _require_open(self) -> None:
        if self.closed:
            raise VectorClosed("the VectorEnv is closed")

    def _require_idle(self, method: str) -> None:
        self._require_open()
        if self._waiting_for:
            raise VectorPending(
                f"Calling `{method}` while waiting for a pending call to `{self._waiting_for}` to "
                "complete",
                self._waiting_for,
            )
        if method not in ("send", "async_reset") and self._ready.under_way:
            raise VectorPending(
                f"Calling `{method}` while environments are under way: receive all their results",
                "recv",
            )

    def _begin(self, what: str, command: Command, arguments: channel.Arguments | None) -> None:
        self._goal = self._requests.of_all(command, arguments)
        self._ready.forget()
        self._waiting_for = what

    def _begin_call(self, function: Callable[..., Any], name: str, of_row: dict[int, Any]) -> None:
        """Begins to call a function of `calls` with some environments: (positional, keywords)."""
        self._begin("call", Command.CALL, channel.Arguments(of_row, (function, name)))

    def _answers(self, timeout: float | None = None) -> dict[int, Any]:
        """Waits for `_begin_call`; returns the answers by row, or raises the first error."""
        self._wait("call", timeout)
        results = self._requests.results()
        for raised in results.errors.values():
            raise EnvError(
                f"environment {raised.environment} raised in {raised.doing}: {raised.error}",
                environments=(raised.environment,),
                remote_traceback=raised.traceback,
            )
        return results.answers

    def _wait(self, what: str, timeout: float | None) -> None:
        self._require_open()
        if self._waiting_for != what:
            raise VectorNotBegun(
                f"Calling `{what}_wait` without any prior call to `{what}_async`.", what
            )
        try:
            if not self._requests.wait(self._goal, timeout):
                raise VectorTimeout(
                    f"{what} was not finished within {timeout:g} s: {self._requests.unfinished()}"
                )
        except (EnvError, Closed):
            self._waiting_for = ""
            raise
        self._waiting_for = ""

    def _write(self, actions: Any) -> channel.Arguments | None:
        """Puts a batch of actions where the workers read it, or into a message."""
        if np.isscalar(actions):
            raise TypeError(f"expected actions for {self.num_envs} environments, got {actions!r}")
        if self._actions is not None:
            self._actions.write(actions)
            return None
        each = list(iterate(self.action_space, actions))
        if len(each) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} actions, got {len(each)}")
        return channel.Arguments(dict(enumerate(each)), None)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + row for row in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} seeds, got {len(seed)}")
        return list(seed)


def _options(
    create_env: Callable[..., Any],
    workers: int,
    num_envs: int,
    autoreset: Any,
    on_crash: Literal["raise", "restart"],
    start: starting.Start,
    start_timeout: float | None,
) -> PoolOptions:
    behaviour = channel.Behaviour(
        autoreset=autoreset,
        first_step_resets=False,
        infos=True,
        infer=False,
        any_space=True,
        compare="layout",
        numpy_numbers=True,
    )
    return PoolOptions(
        create_env,
        workers,
        1,
        num_envs,
        None,
        autoreset == "same",
        "float64",
        start,
        on_crash,
        behaviour,
        start_timeout,
    )
