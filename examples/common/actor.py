"""The actor: a thread that plays in groups of environments and fills unrolls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from examples.common.config import Config
from examples.common.environments import VectorEnv, make_env
from examples.common.statistics import EpisodeReturns
from examples.common.unrolls import Unroll, UnrollQueue, UnrollsClosed

Policy = Callable[[NDArray[np.uint8]], tuple[NDArray[np.int64], NDArray[np.float32]]]
"""observations [E, C, H, W] -> actions [E] and the logarithms of their probabilities [E]."""


class Actor(threading.Thread):
    """Acts with `policy` until it is stopped or something fails.

    The environments are in several groups: while the emulator steps one, the policy infers for
    another. Both release the GIL for most of their time, which the learner's thread uses.
    """

    def __init__(
        self, config: Config, first_env: VectorEnv, policy: Policy, returns: EpisodeReturns
    ) -> None:
        """`first_env` is the first group of environments; the thread makes the others."""
        super().__init__(name="actor", daemon=True)
        self._config = config
        self._policy = policy
        self._returns = returns
        self._groups: list[_Group] = []
        self._first_env = first_env
        self.unrolls = UnrollQueue(
            # One a group: what one group has done is learned from while the others play. More would
            # only lie and age, as the work of a policy of many updates ago.
            config.actor.num_groups,
            config.actor.unroll_length,
            first_env.num_envs,
            first_env.observation_shape,
            config.learner.batch_size,
        )

    def run(self) -> None:
        try:
            self._add_group(self._first_env)
            while True:
                self._turn()
                # An emulator takes a tenth of a second to make, and the GIL with it. So the other
                # groups come when the first one has given the learner something to learn from.
                if len(self._groups) < self._config.actor.num_groups and self.unrolls.released:
                    self._add_group(make_env(self._config, self._config.envs_per_group))
        except UnrollsClosed:
            return
        except BaseException as error:  # noqa: BLE001 - raised again where the learner takes batches
            self.unrolls.fail(error)

    def stop(self) -> None:
        """Ends the thread and waits until it has let go of the environments."""
        self.unrolls.close()
        if self.is_alive():
            self.join()
        self._first_env.close()
        for group in self._groups:
            if group.env is not self._first_env:
                group.env.close()

    def _turn(self) -> None:
        """One step of every group that has an unroll to put it into; waits if none has.

        The groups are in the order in which they gave their last unrolls up, so that the one that
        has waited longest gets the next.
        """
        advanced = False
        for group in list(self._groups):
            advanced |= group.advance()
            if group.gave_up:
                self._groups.remove(group)
                self._groups.append(group)
        if not advanced:
            self._groups[0].advance(wait=True)

    def _add_group(self, env: VectorEnv) -> None:
        seed = self._config.actor_seed + len(self._groups) * env.num_envs
        group = _Group(env, self._policy, self.unrolls, self._returns)
        group.start(seed if self._config.actor.seed_envs else None)
        self._groups.append(group)


class _Group:
    """One vector of environments and the unroll it is filling."""

    def __init__(
        self, env: VectorEnv, policy: Policy, unrolls: UnrollQueue, returns: EpisodeReturns
    ) -> None:
        self.env = env
        self._policy = policy
        self._unrolls = unrolls
        self._returns = returns.column(env.num_envs)
        self._unroll: Unroll | None = None
        self._t = 0
        self.gave_up = False  # its unroll to the learner, in the last call of advance()

    def start(self, seed: int | None) -> None:
        self._observation = self.env.reset(seed)

    def advance(self, wait: bool = False) -> bool:
        """Finishes the step under way and starts the next one; False if there is no unroll to put
        it into. `wait`: then waits for one."""
        self.gave_up = False
        unroll = self._unroll
        if unroll is None:
            unroll = self._unroll = self._unrolls.take(wait)
            if unroll is None:
                return False
            unroll.observation[0] = self._observation
            self._t = 0
        else:
            self._finish_step(unroll)
        if not self.gave_up:
            self._act(unroll)
        return True

    def _finish_step(self, unroll: Unroll) -> None:
        step = self.env.recv()
        self._returns.add(step.reward, step.game_over)
        unroll.reward[self._t] = step.reward
        unroll.done[self._t] = step.done
        self._t += 1
        unroll.observation[self._t] = step.observation
        if self._t == len(unroll.action):
            self._observation = step.observation
            self._unrolls.put(unroll)
            self._unroll = None
            self.gave_up = True

    def _act(self, unroll: Unroll) -> None:
        action, log_prob = self._policy(unroll.observation[self._t])
        self.env.send(action)
        unroll.action[self._t] = action
        unroll.log_prob[self._t] = log_prob
