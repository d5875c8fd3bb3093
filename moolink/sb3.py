"""A moolink VectorEnv as the vector environment of Stable-Baselines3."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink.data.frameworks import as_numpy
from moolink.env_pool import calls
from moolink.env_pool.vector_env import VectorEnv
from moolink.internal.extras import needed_by

with needed_by("moolink.sb3", "sb3"):
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode
    from stable_baselines3.common.vec_env import VecEnv as SB3VecEnv

Array = npt.NDArray[Any]
Indices = int | Iterable[int] | None

# Their values are single arrays.
_SHAPED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class VecEnv(SB3VecEnv):  # type: ignore[misc]  # SB3 may be absent when types are checked.
    """A `moolink.VectorEnv` for algorithms of Stable-Baselines3:

        envs = moolink.sb3.VecEnv(moolink.VectorEnv(make_env, num_envs=16))
        PPO("MlpPolicy", envs).learn(100_000)

    An ended episode's last observation is in ``infos[i]["terminal_observation"]``, and
    ``infos[i]["TimeLimit.truncated"]`` tells a time limit from an end. For episode returns wrap
    this in SB3's `VecMonitor`, or let `create_env` wrap each environment in its `Monitor`.

    Args:
        envs: with autoreset mode SAME_STEP and copies of observations, its defaults. It is closed
            with this object.

    Raises:
        ValueError: `envs` has another autoreset mode, or copy=False.
    """

    def __init__(self, envs: VectorEnv) -> None:
        if envs.autoreset_mode != AutoresetMode.SAME_STEP:
            raise ValueError(
                "Stable-Baselines3 needs environments that are reset in the step that ends an "
                f"episode: autoreset_mode is {envs.autoreset_mode}, not AutoresetMode.SAME_STEP"
            )
        if not envs.copies:
            raise ValueError(
                "Stable-Baselines3 keeps observations over steps: leave copy=True in the VectorEnv"
            )
        self._envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Resets all environments, with the arguments of `seed` and `set_options`; observations."""
        # As in SB3, an environment gets options only if there are some.
        given = zip(self._seeds, self._options, strict=True)
        observations, self.reset_infos = self._envs.reset_some(
            {row: (seed, options or None) for row, (seed, options) in enumerate(given)}
        )
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Begins a step.

        Args:
            actions: one for each environment, indexed by environment first: an array of shape
                (num_envs, *action shape), or a list or tuple of actions, whatever the action space.
                For a Dict space also a dict of such arrays.

        Raises:
            ValueError, TypeError: they are no actions of the space, or not one per environment.
        """
        if not isinstance(actions, Mapping):
            actions = self._batch(actions)
        self._envs.step_async(actions)

    def step_wait(self) -> tuple[Any, Array, Array, list[dict[str, Any]]]:
        """Returns observations, rewards float32 [num_envs], dones bool [num_envs], and infos."""
        observations, rewards, terminated, truncated, infos = self._envs.step_wait_apart()
        dones = terminated | truncated
        for row in np.flatnonzero(dones).tolist():
            began = infos[row]
            last, info = began.pop("final_obs"), began.pop("final_info")
            self.reset_infos[row] = began
            infos[row] = {**info, "terminal_observation": last}
        for info, limited in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = limited
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Closes the VectorEnv."""
        self._envs.close()

    def get_images(self) -> Sequence[Array | None]:
        """Returns each environment's rendering; None for each, and a warning, if they have none."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"the environments' render_mode is {self.render_mode!r}, and only 'rgb_array' "
                "gives images",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self._envs.call("render")

    def has_attr(self, attr_name: str) -> bool:
        """Tells whether all environments have the attribute."""
        return all(self._call(calls.has, attr_name, None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Returns the attribute of some environments; AttributeError if one has none."""
        found = self._call(calls.get_if_there, attr_name, indices)
        if not all(there for there, _ in found):
            raise AttributeError(f"an environment has no attribute {attr_name!r}")
        return [value for _, value in found]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets the attribute of some environments' outermost wrappers to one value."""
        self._call(calls.assign_outermost, attr_name, indices, value)

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
        for row in rows:
            if not -self.num_envs <= row < self.num_envs:
                raise IndexError(f"there is no environment {row}: num_envs is {self.num_envs}")
        answers: list[Any] = []
        # An environment that is named twice is called twice.
        for some in [rows] if len({*rows}) == len(rows) else [[row] for row in rows]:
            places = [row % self.num_envs for row in some]
            found = self._envs.call_some(
                function, name, dict.fromkeys(places, (positional, keywords))
            )
            answers += [found[place] for place in places]
        return answers

    def _batch(self, actions: Any) -> Any:
        """Returns a batch of the action space."""
        space = self.action_space
        if not isinstance(actions, list | tuple):
            actions = as_numpy(actions)
            whole = isinstance(space, _SHAPED) and actions.dtype != object
            if whole and actions.shape == (self.num_envs, *space.shape):
                return _whole_numbers(actions, space.dtype)
        return _batched(space, self._of_each(actions))

    def _of_each(self, actions: Any) -> list[Any]:
        """Returns each environment's action; raises unless there is one for each."""
        count = self.num_envs
        in_array = not isinstance(actions, list | tuple)
        if in_array and actions.ndim == 0:
            raise TypeError(f"expected actions for {count} environments, got {actions!r}")
        if len(actions) != count:
            raise ValueError(
                f"expected one action for each of the {count} environments, got {len(actions)}"
            )
        if in_array and isinstance(self.action_space, spaces.Tuple):
            return [tuple(row) for row in actions]  # Each row has an environment's parts.
        return list(actions)


def _batched(space: Any, each: list[Any], path: str = "action") -> Any:
    """Makes one batch of `space` from the environments' actions.

    Raises:
        ValueError: an action has another structure or shape than its space.
        TypeError: the actions of a Tuple space are arrays that may also be the space's parts.
    """
    if isinstance(space, spaces.Dict):
        for row, action in enumerate(each):
            if not isinstance(action, Mapping) or action.keys() != space.spaces.keys():
                keys = list(action) if isinstance(action, Mapping) else type(action).__name__
                raise ValueError(
                    f"{path} of environment {row}: expected a dict with keys {list(space.spaces)}, "
                    f"got {keys}"
                )
        return {
            key: _batched(part, [action[key] for action in each], f"{path}.{key}")
            for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        for row, action in enumerate(each):
            _require_parts(space, action, f"{path} of environment {row}")
        return tuple(
            _batched(part, [action[i] for action in each], f"{path}[{i}]")
            for i, part in enumerate(space.spaces)
        )
    if not isinstance(space, _SHAPED):
        return tuple(each)
    arrays = [as_numpy(action) for action in each]
    for row, array in enumerate(arrays):
        if array.shape != space.shape:
            raise ValueError(
                f"{path} of environment {row} has shape {array.shape}, its space {space.shape}"
            )
    return _whole_numbers(np.stack(arrays), space.dtype)


def _require_parts(space: Any, action: Any, what: str) -> None:
    if not isinstance(action, list | tuple):
        raise TypeError(
            f"{what} is {type(action).__name__}, which may be a part of all environments' actions: "
            "give each environment a tuple"
        )
    if len(action) != len(space.spaces):
        raise ValueError(
            f"{what}: expected a tuple of {len(space.spaces)} parts, got {len(action)}"
        )


def _whole_numbers(actions: Array, dtype: Any) -> Array:
    """Converts floats to the integers of a space: SB3's MultiBinary policies give floats.

    Other values stay as they are, and the VectorEnv refuses them.
    """
    if np.dtype(dtype).kind not in "iub" or actions.dtype.kind != "f":
        return actions
    with np.errstate(invalid="ignore"):
        converted = actions.astype(dtype)
    return converted if np.array_equal(converted, actions) else actions
