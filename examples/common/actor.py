"""The actor: a thread that plays in groups of environments and fills unrolls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from examples.common.config import Config
from examples.common.environments import VectorEnv, make_env
from examples.common.statistics import EpisodeReturns
from examples.common.unrolls import UnrollQueue, UnrollsClosed

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
            2 * config.actor.num_groups,  # as many again as are being filled, so as not to wait
            config.actor.unroll_length,
            first_env.num_envs,
            first_env.observation_shape,
            config.learner.batch_size,
        )

    def run(self) -> None:
        try:
            self._add_group(self._first_env)
            while True:
                for group in self._groups:
                    group.step()
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
        for group in self._groups[1:]:
            group.env.close()

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
        self._unroll = unrolls.take()
        self._t = 0

    def start(self, seed: int | None) -> None:
        self._unroll.observation[0] = self.env.reset(seed)
        self._act()

    def step(self) -> None:
        """Takes the result of the step under way and starts the next one."""
        step = self.env.recv()
        self._returns.add(step.reward, step.game_over)
        self._unroll.reward[self._t] = step.reward
        self._unroll.done[self._t] = step.done
        self._t += 1
        self._unroll.observation[self._t] = step.observation
        if self._t == len(self._unroll.action):
            self._unrolls.put(self._unroll)
            self._unroll = self._unrolls.take()
            self._unroll.observation[0] = step.observation
            self._t = 0
        self._act()

    def _act(self) -> None:
        action, log_prob = self._policy(self._unroll.observation[self._t])
        self.env.send(action)
        self._unroll.action[self._t] = action
        self._unroll.log_prob[self._t] = log_prob
