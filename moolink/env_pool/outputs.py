"""Makes the results of Gymnasium's step and reset from shared memory and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array

from moolink.data.warm_memory import WarmMemory
from moolink.env_pool import channel
from moolink.env_pool.memory import PoolMemory, PoolShape
from moolink.env_pool.spaces import Leaf, map_tree
from moolink.env_pool.vector_infos import add, merge, of_row

Array = npt.NDArray[Any]
Step = tuple[Any, Array, Array, Array, dict[str, Any]]
Apart = tuple[Any, Array, Array, Array, list[dict[str, Any]]]


class Outputs:
    """Makes the outputs of all environments, or of some."""

    def __init__(
        self,
        shape: PoolShape,
        memory: PoolMemory,
        single_observation_space: Any,
        *,
        same_step: bool,
        copy: bool,
        together: int,
    ) -> None:
        """`together` rows are stepped together: those of a vector environment, else 1."""
        self._tree = shape.observation
        self._memory = memory
        self._space = single_observation_space
        self._same_step = same_step
        self._copy = copy
        self._together = together
        self._all = list(range(shape.num_envs))
        # Where observations come in messages: each environment's last one.
        self._last: list[Any] = [None] * shape.num_envs
        if memory.observation is not None:
            self._warm = map_tree(lambda _: WarmMemory(), memory.observation)

    def all(self, results: channel.Results, *, reset: bool = False) -> Step:
        """Returns the outputs of all environments; after a `reset` nothing has ended."""
        step: Step = self._make(self._all, slice(None), results, reset=reset)
        return step

    def of_rows(self, rows: list[int], results: channel.Results) -> Step:
        """Returns the outputs of some environments, and which they are."""
        step: Step = self._make(rows, np.asarray(rows, np.intp), results, reset=False)
        step[4]["env_id"] = np.asarray(rows, np.int64)
        return step

    def apart(self, results: channel.Results, *, reset: bool = False) -> Apart:
        """Returns the outputs of all environments, with a list of their infos, not batched."""
        observations, rewards, terminated, truncated, infos = self._make(
            self._all, slice(None), results, reset=reset, infos_of=self._infos_apart
        )
        return observations, rewards, terminated, truncated, infos or [{} for _ in self._all]

    def _make(
        self,
        rows: list[int],
        part: Any,
        results: channel.Results,
        *,
        reset: bool,
        infos_of: Callable[..., Any] | None = None,
    ) -> Any:
        memory = self._memory
        terminated, truncated = memory.terminated[part], memory.truncated[part]
        if isinstance(part, slice):
            terminated, truncated = terminated.copy(), truncated.copy()
        infos: Any = {}
        ended = np.logical_or(terminated, truncated)
        has_ended = self._same_step and not reset and bool(ended.any())
        if results or has_ended:
            batched = self._infos if infos_of is None else infos_of
            infos = batched(rows, results, ended if has_ended else None)
        return (
            self._observations(rows, part, results),
            np.array(memory.reward[part]),
            terminated,
            truncated,
            infos,
        )

    def _observations(self, rows: list[int], part: Any, results: channel.Results) -> Any:
        if self._memory.observation is None:
            for row, value in results.observations.items():
                self._last[row] = value
            empty: Any = create_empty_array(self._space, n=len(rows), fn=np.zeros)
            return concatenate(self._space, [self._last[row] for row in rows], empty)
        if isinstance(part, slice) and not self._copy:
            return map_tree(lambda array: array, self._memory.observation)

        def gather(array: Array, warm: WarmMemory) -> Array:
            taken = warm.empty((len(rows), *array.shape[1:]), array.dtype)
            if isinstance(part, slice):
                taken[...] = array
            else:
                np.take(array, part, axis=0, out=taken, mode="clip")
            return taken

        return map_tree(gather, self._memory.observation, self._warm)

    def _infos(
        self, rows: list[int], results: channel.Results, ended: Array | None
    ) -> dict[str, Any]:
        """Batches the infos; those of ended episodes are in final_info, with final_obs."""
        infos: dict[str, Any] = {}
        for position, info in enumerate(self._each_info(rows, results, ended)):
            add(infos, info, position, len(rows))
        if results.vector_infos:
            position_of = {row: position for position, row in enumerate(rows)}
            for row, info in results.vector_infos.items():
                merge(infos, info, position_of[row], len(rows))
        return infos

    def _infos_apart(
        self, rows: list[int], results: channel.Results, ended: Array | None
    ) -> list[dict[str, Any]]:
        """The infos of each row; those of vector environments are taken apart."""
        found = self._each_info(rows, results, ended)
        for first, batch in results.vector_infos.items():
            for row in range(first, first + self._together):
                found[row] |= of_row(batch, row - first)
        return found

    def _each_info(
        self, rows: list[int], results: channel.Results, ended: Array | None
    ) -> list[dict[str, Any]]:
        """Each row's info, with the last episode's final_info and final_obs if one has `ended`."""
        found = []
        for position, row in enumerate(rows):
            info = results.infos.get(row, {})
            if ended is not None and ended[position]:
                final = {
                    "final_info": results.final_infos.get(row, {}),
                    "final_obs": self._final_obs(row, results),
                }
                info = final | info
            found.append(info)
        return found

    def _final_obs(self, row: int, results: channel.Results) -> Any:
        if self._memory.final_obs is None:
            return results.final_obs.get(row, self._last[row])

        def value(leaf: Leaf, array: Array) -> Any:
            return array[row].item() if leaf.scalar else array[row].copy()

        return map_tree(value, self._tree, self._memory.final_obs)
