"""Vector environments in the workers: each has several rows of the pool."""

import functools
import os
import signal

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_array_equal

import moolink


def make_cart_poles(rows, mode="SameStep"):
    single = functools.partial(gymnasium.make, "CartPole-v1")
    return SyncVectorEnv([single] * rows, autoreset_mode=AutoresetMode(mode))


def make_mixed(rows, index):
    return gymnasium.make("CartPole-v1") if index else CartPoleVectorEnv(num_envs=rows)


def make_native(rows):
    return CartPoleVectorEnv(num_envs=rows)


class DiesWhenTold(SyncVectorEnv):
    """Ends its process at the first action of 1."""

    def step(self, actions):
        if actions[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


def make_mortal(rows, mode):
    single = functools.partial(gymnasium.make, "CartPole-v1")
    return DiesWhenTold([single] * rows, autoreset_mode=AutoresetMode(mode))


class WrongShape(SyncVectorEnv):
    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        return observations[:1], rewards, *rest


def make_wrong(rows):
    return WrongShape([functools.partial(gymnasium.make, "CartPole-v1")] * rows)


class Square(gymnasium.Env):
    """Dict observations, and actions that it gives back in its infos."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (3, 3), np.uint8),
            "at": gymnasium.spaces.Discrete(9),
        }
    )
    action_space = gymnasium.spaces.Tuple(
        (gymnasium.spaces.Discrete(5), gymnasium.spaces.Box(-1.0, 1.0, (2,)))
    )

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self._observe(), {"options": -1 if options is None else options["level"]}

    def step(self, action):
        self.steps += 1
        info = {"pressed": action[0]} if action[0] > 1 else {}
        return self._observe(), float(action[1][0]), self.steps == 3, False, info

    def _observe(self):
        return {"image": np.full((3, 3), self.steps, np.uint8), "at": self.steps}


def make_squares(rows):
    return SyncVectorEnv([Square] * rows, autoreset_mode=AutoresetMode.SAME_STEP)


def assert_same(ours, theirs):
    """Two results, values and dtypes, infos in their order aside."""
    if theirs is None:
        assert ours is None
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (tuple, list)) or np.asarray(theirs).dtype == object:
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert_array_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_rows_are_as_those_of_one_vector_environment_in_this_process(mode):
    theirs = make_cart_poles(6, mode)
    with moolink.VectorEnv(
        functools.partial(make_cart_poles, 3, mode), 6, num_workers=2, autoreset_mode=mode
    ) as ours:
        assert ours.observation_space == theirs.observation_space
        assert ours.single_action_space == theirs.single_action_space
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        random = np.random.default_rng(0)
        ends = 0
        for _ in range(80):
            actions = random.integers(0, 2, 6)
            step = ours.step(actions)
            assert_same(step, theirs.step(actions))
            ended = step[2] | step[3]
            ends += ended.sum()
            if mode == "Disabled" and ended.any():
                options = {"reset_mask": ended}
                assert_same(ours.reset(options=options), theirs.reset(options=options))
        assert ends > 6
    theirs.close()


def test_structured_spaces_infos_and_options_go_through():
    theirs = make_squares(4)
    with moolink.VectorEnv(functools.partial(make_squares, 2), 4, num_workers=2) as ours:
        options = {"level": 7}
        assert_same(ours.reset(seed=0, options=options), theirs.reset(seed=0, options=options))
        random = np.random.default_rng(1)
        for _ in range(7):
            actions = (random.integers(0, 5, 4), random.uniform(-1, 1, (4, 2)).astype(np.float32))
            assert_same(ours.step(actions), theirs.step(actions))
    theirs.close()


class Noting(SyncVectorEnv):
    """Notes the options of its resets."""

    began = ()

    def reset(self, *, seed=None, options=None):
        self.began = [*self.began, options and dict(options)]
        return super().reset(seed=seed, options=options)


def make_noting(rows):
    return Noting([Square] * rows, autoreset_mode=AutoresetMode.SAME_STEP)


def test_rows_with_equal_options_are_reset_together():
    levels = [1, 1, 2, 1, 2, 3]
    with moolink.VectorEnv(functools.partial(make_noting, 3), 6, num_workers=2) as envs:
        envs.reset(options={"level": 0})  # SyncVectorEnv takes a mask from its second reset on
        given = {row: (None, {"level": level}) for row, level in enumerate(levels)}
        observations, infos = envs.reset_some(given)
        assert [info["options"] for info in infos] == levels
        assert observations["at"].tolist() == [0] * 6
        began = envs.get_attr("began")
        assert [(each["level"], each["reset_mask"].tolist()) for each in began[0][1:]] == [
            (1, [True, True, False]),
            (2, [False, False, True]),
        ]
        assert [each["level"] for each in began[3][1:]] == [1, 2, 3]
        envs.reset_some({row: (row, {"level": row // 3}) for row in range(6)})  # equal, no masks
        assert [each[-1] for each in envs.get_attr("began")] == [{"level": 0}] * 3 + [
            {"level": 1}
        ] * 3
        arrays = {row: (None, {"level": np.full(2, row)}) for row in range(6)}
        infos = envs.reset_some(arrays)[1]
        assert [info["options"].tolist() for info in infos] == [[row] * 2 for row in range(6)]


class Talkative(SyncVectorEnv):
    """Each worker's has infos of the types that its first action chooses from `INFOS`."""

    def step(self, actions):
        return *super().step(actions)[:4], INFOS[actions[0]]


class Free(gymnasium.Env):
    """An endless episode with many actions."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(100)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


INFOS = [
    {},
    {"x": np.array(["a", None], object)},
    {"x": {"y": np.array([b"a", None], object)}},
    {"x": np.array(["ab", "c"])},
    {"x": np.array(["abcd", "e"])},
    {"x": np.array([1, 2])},
    {"x": np.array([0.5, 2.5])},
    {"x": np.ones((2, 3))},
    {"x": np.ones((2, 2))},
    {"x": 0.25},
    {"x": "all"},
    {"x": [[1], [2, 3]]},
    {"x": np.arange(3)},
]


def make_talkative(rows):
    return Talkative([Free] * rows)


def test_infos_of_any_type_are_joined_by_row():
    cases = {
        (1, 0): ["a", None, None, None],
        (0, 1): [None, None, "a", None],
        (3, 4): ["ab", "c", "abcd", "e"],
        (5, 6): [1, 2, 0.5, 2.5],
        (6, 5): [0.5, 2.5, 1, 2],
        (5, 3): [1, 2, "ab", "c"],
        (7, 8): [[1] * 3, [1] * 3, [1] * 2, [1] * 2],
        (9, 0): [0.25, 0.25, 0, 0],
        (0, 10): [None, None, "all", "all"],
        (11, 0): [[1], [2, 3], None, None],
        (12, 0): [[0, 1, 2], [0, 1, 2], None, None],
    }
    make = functools.partial(make_talkative, 2)
    with moolink.VectorEnv(make, 4, num_workers=2, autoreset_mode="NextStep") as envs:
        envs.reset()
        for (first, second), expected in cases.items():
            infos = envs.step(np.array([first, 0, second, 0]))[4]
            found = [x.tolist() if isinstance(x, np.ndarray) else x for x in infos["x"]]
            assert found == expected
            assert infos["_x"].tolist() == [first > 0] * 2 + [second > 0] * 2
        infos = envs.step(np.array([0, 0, 2, 0]))[4]
        assert infos["x"]["y"].tolist() == [None, None, b"a", None]


def test_half_batches_have_whole_vector_environments():
    make = functools.partial(make_native, 2)
    with moolink.VectorEnv(make, 8, num_workers=2, batch_size=4, autoreset_mode="NextStep") as envs:
        envs.async_reset(seed=0)
        seen = set()
        while seen != set(range(8)):  # a worker may wait long for a processor
            rows = envs.recv()[4]["env_id"]
            assert_array_equal(rows.reshape(2, 2), rows[::2, None] + [[0, 1]])
            seen.update(rows.tolist())
            envs.send(np.ones(4, np.int64), rows)
        with pytest.raises(ValueError, match="stepped together, 2 of them"):
            envs.recv()
            envs.send(np.ones(1, np.int64), envs.recv()[4]["env_id"][:1])


def test_a_call_reaches_each_vector_environment_once():
    with moolink.VectorEnv(functools.partial(make_cart_poles, 2), 4, num_workers=2) as envs:
        envs.set_attr("label", "seen")
        assert envs.get_attr("label") == ("seen",) * 4
        assert envs.get_attr("num_envs") == (2, 2, 2, 2)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_a_worker_that_dies_cuts_all_its_rows_off(mode):
    make = functools.partial(make_mortal, 2, mode)
    with moolink.VectorEnv(make, 4, num_workers=2, autoreset_mode=mode, on_crash="restart") as envs:
        first, _ = envs.reset(seed=0)
        observations, _, terminated, truncated, infos = envs.step(np.array([1, 0, 0, 0]))
        assert truncated.tolist() == [True, True, False, False]
        assert not terminated.any()
        if mode == "SameStep":
            assert_array_equal(np.stack(infos["final_obs"][:2]), first[:2])
        else:
            assert_array_equal(observations[:2], first[:2])
        _, rewards, _, truncated, _ = envs.step(np.zeros(4, np.int64))
        assert not truncated.any()
        assert rewards.tolist() == ([1, 1, 1, 1] if mode == "SameStep" else [0, 0, 1, 1])


def test_an_env_pool_runs_them_too():
    make = functools.partial(make_cart_poles, 2)
    with moolink.env_pool.EnvPool(make, 2, 4, final_obs=True, seed=1) as pool:
        actions = np.zeros(4, np.int64)
        outputs = pool.step(0, actions).result()
        assert not outputs["done"].any()
        while not outputs["done"].any():
            before = outputs["state"].copy()
            outputs = pool.step(0, actions).result()
        (row, *_) = np.flatnonzero(outputs["done"])
        assert np.abs(outputs["state"][row]).max() <= 0.05  # a first observation
        assert np.abs(outputs["final_obs"][row] - before[row]).max() < 0.5
        assert outputs["episode_return"][row] == outputs["episode_step"][row] > 3


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (make_native, {}, "autoreset mode NextStep, in a pool of mode SameStep"),
        (
            make_mixed,
            {"num_workers": 1, "autoreset_mode": "NextStep"},
            "environment 4 is a single one, and environment 0 has 4 rows",
        ),
        (make_cart_poles, {"num_envs": 6}, "of 4 rows, but this worker has only 3 left"),
        (make_cart_poles, {"num_envs": 12}, "of 4 rows, but this worker has only 2 left"),
        (make_cart_poles, {"num_envs": 16, "batch_size": 2}, "must be a multiple of 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(make, options, message):
    with pytest.raises((moolink.EnvError, ValueError), match=message):
        moolink.VectorEnv(functools.partial(make, 4), **{"num_envs": 8, "num_workers": 2} | options)


def test_a_batch_of_another_shape_is_an_error_and_not_broadcast():
    make = functools.partial(make_wrong, 2)
    with moolink.VectorEnv(make, 4, num_workers=2, autoreset_mode="NextStep") as envs:
        envs.reset()
        with pytest.raises(moolink.EnvError, match=r"have shape \(1, 4\), not \(2, 4\)"):
            envs.step(np.zeros(4, np.int64))
