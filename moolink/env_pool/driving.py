"""One interface to vector environments of any library: `send` actions, `recv` ready rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from moolink._core import check_array
from moolink.data.frameworks import as_numpy, is_torch
from moolink.env_pool.spaces import leaves, map_tree
from moolink.errors import Error
from moolink.metrics import sources
from moolink.metrics.sources import Value

Array: TypeAlias = Any  # of numpy, or of the environments' own framework, on their device
Step: TypeAlias = tuple[Any, Array, Array, Array, dict[str, Any]]


class Driven(Protocol):
    """Vector environments of any library. A `moolink.VectorEnv` is one by itself.

    Attributes:
        num_envs: rows of all environments together; an agent of several in one has a row of its
            own.
        single_observation_space, single_action_space: of one row.
    """

    num_envs: int
    single_observation_space: Any
    single_action_space: Any

    def async_reset(self, seed: int | None = None) -> None:
        """Begins to reset all environments; `recv` gives their first observations."""

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Has rows take their actions: those of `env_ids`, by default of the last `recv`."""

    def recv(self) -> Step:
        """Waits for rows that are ready.

        Returns:
            observations, rewards (float32; float64 from a `moolink.VectorEnv`), terminated,
            truncated, infos; arrays of n rows as the environments gave them, without a copy, so
            they may change at the next `send` or `recv`. ``infos["env_id"]``, ints [n], names the
            rows; ``infos["mask"]``, bool [n], is there if rows can be without an agent, and False
            for these.
        """

    def close(self) -> None:
        """Closes the environments."""


def drive(envs: Any) -> Driven:
    """Returns an adapter with the interface `Driven`; the vector environment does not change.

    Args:
        envs: a `moolink.VectorEnv`; a `gymnasium.vector.VectorEnv`, ALE's among them; an EnvPool
            of sail-sg; a vector or native environment of PufferLib 3; or any object with
            `num_envs`, ``reset() -> (observations, infos)`` and ``step(actions) -> (observations,
            rewards, terminated, truncated, infos)``, such as those of Isaac Lab.

    Raises:
        TypeError: it is none of these.
    """
    if all(hasattr(envs, name) for name in ("async_reset", "send", "recv")):
        if hasattr(envs, "driver_env"):
            return _PufferLib(envs)
        return _EnvPool(envs) if hasattr(envs, "all_env_ids") else envs
    if all(hasattr(envs, name) for name in ("num_envs", "reset", "step")):
        return _InStep(envs)
    raise TypeError(
        f"{type(envs).__name__} has no num_envs, reset and step of a vector environment, nor "
        "async_reset, send and recv"
    )


class _Adapter:
    """The base of the adapters: the environments, and the rows of the last `recv`."""

    def __init__(self, envs: Any, num_envs: int) -> None:
        self._envs = envs
        self.num_envs = num_envs
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self._last: npt.NDArray[Any] = np.arange(num_envs)
        spec = getattr(envs, "spec", None)
        self.environment = str(getattr(spec, "id", None) or "")  # for the dashboard
        sources.add(self)

    def _metrics(self) -> Iterable[Value]:
        return ()

    def _require_last(self, env_ids: Any) -> None:
        if env_ids is not None and not np.array_equal(env_ids, self._last):
            raise ValueError(
                f"{type(self._envs).__name__} takes actions for the rows of the last recv, which "
                f"are {self._last.tolist()}, not for {np.asarray(env_ids).tolist()}"
            )

    def close(self) -> None:
        sources.remove(self)
        self._envs.close()


class _InStep(_Adapter):
    """Environments that step all together: Gymnasium's, ALE's, Isaac Lab's."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs, int(envs.num_envs))
        begin, end = (
            ("send", "recv")
            if hasattr(envs, "send") and hasattr(envs, "recv")
            else ("step_async", "step_wait")
        )
        self._begin: Callable[[Any], object] | None = getattr(envs, begin, None)
        self._end: Callable[[], Step] | None = getattr(envs, end, None)
        self._ready: Step | None = None
        self._under_way = False
        self._convert: Callable[[Any], Any] = as_numpy

    def async_reset(self, seed: int | None = None) -> None:
        observations, infos = self._envs.reset(**({} if seed is None else {"seed": seed}))
        first = leaves(observations)[0]
        rewards: Any
        if is_torch(first):
            import torch

            self._convert = _as_torch
            rewards = first.new_zeros(self.num_envs, dtype=torch.float32)
        else:
            self._convert = as_numpy
            rewards = np.zeros(self.num_envs, np.float32)
        self._ready = (observations, rewards, rewards != 0, rewards != 0, infos)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        self._require_last(env_ids)
        structured = isinstance(actions, (dict, tuple))
        taken = map_tree(self._convert, actions) if structured else self._convert(actions)
        if self._begin is None or self._end is None:
            self._ready = self._envs.step(taken)
        else:
            self._begin(taken)
            self._under_way = True

    def recv(self) -> Step:
        ready, self._ready = self._ready, None
        if self._under_way and self._end is not None:
            self._under_way = False
            ready = self._end()
        if ready is None:
            raise Error("nothing is under way: call async_reset or send first")
        observations, rewards, terminated, truncated, infos = ready
        infos = {"env_id": self._last} | infos
        # One dtype for all, as a Batcher needs it: ALE's rewards are int32, Gymnasium's float64.
        rewards = rewards.float() if is_torch(rewards) else np.asarray(rewards, np.float32)
        return observations, rewards, terminated, truncated, infos


class _EnvPool(_Adapter):
    """sail-sg's EnvPool, made with env_type="gymnasium": already as it is meant here."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs, len(envs))

    def async_reset(self, seed: int | None = None) -> None:
        if seed is not None:
            raise ValueError("EnvPool takes its seed in envpool.make(..., seed=)")
        self._envs.async_reset()

    def send(self, actions: Any, env_ids: Any = None) -> None:
        ids = self._last if env_ids is None else as_numpy(env_ids)
        self._envs.send(as_numpy(actions), ids)

    def recv(self) -> Step:
        step: Step = self._envs.recv()
        self._last = step[4]["env_id"]
        return step


class _PufferLib(_Adapter):
    """PufferLib 3's vector environments, and its native ones; its infos are a list of dicts."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs, int(envs.num_agents))

    def async_reset(self, seed: int | None = None) -> None:
        self._envs.async_reset(*(() if seed is None else (seed,)))

    def send(self, actions: Any, env_ids: Any = None) -> None:
        self._require_last(env_ids)
        self._envs.send(as_numpy(actions))

    def recv(self) -> Step:
        observations, rewards, terminated, truncated, infos, rows, mask = self._envs.recv()
        self._last = rows
        return (
            observations,
            rewards,
            terminated,
            truncated,
            {"env_id": rows, "mask": mask, "infos": infos},
        )


def _as_torch(actions: Any) -> Any:
    if is_torch(actions):  # the environments read it, on any device that they have
        return actions
    import torch

    check_array(actions, "an action")
    return torch.from_dlpack(actions)  # type: ignore[attr-defined]
