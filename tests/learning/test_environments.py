"""What done, game over and reward mean, in Catch and in ALE's vector environment."""

import numpy as np
import pytest

from examples.common.config import Config, ConfigError, default_config
from examples.common.environments import Atari, Catch, estimate_pixel_mean, make_env


def atari(game, num_envs, max_frames=108_000):
    return Atari(game, num_envs, 42, max_frames=max_frames, num_threads=1)


def play(env, steps, choose, seed=0):
    """Yields (observation before, actions, step)."""
    observation = env.reset(seed)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        actions = choose(env, random, observation)
        env.send(actions)
        step = env.recv()
        yield observation, actions, step
        observation = step.observation


def at_random(env, random, observation):
    return random.integers(env.num_actions, size=env.num_envs)


def follow_the_ball(env, random, observation):
    grid = observation[:, 0] > 0
    paddle = grid[:, -1].argmax(-1)
    ball = grid[:, :-1].any(1).argmax(-1)
    return np.sign(ball - paddle) + 1


def test_catch_is_won_by_following_the_ball():
    rewards, games = 0.0, 0
    for _, _, step in play(Catch(8), 90, follow_the_ball):
        assert set(step.reward[~step.done]) <= {0.0}
        assert set(step.reward[step.done]) <= {1.0}
        assert np.array_equal(step.done, step.game_over)
        rewards += step.reward.sum()
        games += step.done.sum()
    assert games == rewards == 80  # a game has nine steps


def test_catch_shows_the_next_game_when_one_ends():
    for before, _, step in play(Catch(4), 40, at_random):
        ball_row = (step.observation[:, 0, :-1] > 0).any(2).argmax(1)
        assert (ball_row[step.done] == 0).all()
        old_row = (before[:, 0, :-1] > 0).any(2).argmax(1)
        assert (old_row[step.done] == Catch.ROWS - 2).all()
        assert set(step.reward[step.done]) <= {-1.0, 1.0}


def test_catch_is_seeded():
    first = [s.observation for _, _, s in play(Catch(4), 30, at_random, seed=5)]
    second = [s.observation for _, _, s in play(Catch(4), 30, at_random, seed=5)]
    assert np.array_equal(first, second)


def test_a_lost_life_ends_the_return_but_not_the_game():
    """Five lives make five ends of the return, of which the last is the end of the game."""
    env = atari("breakout", 2)
    dones, frames = np.zeros(2, int), env.reset(0)
    games = []
    for _, _, step in play(env, 1200, at_random):
        assert not (step.game_over & ~step.done).any()
        dones += step.done
        for index in np.flatnonzero(step.game_over):
            games.append(dones[index])
            dones[index] = 0
    env.close()
    assert len(games) >= 3
    assert set(games) == {5}
    assert frames.shape == (2, 4, 42, 42)


def test_rewards_are_the_games_own():
    """In Pong a random player loses points of one; in Seaquest a shark is worth twenty."""
    for game, values in (("pong", {-1.0, 0.0, 1.0}), ("seaquest", {0.0, 20.0})):
        env = atari(game, 4)
        seen = {float(r) for _, _, step in play(env, 400, at_random) for r in step.reward}
        env.close()
        assert len(seen) > 1
        assert seen <= values


def test_pong_has_no_lives():
    env = atari("pong", 4)
    for _, _, step in play(env, 300, at_random):
        assert not step.done.any()  # a point does not end the return
    env.close()


def test_the_limit_of_frames_ends_the_game():
    env = atari("pong", 2, max_frames=400)
    overs = [step for _, _, step in play(env, 120, at_random) if step.game_over.any()]
    env.close()
    assert overs
    assert all(np.array_equal(step.done, step.game_over) for step in overs)


def test_an_unknown_game_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no environment 'Breakout'.*space_invaders"):
        make_env(default_config("Breakout", 1, {}), 1)


def test_the_network_decides_the_frames():
    config = Config()
    config.job.env, config.learner.net = "pong", "shallow"
    env = make_env(config, 1)
    assert env.observation_shape == (4, 84, 84)
    assert env.reset(0).shape == (1, 4, 84, 84)
    env.close()


def test_pixel_mean_is_that_of_the_frames():
    env = Catch(64)
    mean = estimate_pixel_mean(env, seed=0)
    assert mean.shape == (10, 5)
    assert mean.dtype == np.float32
    # The ball is in each of the nine rows above the paddle equally often, at any column.
    np.testing.assert_allclose(mean[:-1].sum(1), 255 / 9, rtol=0.15)
    np.testing.assert_allclose(mean[-1].sum(), 255, rtol=0.02)


@pytest.mark.parametrize("env_pool", [False, True])
def test_games_in_threads_and_in_a_pool_are_stepped_alike(env_pool):
    config = default_config("breakout", 1, {})
    config.actor.env_pool = env_pool
    config.actor.max_frames_per_episode = 2000
    env = make_env(config, 4, num_threads=2)
    env.reset(None)
    first = env.reset(0)
    assert first.shape == (4, 4, 42, 42)
    assert first.dtype == np.uint8
    random, dones, games = np.random.default_rng(0), np.zeros(4, int), []
    for _ in range(600):
        env.send(random.integers(env.num_actions, size=4))
        step = env.recv()
        assert step.reward.dtype == np.float32
        assert not (step.game_over & ~step.done).any()
        dones += step.done
        games += list(dones[step.game_over])
        dones[step.game_over] = 0
    env.close()
    assert games
    assert max(games) == 5
