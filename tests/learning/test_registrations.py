"""An id means what `gymnasium.make` and `gymnasium.make_vec` mean by it."""

import copy
import functools
import json

import ale_py.vector_env
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import ReshapeObservation

from examples.common.environments import make_envs, rules_of, said_rules
from examples.common.options import ImpalaOptions, OptionError, defaults, parse

gymnasium.register_envs(ale_py)


def registered(name, like, wrappers=(), **changes):
    """The id of one more registration, with other keywords than those of `like`."""
    spec = copy.deepcopy(gymnasium.spec(like))
    gymnasium.register(
        name,
        entry_point=spec.entry_point,
        vector_entry_point=spec.vector_entry_point,
        max_episode_steps=spec.max_episode_steps,
        additional_wrappers=wrappers,
        kwargs=spec.kwargs | changes,
    )
    return name


registered("ALE/OneFrame-v0", "ALE/Breakout-v5", frameskip=1)
registered("ALE/ShortSeaquest-v0", "ALE/Seaquest-v5", max_num_frames_per_episode=500, frameskip=3)
registered(
    "ALE/AllActions-v0", "ALE/Pong-v5", full_action_space=True, repeat_action_probability=0.5
)
registered(
    "tests/Tall-v0", "CartPole-v1", wrappers=(ReshapeObservation.wrapper_spec(shape=(4, 1)),)
)
OF_ALE = ["ALE/Breakout-v5", "ALE/MsPacman-v5", "ALE/ShortSeaquest-v0", "ALE/AllActions-v0"]
OTHERS = [
    "CartPole-v0",
    "FrozenLake8x8-v1",
    "Blackjack-v1",
    "CliffWalkingSlippery-v1",
    "MountainCarContinuous-v0",
    "tests/Tall-v0",
]


def options(env_id, **given):
    o = defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1)
    o.env_threads = 1
    for name, value in given.items():
        setattr(o, name, value)
    return o


@pytest.fixture
def made(monkeypatch):
    """The keywords that each of ALE's vector environments was made with."""
    kept, init = [], ale_py.vector_env.AtariVectorEnv.__init__

    @functools.wraps(init)
    def keeping(self, **keywords):
        kept.append(keywords)
        init(self, **keywords)

    monkeypatch.setattr(ale_py.vector_env.AtariVectorEnv, "__init__", keeping)
    return kept


@pytest.mark.parametrize("env_id", OF_ALE)
def test_every_keyword_of_a_registration_reaches_ales_vector_environment(made, env_id):
    o = options(env_id)
    envs = make_envs(o, 2)
    envs.close()
    gymnasium.make_vec(env_id, num_envs=2).close()
    ours, theirs = made
    assert gymnasium.spec(env_id).kwargs.items() <= theirs.items()
    assert {name: ours[name] for name in theirs} == theirs
    # The others are of frames, of speed, and of what is learned; the games are the same.
    assert sorted(ours.keys() - theirs.keys()) == [
        "autoreset_mode",
        "img_height",
        "img_width",
        "life_loss_info",
        "num_threads",
        "reward_clipping",
    ]
    rules = rules_of(o)
    assert rules["noop_max"] == 30
    assert {name: rules[name] for name in theirs if name != "num_envs"} == {
        name: value for name, value in theirs.items() if name != "num_envs"
    }
    json.dumps(rules)


@pytest.mark.parametrize("env_id", OTHERS)
def test_other_environments_are_those_of_make(env_id):
    """With the same wrappers in the same order, arguments of the constructor, and limit."""

    def layers(env):
        found = []
        while env is not env.unwrapped:
            found.append((type(env), getattr(env, "_max_episode_steps", None)))
            env = env.env
        return found, type(env), env.spec.kwargs

    expected = gymnasium.make(env_id)
    envs = make_envs(options(env_id), 2)
    for ours in envs._envs.envs:
        assert layers(ours.env) == layers(expected)  # inside what makes arrays
    envs.close()
    rules = rules_of(options(env_id))
    assert expected.unwrapped.spec.kwargs.items() <= rules.items()
    limit = gymnasium.spec(env_id).max_episode_steps
    assert rules.get("max_episode_steps") == limit
    assert (f"max_episode_steps={limit}" in said_rules(options(env_id))) == (limit is not None)


def test_options_change_a_game_and_are_said(made):
    arguments = ["--env-id", "ALE/Pong-v5", "--repeat-action-probability", "0", "--no-op-max", "7"]
    arguments += ["--full-action-space", "--max-frames", "600", "--no-episodic-life"]
    o = parse(ImpalaOptions, arguments, {})
    envs = make_envs(o, 1)
    assert envs.actions.choices == (18,)
    envs.close()
    expected = {
        "repeat_action_probability": 0.0,
        "noop_max": 7,
        "full_action_space": True,
        "max_num_frames_per_episode": 600,
        "life_loss_info": False,
    }
    assert expected.items() <= made[0].items()
    assert expected.items() <= rules_of(o).items()
    said = said_rules(o)
    assert said.startswith("ALE/Pong-v5 (game=pong, repeat_action_probability=0.25, ")
    assert said.endswith(
        " with --repeat-action-probability 0.0 --no-op-max 7 --full-action-space --max-frames 600 "
        "--frame-size 42 --clip-reward"
    )
    with pytest.raises(SystemExit, match="--no-op-max is for Atari: for ids such as ALE/Pong-v5"):
        parse(ImpalaOptions, ["--env-id", "CartPole-v1", "--no-op-max", "0"], {})
    with pytest.raises(SystemExit, match=r"--repeat-action-probability is 1\.0; it must be"):
        parse(ImpalaOptions, ["--repeat-action-probability", "1"], {})


def test_a_registration_that_the_vector_environment_does_not_take_is_named():
    registered("ALE/OtherMode-v0", "ALE/Pong-v5", mode=1)
    with pytest.raises(OptionError, match=r"AtariVectorEnv does not make ALE/OtherMode-v0: .*mode"):
        make_envs(options("ALE/OtherMode-v0"), 1)


def test_an_id_without_a_version_is_the_newest_one():
    assert rules_of(options("CartPole"))["id"] == "CartPole-v1"


@pytest.mark.parametrize(("given", "expected"), [(None, 0.25), (0.0, 0.0)])
def test_actions_are_repeated_as_often_as_registered(given, expected):
    """RIGHT or LEFT for one frame between NOOPs does not move Breakout's paddle if, and only if,
    this frame repeats the NOOP before it."""
    NOOP, RIGHT, LEFT = 0, 2, 3
    envs = make_envs(options("ALE/OneFrame-v0", frame_size=84, repeat_action_probability=given), 16)
    envs.reset(0)

    def place(action):
        """Of the paddle, from the left wall, after a frame with the action and five without."""
        for each in (action, *[NOOP] * 5):
            envs.send(np.broadcast_to(each, (16,))[:, None].astype(np.int64))
            observation = envs.recv().observation["obs"]
        return (observation[:, -1, 76, 8:76] > 0).argmax(1)

    places = [place(NOOP)]
    for _ in range(150):
        places.append(place(np.where(places[-1] < 30, RIGHT, LEFT)))  # stays in the middle
    envs.close()
    assert np.mean(np.diff(places, axis=0) == 0) == pytest.approx(expected, abs=0.02)


def test_spaces_of_a_game_are_those_of_its_id():
    envs = make_envs(options("ALE/AllActions-v0"), 1)
    assert envs.actions.choices == (18,)
    assert isinstance(envs.observation_spaces["obs"], spaces.Box)
    envs.close()
