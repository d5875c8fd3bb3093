"""N-step transitions."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import numpy as np

from moolink.data import skeletons
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.replay.writer import Writer

if TYPE_CHECKING:
    from moolink.replay.client import ReplayClient
    from moolink.replay.local import Replay

Priority = Callable[[Any, float, float, Any], float]


@names_keywords
class NStepWriter:
    """Makes an n-step transition from each step of an environment. The transition of step t is

        observation         s_t
        action              a_t
        reward              r_t + d r_(t+1) + ... + d^(n-1) r_(t+n-1), float32
        discount            d^n, float32
        next_observation    s_(t+n)

    Its target is `reward + discount * value(next_observation)`, the n-step return of Sutton and
    Barto, Reinforcement Learning, 2nd edition, equation 7.1. If the episode ends at T < t + n, so
    does the transition: `reward` sums the T - t rewards up to there. If a limit has truncated the
    episode, `discount` is d^(T-t) and `next_observation` is s_T. If the episode has terminated,
    `discount` is 0 and `next_observation` is the last observation appended, which has no effect.

    Each observation is stored once, the last one of an episode n more times. A writer serves one
    environment and one thread.

    Args:
        replay: a replay, or a client of one.
        n: number of steps of a transition, at least 1.
        discount: d, from 0 to 1.
        table: name of the replay's table; may be left out if the replay has only one.
        priority: computes the priority of a transition from the note of step t, `reward`,
            `discount` and the note of s_(t+n), in this order. None: each priority is 1.

    Raises:
        ValueError: `n` or `discount` is out of range.
    """

    def __init__(
        self,
        replay: Replay | ReplayClient,
        n: int,
        discount: float,
        *,
        table: str | None = None,
        priority: Priority | None = None,
    ) -> None:
        self._n = integer_of(n, "n", least=1)
        if not 0 <= discount <= 1:
            raise ValueError(f"discount must be from 0 to 1, got {discount}")
        self._discount = float(discount)
        self._table = table
        self._priority = priority
        self._writer: Writer = replay.writer(self._n + 1)
        # Reward, discount and note of the last steps.
        self._last: collections.deque[tuple[float, float, Any]] = collections.deque(maxlen=self._n)
        self._newest: tuple[Any, Any, Any] = (None, None, None)  # observation, action, note
        self._failed = False  # a step of the episode may be in the writer and not in the above

    def append(
        self, observation: Any, action: Any, reward: SupportsFloat, note: Any = None
    ) -> None:
        """Appends a step: an observation, the action taken after it, and the action's reward.

        Observation and action are trees of arrays. Makes the transition that ends with this
        observation, and waits until the limiter and the table's size admit it.

        Args:
            note: passed to `priority`, for example the action values of the step; not stored.

        Raises:
            TypeError, ValueError: it differs from the first step; the replay's and `priority`'s
                errors. After any of them the episode cannot go on, as its returns would be wrong:
                a ValueError until `terminate` or `truncate`, which then make no transitions.
        """
        if self._failed:
            raise ValueError(
                "a step of this episode failed, so it cannot go on: call terminate() or "
                "truncate(), then begin another one"
            )
        self._failed = True  # unless all of it is done
        self._arrive(observation, action, note)
        self._last.append((float(reward), self._discount, note))
        self._newest = observation, action, note
        self._failed = False

    def terminate(self) -> None:
        """The episode has ended with the last step: no reward can follow. Makes the transitions
        that end there. The episode has ended even if this raises an error."""
        if self._last:
            reward, _, note = self._last[-1]
            self._last[-1] = (reward, 0.0, note)
        self._end(*self._newest)

    def truncate(self, observation: Any, note: Any = None) -> None:
        """The episode was cut off after the last step, before `observation`: rewards would have
        followed. Makes the transitions that end there. The episode has ended even if this raises an
        error."""
        self._end(observation, self._newest[1], note)

    def flush(self) -> None:
        """As :meth:`Writer.flush`."""
        self._writer.flush()

    def close(self) -> None:
        """As :meth:`Writer.close`. The last steps of an episode that was neither terminated nor
        truncated make no transitions."""
        self._writer.close()

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.__exit__(kind, value, traceback)

    def _end(self, observation: Any, action: Any, note: Any) -> None:
        try:
            # Each transition has a step of its own to end with, as if nothing changed after the
            # end.
            for _ in range(self._n if self._last and not self._failed else 0):
                self._arrive(observation, action, note)
                self._last.append((0.0, 1.0, None))
        finally:
            self._last.clear()
            self._newest = (None, None, None)
            self._writer.end_episode()
            self._failed = False

    def _arrive(self, observation: Any, action: Any, note: Any) -> None:
        """Stores a step, with the return of the transition that ends with its observation."""
        total, product = 0.0, 1.0
        for reward, discount, _ in self._last:
            total += product * reward
            product *= discount
        step = {"observation": observation, "action": action}
        step |= {"reward": np.float32(total), "discount": np.float32(product)}
        self._writer.append(step)
        if len(self._writer) <= self._n:
            return
        of, first = self._writer.history, -self._n - 1
        transition = {
            "observation": _at(of["observation"], first),
            "action": _at(of["action"], first),
            "reward": of["reward"][-1],
            "discount": of["discount"][-1],
            "next_observation": _at(of["observation"], -1),
        }
        priority = 1.0
        if self._priority is not None:
            priority = float(self._priority(self._last[0][2], total, product, note))
        self._writer.create_item(transition, priority, table=self._table)


def _at(columns: Any, index: int) -> Any:
    """One step's part of each array of a tree."""
    leaves, skeleton = skeletons.flatten(columns)
    return skeletons.unflatten(skeleton, [column[index] for column in leaves])
