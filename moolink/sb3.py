"""A moolink VectorEnv as the vector environment of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv as SB3VecEnv

from moolink.env_pool import calls
from moolink.env_pool.vector_env import VectorEnv

Array = npt.NDArray[Any]
Indices = int | Iterable[int] | None


class VecEnv(SB3VecEnv):  # type: ignore[misc]  # SB3 may be absent when types are checked.
    """A `moolink.VectorEnv` for algorithms of Stable-Baselines3:

        envs = moolink.sb3.VecEnv(moolink.VectorEnv(make_env, num_envs=16))
        PPO("MlpPolicy", envs).learn(100_000)

    An ended episode's last observation is in ``infos[i]["terminal_observation"]``, and
    ``infos[i]["TimeLimit.truncated"]`` tells a time limit from an end. For episode returns wrap
    this in SB3's `VecMonitor`, or let `create_env` wrap each environment in its `Monitor`.

    Args:
        envs: with autoreset mode SAME_STEP. It is closed with this object.

    Raises:
        ValueError: `envs` has another autoreset mode.
    """

    def __init__(self, envs: VectorEnv) -> None:
        if envs.autoreset_mode != AutoresetMode.SAME_STEP:
            raise ValueError(
                "Stable-Baselines3 needs environments that are reset in the step that ends an "
                f"episode: autoreset_mode is {envs.autoreset_mode}, not AutoresetMode.SAME_STEP"
            )
        self._envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Resets all environments, with the arguments of `seed` and `set_options`; observations."""
        observations: Any = None
        for options, rows in _groups(self._options):
            mask = np.zeros(self.num_envs, np.bool_)
            mask[rows] = True
            observations, infos = self._envs.reset(
                seed=self._seeds, options={**options, "reset_mask": mask}
            )
            for row in rows:
                self.reset_infos[row] = _of_row(infos, row)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Begins a step; actions have the shape (num_envs, *action shape)."""
        self._envs.step_async(actions)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Returns observations, rewards float32 [num_envs], dones bool [num_envs], and infos."""
        observations, rewards, terminated, truncated, batched = self._envs.step_wait()
        dones = terminated | truncated
        infos = [_of_row(batched, row) for row in range(self.num_envs)]
        for row in np.flatnonzero(dones).tolist():
            self.reset_infos[row] = infos[row]
            last = infos[row].pop("final_obs")
            infos[row] = {**infos[row].pop("final_info", {}), "terminal_observation": last}
        for info, limited in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = limited
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Closes the VectorEnv."""
        self._envs.close()

    def get_images(self) -> Sequence[Array | None]:
        """Returns each environment's rendering."""
        return self._envs.call("render")

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Returns the attribute of some environments; AttributeError if one has none."""
        found = self._call(calls.get_if_there, attr_name, indices)
        if not all(there for there, _ in found):
            raise AttributeError(f"an environment has no attribute {attr_name!r}")
        return [value for _, value in found]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets the attribute of some environments to one value."""
        self._call(calls.assign, attr_name, indices, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of some environments; returns the results."""
        return self._call(calls.call, method_name, indices, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Tells which of some environments have such a wrapper."""
        return self._call(calls.is_wrapped, "env_is_wrapped", indices, wrapper_class)

    def _call(
        self, function: Any, name: str, indices: Indices, *positional: Any, **keywords: Any
    ) -> list[Any]:
        rows = list(self._get_indices(indices))
        answers = self._envs.call_some(
            function, name, {row % self.num_envs: (positional, keywords) for row in rows}
        )
        return [answers[row % self.num_envs] for row in rows]


def _groups(options: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Groups the environments by the options of their reset: usually one group."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for row, each in enumerate(options):
        for group, rows in groups:
            if group == each:
                rows.append(row)
                break
        else:
            groups.append((each, [row]))
    return groups


def _of_row(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """Takes one environment's info out of Gymnasium's batch: "_key" masks those that have it."""
    found = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and mask[row]:
            found[key] = _of_row(values, row) if isinstance(values, dict) else values[row]
    return found
