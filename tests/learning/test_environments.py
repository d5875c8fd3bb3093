"""What observations, actions, ends and rewards mean, in environments of every kind."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import moolink
from examples.common.environments import Actions, Driven, Environments, make_envs, random_means
from examples.common.options import ImpalaOptions, OptionError, defaults
from examples.common.tasks import Catch, Meet
from tests.learning.stubs import Steps

COUNTDOWN = "tests.learning.stubs:Countdown"


def make(env_id, num_envs, **given):
    o = defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1)
    o.env_threads = 1
    for name, value in given.items():
        setattr(o, name, value)
    return make_envs(o, num_envs)


def catch(num_envs):
    return make("moolink/Catch-v0", num_envs)


def atari(game, num_envs, **given):
    return make(f"ALE/{game}-v5", num_envs, **given)


def play(envs, steps, choose, seed=0):
    """Yields (observation before, actions, step)."""
    observation = envs.reset(seed)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        actions = choose(envs, random, observation)
        envs.send(actions)
        step = envs.recv()
        yield observation, actions, step
        observation = step.observation


def at_random(envs, random, observation):
    return random.integers(envs.actions.choices, size=(envs.num_envs, envs.actions.size))


def follow_the_ball(envs, random, observation):
    grid = observation["obs"] > 0
    paddle = grid[:, -1].argmax(-1)
    ball = grid[:, :-1].any(1).argmax(-1)
    return (np.sign(ball - paddle) + 1)[:, None]


def test_catch_is_won_by_following_the_ball():
    rewards, episodes = 0.0, 0
    for _, _, step in play(catch(8), 90, follow_the_ball):
        assert set(step.reward[~step.terminated]) <= {0.0}
        assert set(step.reward[step.terminated]) <= {1.0}
        assert np.array_equal(step.terminated, step.episode_over)
        assert not step.truncated.any()
        rewards += step.reward.sum()
        episodes += step.terminated.sum()
    assert episodes == rewards == 80  # a game has nine steps


def test_catch_shows_the_next_game_when_one_ends():
    for before, _, step in play(catch(4), 40, at_random):
        ball_row = (step.observation["obs"][:, :-1] > 0).any(2).argmax(1)
        assert (ball_row[step.terminated] == 0).all()
        old_row = (before["obs"][:, :-1] > 0).any(2).argmax(1)
        assert (old_row[step.terminated] == Catch.ROWS - 2).all()
        assert set(step.reward[step.terminated]) <= {-1.0, 1.0}


def test_catch_is_seeded():
    first = [s.observation["obs"] for _, _, s in play(catch(4), 30, at_random, seed=5)]
    second = [s.observation["obs"] for _, _, s in play(catch(4), 30, at_random, seed=5)]
    assert np.array_equal(first, second)


def test_a_lost_life_ends_the_return_but_not_the_game():
    """Five lives make five ends of the return, of which the last is the end of the game."""
    envs = atari("Breakout", 2)  # whose preset has --episodic-life
    ends, frames = np.zeros(2, int), envs.reset(0)["obs"]
    games = []
    for _, _, step in play(envs, 1200, at_random):
        assert not (step.episode_over & ~(step.terminated | step.truncated)).any()
        ends += step.terminated
        for index in np.flatnonzero(step.episode_over):
            games.append(ends[index])
            ends[index] = 0
    envs.close()
    assert len(games) >= 3
    assert set(games) == {5}
    assert frames.shape == (2, 4, 42, 42)
    assert frames.dtype == np.uint8


def test_rewards_are_the_games_own():
    """In Pong a random player loses points of one; in Seaquest a shark is worth twenty."""
    for game, values in (("Pong", {-1.0, 0.0, 1.0}), ("Seaquest", {0.0, 20.0})):
        envs = atari(game, 4)
        seen = {float(r) for _, _, step in play(envs, 400, at_random) for r in step.reward}
        envs.close()
        assert len(seen) > 1
        assert seen <= values


def test_pong_has_no_lives():
    envs = atari("Pong", 4)
    for _, _, step in play(envs, 300, at_random):
        assert not step.terminated.any()  # a point does not end the return
    envs.close()


def test_the_limit_of_frames_cuts_the_game_off():
    envs = atari("Pong", 2, max_frames=400)
    overs = [step for _, _, step in play(envs, 120, at_random) if step.episode_over.any()]
    envs.close()
    assert overs
    for step in overs:
        assert np.array_equal(step.truncated, step.episode_over)
        assert not step.terminated.any()
        assert step.last_observation["obs"].shape == (2, 4, 42, 42)


def test_an_unknown_environment_is_named():
    for env_id in ("Brekout", "ALE/Brekout-v5"):
        with pytest.raises(OptionError, match=f"no environment '{env_id}'"):
            make(env_id, 1)


def nothing():
    """A function with a forgotten `return`."""


def test_a_function_that_is_not_there_or_returns_nothing_is_named():
    with pytest.raises(OptionError, match=f"Module '{__name__}' has no 'nothin' either"):
        make(f"{__name__}:nothin", 1)
    with pytest.raises(OptionError, match="the function returns None, not an environment"):
        make(f"{__name__}:nothing", 1)


def test_the_options_decide_the_frames():
    envs = atari("Pong", 1, frame_size=84)
    assert envs.observation_spaces["obs"].shape == (4, 84, 84)
    assert envs.reset(0)["obs"].shape == (1, 4, 84, 84)
    envs.close()


def test_means_are_those_of_the_frames():
    mean = random_means(catch(64), seed=0)["obs"]
    assert mean.shape == (10, 5)
    assert mean.dtype == np.float32
    # The ball is in each of the nine rows above the paddle equally often, at any column.
    np.testing.assert_allclose(mean[:-1].sum(1), 255 / 9, rtol=0.15)
    np.testing.assert_allclose(mean[-1].sum(), 255, rtol=0.02)


@pytest.mark.parametrize("processes", [0, 2])
def test_environments_here_and_in_processes_are_stepped_alike(processes):
    """Dict observations by their parts, ends and limits apart, and the last observation."""
    envs = make(COUNTDOWN, 4, env_processes=processes)
    observation = envs.reset(0)
    shapes = {name: (x.shape, x.dtype) for name, x in observation.items()}
    assert shapes == {
        "image": ((4, 36, 40, 3), np.uint8),
        "body/left": ((4, 5), np.float32),  # one-hot
        "body/right": ((4, 2), np.float32),
    }
    actions = np.zeros((4, 2), np.int64)
    actions[:, 1] = [0, 1, 2, 1]
    for step_number in range(1, 11):
        actions[3, 0] = step_number == 2  # ends the last one's episode, once
        envs.send(actions)
        step = envs.recv()
        assert step.reward.tolist() == [0, 1, 2, 1]
        assert step.terminated.tolist() == [False, False, False, step_number == 2]
        own = np.array([step_number] * 3 + [step_number if step_number < 2 else step_number - 2])
        cut_off = (own % 5 == 0) & ~step.terminated
        assert step.truncated.tolist() == cut_off.tolist()
        assert (step.episode_over == step.terminated | step.truncated).all()
        shown = np.where(step.terminated, 0, own % 5)
        assert (step.observation["image"] == shown[:, None, None, None]).all()
        np.testing.assert_allclose(step.observation["body/right"][:, 0], shown / 10, rtol=1e-6)
        assert (step.observation["body/left"].argmax(1) == 4 - shown).all()
        if cut_off.any():
            assert (step.last_observation["image"][cut_off] == 5).all()
    envs.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "moolink/Recall-v0"])
def test_environments_of_gymnasium(env_id):
    envs = make(env_id, 3)
    observation = envs.reset(0)["obs"]
    assert observation.shape == (3, *envs.observation_spaces["obs"].shape)
    assert observation.dtype == np.float32
    for _ in range(250):
        envs.send(np.zeros((3, envs.actions.size), envs.actions.dtype))
        step = envs.recv()
        if step.truncated.any():
            row = np.flatnonzero(step.truncated)[0]
            last = step.last_observation["obs"][row]
            assert (last != step.observation["obs"][row]).any()
    envs.close()


def test_each_agent_is_a_row():
    """Two agents walk towards each other, and see the other's place."""
    envs = make("examples.common.tasks:Meet", 4)
    assert envs.num_envs == 4
    observation = envs.reset(0)["obs"]
    for _ in range(10):
        own, other = observation[:, : Meet.CELLS].argmax(1), observation[:, Meet.CELLS :].argmax(1)
        assert (own[::2] == other[1::2]).all()
        assert (own[1::2] == other[::2]).all()
        envs.send((np.sign(other - own) + 1)[:, None])
        step = envs.recv()
        observation = step.observation["obs"]
        assert (step.terminated[::2] == step.terminated[1::2]).all()
        assert (step.reward == np.where(step.terminated, 1.0, np.float32(-0.02))).all()
    with pytest.raises(OptionError, match="multiple of 2 agents"):
        make("examples.common.tasks:Meet", 3)


def sync(num_envs, mode):
    return SyncVectorEnv([Steps] * num_envs, autoreset_mode=mode)


def first_ready(num_envs, mode):
    return moolink.VectorEnv(Steps, num_envs, num_workers=2, batch_size=2, autoreset_mode=mode)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize("made", [sync, first_ready])
def test_a_reset_in_the_next_step_ends_as_the_step_before(made, mode):
    envs, random = Driven(made(6, gymnasium.vector.AutoresetMode(mode))), np.random.default_rng(0)
    before, ended = envs.reset(0)["obs"][:, 0], np.zeros((2, 6), np.bool_)
    for _ in range(60):
        action = (random.random((6, 1)) < 0.15).astype(np.int64)
        envs.send(action)
        step = envs.recv()
        began = ended.any(0) & (mode == "NextStep")  # the action is ignored
        terminated = np.where(began, ended[0], action[:, 0] == 1)
        truncated = np.where(began, ended[1], ~terminated & (before == 4))
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        np.testing.assert_array_equal(step.reward, np.where(began, 0, 1 + action[:, 0]))
        over = began if mode == "NextStep" else terminated | truncated
        np.testing.assert_array_equal(step.episode_over, over)
        after = step.observation["obs"]
        assert after.dtype == np.float32
        np.testing.assert_array_equal(after[:, 0], np.where(over, 0, before + 1))
        if truncated.any():
            assert (step.last_observation["obs"][truncated] == 5).all()
        before, ended = after[:, 0], np.array([terminated, truncated]) & ~began
    envs.close()


class EndsAtItsLimit:
    """Three environments, reset in the same step: one terminates, one terminates at its limit, and
    one is cut off by the limit."""

    metadata: ClassVar = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    num_envs = 3
    single_observation_space = spaces.Dict({"obs": spaces.Box(0, 1, (1,))})
    single_action_space = spaces.Discrete(2)

    def reset(self, seed=None):
        return {"obs": np.zeros((3, 1), np.float32)}, {}

    def step(self, actions):
        observation, last = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
        flags = np.array([True, True, False]), np.array([False, True, True])
        return {"obs": observation}, np.ones(3), *flags, {"final_obs": {"obs": last}}


@pytest.mark.parametrize("seen_by", [Environments, Driven])
def test_an_episode_that_terminates_at_its_limit_is_not_cut_off(seen_by):
    envs = seen_by(EndsAtItsLimit())
    envs.reset(0)
    envs.send(np.zeros((3, 1), np.int64))
    step = envs.recv()
    assert step.terminated.tolist() == [True, True, False]
    assert step.truncated.tolist() == [False, False, True]
    assert step.episode_over.all()
    assert step.last_observation["obs"][2] == 1


class Mortal:
    """Two rows, as of a PettingZoo environment; one of them has no agent."""

    num_envs = 2
    single_observation_space, single_action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self):
        return np.zeros((2, 1), np.float32), {"mask": np.array([True, False])}

    def step(self, actions):
        raise NotImplementedError


def test_each_row_of_a_vector_environment_has_to_act():
    with pytest.raises(ValueError, match="a row is without an agent"):
        Driven(Mortal()).reset(None)
    with pytest.raises(OptionError, match="reset environments themselves"):
        Driven(sync(2, gymnasium.vector.AutoresetMode.DISABLED))


def test_actions_are_those_of_the_space():
    box = Actions(spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0])))
    sent = box.of(np.array([[-1, -1], [0, 0], [1, 1], [3, -3]], np.float32))
    assert sent.tolist() == [[-2, 0], [0, 5], [2, 10], [2, 0]]
    assert box.choices == ()
    assert Actions(spaces.Discrete(3, start=-1)).of(np.array([[0], [2]])).tolist() == [-1, 1]
    multi = Actions(spaces.MultiDiscrete([2, 3]))
    assert (multi.choices, multi.size) == ((2, 3), 2)
    assert multi.of(np.array([[1, 2]])).tolist() == [[1, 2]]
    with pytest.raises(OptionError, match="actions are Text"):
        Actions(spaces.Text(3))
