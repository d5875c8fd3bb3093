"""Unrolls, their queue, the actor's thread and the statistics of games."""

import threading

import numpy as np
import pytest

from examples.common.actor import Actor
from examples.common.config import default_config
from examples.common.environments import Catch, Step
from examples.common.evaluation import play
from examples.common.statistics import EpisodeReturns, ReturnWindow
from examples.common.unrolls import UnrollQueue, UnrollsClosed

SHAPE = (1, 2, 2)


class Counting:
    """Environment e shows its own number and how often it was stepped; ends every seventh step."""

    num_actions = 3
    observation_shape = SHAPE

    def __init__(self, num_envs, fail_at=None):
        self.num_envs = num_envs
        self.count = 0
        self.fail_at = fail_at
        self.closed = False

    def observe(self):
        observation = np.zeros((self.num_envs, *SHAPE), np.uint8)
        observation[:, 0, 0, 0] = np.arange(self.num_envs)
        observation[:, 0, 0, 1] = self.count
        return observation

    def reset(self, seed):
        self.count = 0
        return self.observe()

    def send(self, actions):
        self.actions = actions

    def recv(self):
        self.count += 1
        if self.count == self.fail_at:
            raise OSError("the emulator is gone")
        over = np.full(self.num_envs, self.count % 7 == 0)
        return Step(self.observe(), self.actions * 10.0 + self.count, over, over)

    def close(self):
        self.closed = True


def policy(observation):
    count = observation[:, 0, 0, 1].astype(np.int64)
    return count % 3, -count.astype(np.float32)


def make_actor(env, unroll_length=5, batch_size=2):
    config = default_config("catch", 1, {})
    config.actor.num_groups, config.actor.num_envs = 1, env.num_envs
    config.actor.unroll_length, config.learner.batch_size = unroll_length, batch_size
    returns = EpisodeReturns()
    return Actor(config, env, policy, returns), returns


def test_entries_of_an_unroll_belong_together():
    """Action and reward t lead from observation t to t + 1, also across unrolls."""
    env = Counting(4)
    actor, returns = make_actor(env)
    actor.start()
    for start in (0, 5, 10):
        for first_env in (0, 2):
            batch = actor.unrolls.get(timeout=10)
            before = np.arange(start, start + 5)[:, None].repeat(2, 1)
            assert (batch.observation[:, :, 0, 0, 0] == [first_env, first_env + 1]).all()
            assert (batch.observation[:-1, :, 0, 0, 1] == before).all()
            assert (batch.observation[-1, :, 0, 0, 1] == start + 5).all()
            assert (batch.action == before % 3).all()
            assert (batch.log_prob == -before).all()
            assert (batch.reward == (before % 3) * 10 + before + 1).all()
            assert (batch.done == ((before + 1) % 7 == 0)).all()
            actor.unrolls.release(batch)
    actor.stop()
    assert env.closed
    assert not actor.is_alive()
    counters = returns.take()
    steps = np.arange(env.count // 7 * 7)
    assert counters["episodes"] == 4 * (env.count // 7)
    assert counters["return_thousandths"] == 4000 * int(((steps % 3) * 10 + steps + 1).sum())
    assert returns.take() == {"episodes": 0, "return_thousandths": 0}


def test_an_actor_ahead_of_its_learner_waits():
    env = Counting(2)
    actor, _ = make_actor(env)
    actor.start()
    batch = actor.unrolls.get(timeout=10)
    # Its group's unroll is unread: it cannot go on, and gives no more.
    assert actor.unrolls.get(timeout=0.2) is None
    assert env.count == 5
    actor.unrolls.release(batch)
    assert actor.unrolls.get(timeout=10) is not None
    actor.stop()


def test_groups_take_turns_when_the_learner_is_the_slower_side(monkeypatch):
    config = default_config("catch", 1, {})
    config.actor.num_groups, config.actor.num_envs = 2, 4
    config.actor.unroll_length, config.learner.batch_size = 5, 2
    envs = [Counting(2), Counting(2)]
    monkeypatch.setattr("examples.common.actor.make_env", lambda config, num_envs: envs[1])
    actor = Actor(config, envs[0], policy, EpisodeReturns())
    actor.start()
    actor.unrolls.release(actor.unrolls.get(timeout=10))
    unread = [actor.unrolls.get(timeout=10) for _ in range(2)]
    for _ in range(20):
        actor.unrolls.release(unread.pop(0))
        unread.append(actor.unrolls.get(timeout=10))
    actor.stop()
    assert abs(envs[0].count - envs[1].count) <= 3 * 5, "one group played more than the other"


def test_an_error_of_the_environment_reaches_the_learner():
    actor, _ = make_actor(Counting(2, fail_at=3))
    actor.start()
    with pytest.raises(OSError, match="the emulator is gone"):
        actor.unrolls.get(timeout=10)
    actor.stop()


def test_other_groups_start_when_the_learner_has_begun():
    config = default_config("catch", 1, {})
    actor = Actor(config, Catch(config.envs_per_group), lambda o: random_catch(o), EpisodeReturns())
    actor.start()
    shapes = set()
    for _ in range(3 * config.actor.num_groups):
        batch = actor.unrolls.get(timeout=10)
        shapes.add(id(batch.unroll))
        actor.unrolls.release(batch)
    actor.stop()
    assert len(shapes) > 1


def random_catch(observation):
    return np.ones(len(observation), np.int64), np.zeros(len(observation), np.float32)


def test_closing_wakes_a_waiting_actor():
    unrolls = UnrollQueue(1, 3, 2, SHAPE, 1)
    assert unrolls.take(wait=True) is not None
    assert unrolls.take(wait=False) is None
    ended = []

    def wait():
        with pytest.raises(UnrollsClosed):
            unrolls.take(wait=True)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    unrolls.close()
    thread.join(timeout=10)
    assert ended


def test_window_holds_the_last_games_of_whole_rounds():
    window = ReturnWindow(size=10)
    assert window.mean is None
    for value in range(1, 6):
        window.add({"episodes": 4, "return_thousandths": 4000 * value})
        window.add({"episodes": 0, "return_thousandths": 0})
    assert window.episodes == 12  # three rounds hold at least ten games, two do not
    assert window.mean == pytest.approx(4.0)
    other = ReturnWindow(size=10)
    other.load(window.state())
    assert (other.mean, other.episodes) == (window.mean, window.episodes)


def test_evaluation_plays_each_game_to_its_end():
    config = default_config("catch", 1, {})
    config.job.episodes = 45
    returns = play(config, follow_the_ball)
    assert len(returns) == 45
    assert (returns == 1.0).all()
    config.job.episodes = 3
    assert len(play(config, lambda o: np.zeros(len(o), np.int64))) == 3


def follow_the_ball(observation):
    grid = observation[:, 0] > 0
    return np.sign(grid[:, :-1].any(1).argmax(-1) - grid[:, -1].argmax(-1)) + 1
