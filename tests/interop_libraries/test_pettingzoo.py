"""PettingZoo's parallel environments as rows, with a mask of the living."""

import functools

import numpy as np
import pytest
from gymnasium import spaces

import moolink
from tests.interop_libraries.learner import train

pytest.importorskip("pettingzoo", reason="needs pettingzoo: make test-interop")

from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test

from moolink.pettingzoo import Agents, Rows


class Mortal(ParallelEnv):
    """Agent a lives for a + 1 steps and observes (a, steps, last action); rewards are actions."""

    metadata = {"name": "mortal"}

    def __init__(self, count=3, odd=False):
        self.possible_agents = [f"agent_{number}" for number in range(count)]
        sizes = {agent: 4 if odd and agent == "agent_1" else 3 for agent in self.possible_agents}
        self.spaces = {
            agent: (spaces.Box(-1, 100, (size,), np.float32), spaces.Discrete(10))
            for agent, size in sizes.items()
        }

    def observation_space(self, agent):
        return self.spaces[agent][0]

    def action_space(self, agent):
        return self.spaces[agent][1]

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.steps = 0
        return {agent: self.observe(agent, -1) for agent in self.agents}, {
            agent: {} for agent in self.agents
        }

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.steps += 1
        over = {agent: int(agent[-1]) < self.steps for agent in self.agents}
        results = (
            {agent: self.observe(agent, actions[agent]) for agent in self.agents},
            {agent: float(actions[agent]) for agent in self.agents},
            over,
            dict.fromkeys(self.agents, False),
            {agent: {} for agent in self.agents},
        )
        self.agents = [agent for agent in self.agents if not over[agent]]
        return results

    def observe(self, agent, action):
        return np.array([int(agent[-1]), self.steps, action], np.float32)


def rows_of(make, count, **options):
    return Rows(moolink.VectorEnv(functools.partial(Agents, make), count, **options))


def test_the_test_environment_is_one_of_pettingzoo():
    parallel_api_test(Mortal(), num_cycles=50)


def test_agents_are_rows_until_they_die():
    rows = rows_of(Mortal, 2, num_workers=2)
    assert rows.num_envs == 6
    assert rows.single_action_space == spaces.Discrete(10)
    rows.async_reset()
    observations, rewards, terminated, _, infos = rows.recv()
    assert observations[:, 0].tolist() == [0, 1, 2] * 2
    assert infos["mask"].all()
    assert not terminated.any()
    lived = []
    for _ in range(3):
        lived.append(infos["mask"].tolist())
        rows.send(np.arange(1, 7), infos["env_id"])
        observations, rewards, terminated, truncated, infos = rows.recv()
        assert infos["env_id"].tolist() == list(range(6))
        # An agent is paid for each step in which it lived, the last one included.
        assert rewards.tolist() == [
            a * alive for a, alive in zip(range(1, 7), lived[-1], strict=True)
        ]
        step = len(lived)
        assert terminated.tolist() == [number == step - 1 for number in range(3)] * 2
        assert not truncated.any()
    assert lived == [[True] * 6, [False, True, True] * 2, [False, False, True] * 2]
    assert infos["mask"].all()  # the next episode
    assert observations[:, 1].tolist() == [0] * 6
    rows.close()


def test_environments_come_first_ready_first_served():
    rows = rows_of(Mortal, 4, num_workers=2, batch_size=2)
    rows.async_reset()
    for _ in range(10):
        observations, *_, infos = rows.recv()
        assert observations.shape == (6, 3)
        np.testing.assert_array_equal(observations[:, 0], infos["env_id"] % 3)
        rows.send(np.ones(6, np.int64))
    rows.close()


def test_agents_with_other_spaces_are_refused():
    with pytest.raises(ValueError, match="'agent_1' has Box"):
        Agents(functools.partial(Mortal, odd=True))


def test_a_learner_plays_well_after_100_updates():
    rows = rows_of(Mortal, 8, num_workers=2)
    assert train(rows, 100, batch_size=64) > 13  # random play: 9; the best: 18
    rows.close()
