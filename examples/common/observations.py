"""Observations of any space as dicts of arrays, which networks take.

A part is a space inside Dict spaces, by a name such as `camera/left`; an observation that is no
Dict is the part `obs`. The part `action_mask`, as Gymnasium and PettingZoo name it, tells which
actions are legal: it is no input of the network, whose policy does not choose the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from examples.common.options import OptionError

Observation = dict[str, NDArray[Any]]  # a part of the observation space each, [E, ...]

MASK = "action_mask"
ILLEGAL = -1e9  # the logit of an action whose mask is 0


class DictOfBoxes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations as dicts of arrays: uint8 stays, all else becomes float32.

    Args:
        masked: `infos["action_mask"]` becomes a part.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], masked: bool = False) -> None:
        super().__init__(env)
        self.parts = Parts(env.observation_space, env.action_space, masked)
        self.observation_space = self.parts.boxes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = self.env.reset(seed=seed, options=options)
        return self.parts.of(observation, info), info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self.parts.of(observation, info), reward, terminated, truncated, info


class Parts:
    """What a learner takes of an observation.

    Args:
        masked: infos have an `action_mask`, which becomes a part.

    Attributes:
        boxes: a Dict of a Box for each part.
        left_out: the parts of kinds that no network takes (Text, Graph, Sequence).

    Raises:
        OptionError: it takes none of them.
    """

    def __init__(self, space: spaces.Space[Any], action: spaces.Space[Any], masked: bool) -> None:
        self._space = space
        found, choices = dict(parts_of(space)), number_of_choices(action)
        self._masked = masked and choices > 0
        self._taken = {
            name: part
            for name, part in found.items()
            if is_taken(part) and (name != MASK or as_box(part).shape == (choices,))
        }
        self.left_out = {name: part for name, part in found.items() if name not in self._taken}
        boxes = {name: as_box(part) for name, part in self._taken.items()}
        if not boxes.keys() - {MASK}:
            names = " and ".join(f"{name!r} is {kind_of(part)}" for name, part in found.items())
            raise OptionError(
                f"observation part {names}, which no network here takes: make an array of it with "
                "gymnasium.wrappers.TransformObservation"
            )
        if self._masked:
            boxes[MASK] = spaces.Box(0, 1, (choices,), np.float32)
        self.boxes = spaces.Dict(boxes)

    def of(self, observation: Any, info: dict[str, Any]) -> Observation:
        """The arrays of an observation."""
        values = dict(values_of(self._space, observation))
        arrays = {name: flat(space, values[name]) for name, space in self._taken.items()}
        if self._masked:
            arrays[MASK] = np.asarray(info[MASK], np.float32).reshape(-1)
        if MASK in arrays and not arrays[MASK].any():  # as of an agent that is not to act
            arrays[MASK] = np.ones_like(arrays[MASK])
        return arrays


def number_of_choices(space: spaces.Space[Any]) -> int:
    """The length of a mask of the actions; 0 for spaces without one."""
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return int(space.n) if isinstance(space, spaces.Discrete) else 0


def say_left_out(parts: Parts) -> None:
    """Says in the log, once in a process, which parts the learner leaves out."""
    for name, space in parts.left_out.items():
        _say(
            f"observation part {name!r} is {kind_of(space)}, which no network here takes: it is "
            "left out (gymnasium.wrappers.TransformObservation can make an array of it)"
        )


@functools.cache
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kind_of(space: spaces.Space[Any]) -> str:
    """`Text`, `MissionSpace`."""
    return type(space).__name__


def is_taken(space: spaces.Space[Any]) -> bool:
    """Whether its values are arrays of one shape with a meaning for networks."""
    if isinstance(space, spaces.Tuple):
        return all(map(is_taken, space.spaces))
    if isinstance(space, (spaces.Text, spaces.Graph, spaces.Sequence)):
        return False
    try:
        return isinstance(spaces.flatten_space(space), spaces.Box)
    except NotImplementedError:  # of a class that Gymnasium does not know
        return False


def parts_of(
    space: spaces.Space[Any], name: str = "obs"
) -> Iterator[tuple[str, spaces.Space[Any]]]:
    """The spaces in a Dict of any depth, by names such as `camera/left`."""
    if not isinstance(space, spaces.Dict):
        yield name, space
        return
    for key, part in space.spaces.items():
        yield from parts_of(part, str(key) if name == "obs" else f"{name}/{key}")


def values_of(space: spaces.Space[Any], value: Any, name: str = "obs") -> Iterator[tuple[str, Any]]:
    """The parts of an observation, by the same names."""
    if not isinstance(space, spaces.Dict):
        yield name, value
        return
    for key, part in space.spaces.items():
        yield from values_of(part, value[key], str(key) if name == "obs" else f"{name}/{key}")


def as_box(space: spaces.Space[Any]) -> spaces.Box:
    """The Box whose arrays `flat` gives."""
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8:
            return space
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))
    flattened = spaces.flatten_space(space)
    return spaces.Box(-np.inf, np.inf, flattened.shape, np.float32)


def flat(space: spaces.Space[Any], value: Any) -> NDArray[Any]:
    """A value of any space as an array: Discrete as one-hot, Box as it is."""
    if isinstance(space, spaces.Box):
        return np.asarray(value, np.uint8 if space.dtype == np.uint8 else np.float32)
    return np.asarray(spaces.flatten(space, value), np.float32)
