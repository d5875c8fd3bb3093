"""Environments of other packages by `--env-id`: `package:Id-v0`, and PettingZoo's of all kinds."""

import functools

import numpy as np
import pytest

pytest.importorskip("tyro", reason="the learners need it: make test-interop")

import moolink
from examples.common.environments import make_envs, rules_of
from examples.common.observations import MASK
from examples.common.options import ImpalaOptions, defaults
from tests.learning.processes import run


def make(env_id, num_envs):
    return make_envs(defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1), num_envs)


def play(envs, steps):
    """Plays legal actions at random, and returns the number of episodes."""
    random, over = np.random.default_rng(0), 0
    observation = envs.reset(0)
    for _ in range(steps):
        shape = (envs.num_envs, envs.actions.choices[0])
        chances = random.random(shape) * observation.get(MASK, np.ones(shape))
        envs.send(chances.argmax(-1)[:, None])
        step = envs.recv()
        observation, over = step.observation, over + int(step.episode_over.sum())
    envs.close()
    return over


def test_minigrid(capfd):
    pytest.importorskip("minigrid", reason="needs minigrid: make test-interop")
    env_id = "minigrid:MiniGrid-Empty-5x5-v0"
    envs = make(env_id, 4)
    assert {name: box.shape for name, box in envs.observation_spaces.items()} == {
        "direction": (4,),
        "image": (7, 7, 3),
    }
    assert play(envs, 100) > 0  # which has 100 steps at most
    assert "observation part 'mission' is MissionSpace, which no network" in capfd.readouterr().err
    options = defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1)
    assert rules_of(options) == {"id": "MiniGrid-Empty-5x5-v0", "size": 5}


@pytest.mark.parametrize("name", ["rps_v2", "tictactoe_v3"])
def test_environments_whose_agents_act_in_turn(name):
    """Those that `aec_to_parallel` takes, and others; with masks and Discrete observations."""
    pytest.importorskip("pettingzoo", reason="needs pettingzoo: make test-interop")
    envs = make(f"pettingzoo.classic.{name}:env", 4)
    assert (MASK in envs.observation_spaces) == (name == "tictactoe_v3")
    assert play(envs, 50) > 0


@pytest.mark.parametrize("name", ["rps_v2", "tictactoe_v3"])
def test_agents_that_act_in_turn_are_rows(name):
    module = pytest.importorskip(f"pettingzoo.classic.{name}", reason="make test-interop")
    from moolink.pettingzoo import Agents, Rows

    make_agents = functools.partial(Agents, module.env)
    rows = Rows(moolink.VectorEnv(make_agents, num_envs=2, num_workers=1))
    rows.async_reset(0)
    random = np.random.default_rng(0)
    for _ in range(30):
        observation, *_ = rows.recv(30)
        choices = rows.single_action_space.n
        mask = (
            observation["action_mask"] if isinstance(observation, dict) else np.ones((4, choices))
        )
        mask = np.where(mask.any(-1, keepdims=True), mask, 1)
        rows.send((random.random((4, choices)) * mask).argmax(-1))
    rows.close()


def test_a_learner_takes_such_an_id(tmp_path):
    pytest.importorskip("minigrid", reason="needs minigrid: make test-interop")
    arguments = ["--env-id", "minigrid:MiniGrid-Empty-5x5-v0", "--total-steps", "640"]
    arguments += ["--save-dir", str(tmp_path)]
    status, output = run("-m", "examples.torch.impala", *arguments)
    assert status == 0, output
    assert "minigrid:MiniGrid-Empty-5x5-v0 (size=5)" in output
