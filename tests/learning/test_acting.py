"""Unrolls, the actor's thread in both frameworks, the statistics of episodes, and evaluation."""

import importlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

from examples.common import checkpoint
from examples.common.acting import Unroll
from examples.common.evaluation import Evaluation
from examples.common.options import ImpalaOptions, defaults
from examples.common.run import Run
from tests.learning.stubs import Counting, options, run_of


class Fixed:
    """Takes action count % 3, of which -count is said to be the logarithm of its probability."""

    def __init__(self, count):
        self.count = count

    def sample(self, *key):
        return (self.count % 3)[..., None]

    def log_prob(self, action):
        return -self.count * 1.0


class TorchNet(nn.Module):
    """Whose value is 100 x count."""

    device = torch.device("cpu")

    def forward(self, observation, first, state):
        count = observation["obs"][..., 1]
        return count.long(), 100 * count, state

    def pi(self, policy):
        return Fixed(policy)

    def no_memory(self, num_envs):
        return torch.zeros(num_envs, 0), torch.zeros(num_envs, 0)


class JaxNet:
    """The same."""

    def __call__(self, p, buffers, observation, first, state):
        count = observation["obs"][..., 1]
        return count.astype("int32"), 100 * count, state

    def pi(self, p, policy):
        return Fixed(policy)

    def no_memory(self, num_envs):
        return np.zeros((num_envs, 0), np.float32), np.zeros((num_envs, 0), np.float32)


class Acting:
    """An actor of a framework, whose batches are read alike."""

    def __init__(self, framework, envs, unroll_length=5, batch_size=2, num_groups=1, **given):
        module = importlib.import_module(f"examples.{framework}.impala")
        self.options = options(unroll_length=unroll_length, batch_size=batch_size, **given)
        self.options.num_groups = num_groups
        self.run = run_of(self.options, envs)
        net = TorchNet() if framework == "torch" else JaxNet()
        self.actor = module.Actor(self.options, envs, net, self.run)
        if framework == "jax":
            self.actor.parameters = {}, {}

    def batch(self, timeout=10):
        """The batch's data, and the batch, for `release`."""
        batch = self.actor.next_batch(timeout)
        return batch and batch.data, batch

    def __enter__(self):
        self.actor.start()
        return self

    def __exit__(self, *error):
        self.actor.__exit__(*error)


def test_a_value_that_an_unroll_cannot_hold_is_refused():
    unroll = Unroll(2, 3)
    unroll.record(0, bonus=0)
    with pytest.raises(TypeError, match="same_kind"):
        unroll.record(1, bonus=np.full(3, 0.7))
    with pytest.raises(ValueError, match=r"lead: \[3, \.\.\.\] is recorded, not \[1, 3\]"):
        unroll.record(0, lead=np.zeros((1, 3)))


@pytest.fixture(params=["torch", "jax"])
def framework(request):
    pytest.importorskip(request.param)
    return request.param


def test_entries_of_an_unroll_belong_together(framework):
    """Action and reward t lead from observation t to t + 1, also across unrolls."""
    env = Counting(4)
    with Acting(framework, env) as acting:
        for start in (0, 5, 10):
            for first_env in (0, 2):
                batch, token = acting.batch()
                before = np.arange(start, start + 5)[:, None].repeat(2, 1)
                seen = batch["observation"]["obs"]
                assert (seen[:, :, 0] == [first_env, first_env + 1]).all()
                assert (seen[:-1, :, 1] == before).all()
                assert (seen[-1, :, 1] == start + 5).all()
                assert (batch["action"][..., 0] == before % 3).all()
                assert (batch["log_prob"] == -before).all()
                assert (batch["reward"] == (before % 3) * 10 + before + 1).all()
                ended, cut_off = (before + 1) % 7 == 0, (before + 1) % 5 == 0
                discount = np.where(ended | cut_off, 0, np.float32(0.99))
                assert (batch["discount"] == discount).all()
                assert (batch["first"][1:] == (ended | cut_off)).all()
                # What a limit hides is worth what the network says of the last observation.
                value = np.where(cut_off & ~ended, 100 * (before + 1), 0)
                assert (batch["bootstrap"] == value).all()
                acting.actor.release(token)
    assert env.closed
    assert not acting.actor.is_alive()
    counters = acting.run.episodes.take()
    steps = np.arange(env.count)
    ends = [n for n in range(1, env.count + 1) if n % 7 == 0 or n % 5 == 0]
    returns = ((steps % 3) * 10 + steps + 1)[: ends[-1]].sum()
    assert counters == {"episodes": 4 * len(ends), "return_thousandths": 4000 * int(returns)}
    assert acting.run.episodes.take() == {"episodes": 0, "return_thousandths": 0}


def test_what_is_recorded_is_in_the_batches_by_its_name():
    unroll = Unroll(length=3, num_envs=4)
    for start in (0, 10):  # the arrays are filled again
        for t in range(4):
            value = start + t + np.arange(4) / 4
            unroll.record(t, parts={"a": value[:, None].repeat(2, 1)}, flags=value > 12)
            if t < 3:
                unroll.record(
                    t, torch=torch.tensor(value), number=float(t), integer=np.int32(value)
                )
        unroll.state = (torch.arange(4.0),)
        first, second = unroll.batches(2)
        got = second.data
        assert {k: (x.shape, x.dtype) for k, x in got.items() if k not in ("parts", "state")} == {
            "flags": ((4, 2), np.bool_),
            "torch": ((3, 2), np.float32),
            "integer": ((3, 2), np.int32),
            "number": ((3, 2), np.float32),
        }
        wanted = start + np.arange(3)[:, None] + [0.5, 0.75]
        np.testing.assert_array_equal(got["torch"], wanted)
        np.testing.assert_array_equal(got["parts"]["a"][:3, :, 1], wanted)
        np.testing.assert_array_equal(got["integer"], np.int32(wanted))
        np.testing.assert_array_equal(got["number"][:, 0], [0, 1, 2])
        assert got["parts"]["a"].shape == (4, 2, 2)
        assert got["state"][0].tolist() == [2, 3]
        assert first.new_steps == second.new_steps == 6
        assert unroll.is_unread
        unroll.release()
        unroll.release()
        assert not unroll.is_unread
    again = unroll.batches(2)
    assert [batch.new_steps for batch in again] == [0, 0], "the same steps, given again"


def test_each_observation_counts_once_in_the_normalizer(framework):
    """Also the last row of an unroll, which is the first of the next one."""
    env = Counting(2)
    with Acting(framework, env, normalize=True) as acting:
        for _ in range(3):
            acting.actor.release(acting.batch()[1])
    count, sums, _ = acting.run.normalizer._new["obs"]
    assert count.tolist() == [2.0 * (env.count + 1)] * 2
    assert sums.tolist() == [env.count + 1.0, env.count * (env.count + 1.0)]


def test_an_actor_ahead_of_its_learner_waits(framework):
    env = Counting(2)
    with Acting(framework, env) as acting:
        _, token = acting.batch()
        # Its group's unroll is unread: it cannot go on, and gives no more.
        assert acting.actor.next_batch(timeout=0.2) is None
        assert env.count == 5
        acting.actor.release(token)
        assert acting.batch()[0] is not None


def test_groups_take_turns_when_the_learner_is_the_slower_side(framework, monkeypatch):
    envs = [Counting(2), Counting(2)]
    monkeypatch.setattr("examples.common.acting.make_envs", lambda o, num_envs: envs[1])
    with Acting(framework, envs[0], num_groups=2) as acting:
        acting.actor.release(acting.batch()[1])
        unread = [acting.batch()[1] for _ in range(2)]
        for _ in range(20):
            acting.actor.release(unread.pop(0))
            unread.append(acting.batch()[1])
    assert abs(envs[0].count - envs[1].count) <= 3 * 5, "one group played more than the other"
    assert envs[1].count > 0, "the other group did not start"


def test_an_error_of_the_environment_reaches_the_learner(framework):
    env = Counting(2, fail_at=3)
    with Acting(framework, env) as acting, pytest.raises(OSError, match="the emulator is gone"):
        acting.actor.next_batch(timeout=10)


def test_closing_wakes_a_waiting_actor(framework):
    with Acting(framework, Counting(2)) as acting:
        assert acting.batch()[0] is not None  # and is not released
        ending = threading.Thread(target=acting.actor.__exit__, args=(None, None, None))
        ending.start()
        ending.join(timeout=10)
        assert not acting.actor.is_alive()


def test_window_holds_the_last_episodes_of_whole_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.common.job.WINDOW", 10)
    run = Run(options(save_dir=tmp_path), Counting(2))
    assert run.mean_return is None
    episodes = thousandths = 0
    for value in range(1, 6):
        for count in (4, 0):
            episodes, thousandths = episodes + count, thousandths + 1000 * count * value
            run.totals = {"episodes": episodes, "return_thousandths": thousandths}
            run._slide_window()
    # Three rounds hold at least ten episodes, two do not.
    assert episodes - run._window[0][0] == 12
    assert run.mean_return == pytest.approx(4.0)


@pytest.mark.parametrize("episodes", [45, 3])
def test_evaluation_plays_each_episode_to_its_end(tmp_path, episodes):
    o = defaults(ImpalaOptions, {}, env_id="moolink/Catch-v0", num_peers=1)
    o.save_dir, o.episodes, o.mode = tmp_path, episodes, "evaluate"
    saved = {"options": o.as_dict(), "totals": {"steps": 1}, "state": {"normalizer": {}}}
    checkpoint.save(tmp_path, saved)
    evaluation = Evaluation(o)
    while not evaluation.is_over():
        evaluation.step(follow_the_ball(evaluation.observation["obs"]))
    assert evaluation.returns == [1.0] * episodes


def follow_the_ball(observation):
    grid = observation > 0
    return (np.sign(grid[:, :-1].any(1).argmax(-1) - grid[:, -1].argmax(-1)) + 1)[:, None]
