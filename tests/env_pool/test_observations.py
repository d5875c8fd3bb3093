"""Values of environments that do not fit their spaces, and infos that do not fit each other."""

import functools
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import moolink

LONG = 60.0


class Observing(gymnasium.Env):
    """Observes `good`, and `bad` when its action is 1; both reward with `reward`."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, good, bad, reward=0.0):
        self.observation_space, self.good, self.bad, self.reward = space, good, bad, reward

    def reset(self, *, seed=None, options=None):
        return self.good, {}

    def step(self, action):
        return self.bad if action else self.good, self.reward, action == 2, False, {}


BYTES = spaces.Box(0, 255, (3,), np.uint8)
NONE = np.zeros(3, np.uint8)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.array([7], np.uint8), r"shape \(1,\), its space has \(3,\) .*array\(\[7\], dtype=u"),
        (7, r"shape \(\), its space has \(3,\) .* 7 of dtype int64 for dtype uint8"),
        (None, r"None of dtype object for dtype uint8"),
        (np.zeros((3, 1), np.uint8), r"shape \(3, 1\)"),
        (np.array([0.5, 1.5, 2.5]), "dtype float64, its space has uint8 .* cannot hold 0.5"),
        (np.array([0, np.nan, 0], np.float32), "dtype float32, its space has uint8"),
        (np.array([0, 300, 0]), r"int64, its space has uint8 .* cannot hold 300 at \[1\]"),
        (np.array([0, 0, 300], np.uint16), r"uint16, its space has uint8 .* 300 at \[2\]"),
        ([0, 0, -1], r"cannot hold -1 at \[2\]"),
        (np.array([1j, 0, 0]), "dtype complex128, its space has uint8"),
        (np.array(["1", "2", "3"]), "dtype <U1, its space has uint8"),
        (np.array([2**80, 0, 0]), "dtype object, its space has uint8"),
        ([[1], [2, 3]], "is no array: setting an array element"),
        ({"x": NONE}, "dtype object for dtype uint8"),
    ],
)
def test_an_observation_that_does_not_fit_is_named(value, says):
    make = functools.partial(Observing, BYTES, NONE, value)
    with moolink.VectorEnv(make, 2, num_workers=1) as envs:
        envs.reset()
        with pytest.raises(moolink.EnvError, match=rf"environment 1 raised in step.*: obs.*{says}"):
            envs.step([0, 1])
    with moolink.env_pool.EnvPool(make, 1, 2) as pool:
        pool.step(0, np.zeros(2, np.int64)).result(LONG)
        with pytest.raises(moolink.EnvError, match=rf"environment 1 raised in step.*: obs.*{says}"):
            pool.step(0, np.array([0, 1])).result(LONG)


@pytest.mark.parametrize(
    ("space", "good", "bad", "says"),
    [
        (spaces.Discrete(9), 1, 2**63, "cannot hold 9223372036854775808"),
        (spaces.Discrete(9), 1, 1.5, "cannot hold 1.5"),
        (spaces.MultiBinary(2), [0, 1], [0, 200], r"int64, its space has int8 .* 200 at \[1\]"),
        (spaces.Box(0, 1, (2,), np.bool_), [True, 0], [0, 2], "cannot hold 2"),
        (spaces.Box(-1, 1, (2,), np.float32), [0, 1], [0, 1e300], r"cannot hold 1e\+300"),
        (
            spaces.Dict(a=spaces.Tuple([BYTES])),
            {"a": (NONE,)},
            {"a": (NONE + np.uint16(256),)},
            r"obs\.a\[0\]: .*cannot hold 256",
        ),
        (spaces.Dict(a=BYTES), {"a": NONE}, NONE, "obs: the observation should be a dict of"),
        (spaces.Dict(t=spaces.Text(9), a=BYTES), {"t": "", "a": NONE}, {"t": "", "a": [300, 0, 0]},
         r"obs\.a: .*cannot hold 300"),
        (spaces.Dict({0: spaces.Text(9), 1: BYTES}), {0: "", 1: NONE}, {0: "", 1: [300, 0, 0]},
         r"obs\.1: .*cannot hold 300"),
        (spaces.Dict({0: BYTES, 1: BYTES}), {0: NONE, 1: NONE}, {0: NONE, 1: [300, 0, 0]},
         r"obs\.1: .*cannot hold 300"),
        (spaces.Tuple([spaces.OneOf([BYTES]), BYTES]), ((0, NONE), NONE), ((0, NONE), NONE[:1]),
         r"obs\[1\]: .*shape \(1,\)"),
    ],
)  # fmt: skip
def test_parts_of_every_space_are_checked(space, good, bad, says):
    make = functools.partial(Observing, space, good, bad)
    with moolink.VectorEnv(make, 1) as envs:
        envs.reset()
        envs.step([0])
        with pytest.raises(moolink.EnvError, match=says):
            envs.step([1])


def test_each_environment_is_checked_by_its_own_space():
    texts = [spaces.Dict(t=spaces.Text(9), a=spaces.Box(0, 100, (1,), d)) for d in (np.int8, int)]
    batched = spaces.Dict(t=spaces.Tuple([texts[1]["t"]] * 2), a=spaces.Box(0, 999, (2, 1), int))
    makes = [
        functools.partial(Observing, space, {"t": "", "a": [value]}, {"t": "", "a": [value * 3]})
        for space, value in zip(texts, (100, 300), strict=True)
    ]
    with moolink.VectorEnv(makes, num_workers=1, observation_mode=(batched, texts[1])) as envs:
        assert envs.reset()[0]["a"].tolist() == [[100], [300]]
        assert envs.step([0, 1])[0]["a"].tolist() == [[100], [900]]
        with pytest.raises(moolink.EnvError, match=r"environment 0 .*cannot hold 300"):
            envs.step([1, 0])


class Overflowing(gymnasium.Env):
    """Its own numbers overflow, and observations have another dtype than their space's."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.ones(2), {}

    def step(self, action):
        return np.ones(2) / 3, 0.0, False, False, {"over": np.geterr()["over"]}


def test_environments_keep_numpys_settings_when_their_values_are_converted():
    with moolink.VectorEnv(Overflowing, 2, num_workers=1) as envs:
        envs.reset()
        for _ in range(2):
            observations, *_, infos = envs.step([0, 0])
            assert observations.dtype == np.float32
            assert observations.tolist() == [[np.float32(1 / 3)] * 2] * 2
            assert infos["over"].tolist() == ["warn"] * 2


def test_values_that_fit_are_converted():
    values = [np.array([1, 2, 255]), np.array([1, 2, 255], np.uint64), [1, 2, 255], (True, 2, 255)]
    for value in values:
        make = functools.partial(Observing, BYTES, value, value)
        with moolink.VectorEnv(make, 1) as envs:
            assert envs.reset()[0].astype(np.int64).sum() == 258
    floats = np.array([np.inf, np.nan, 1 / 3])
    make = functools.partial(Observing, spaces.Box(-9, 9, (3,), np.float16), floats, floats)
    with moolink.VectorEnv(make, 1) as envs:
        np.testing.assert_array_equal(envs.reset()[0][0], floats.astype(np.float16))


def test_first_and_last_observations_and_batches_of_rows_are_checked():
    bad = np.array([0, 300, 0])
    for first in (True, False):
        good = bad if first else NONE
        make = functools.partial(Observing, BYTES, good, bad)
        raises = pytest.raises(moolink.EnvError, match="cannot hold 300")
        with moolink.VectorEnv(make, 1) as envs, raises:
            envs.reset()
            envs.step([1])
    with moolink.VectorEnv(make_rows, 2, num_workers=1) as envs:
        envs.reset()
        with pytest.raises(moolink.EnvError, match=r"obs: the observations have .* hold 1e\+300"):
            envs.step([1, 1])


class Wide(SyncVectorEnv):
    """Observes numbers that its space's dtype cannot hold."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        return observations.astype(np.float64) + 1e300, *rest


def make_rows():
    floats = np.zeros(3, np.float32)
    space = spaces.Box(-1, 1, (3,), np.float32)
    make = functools.partial(Observing, space, floats, floats)
    return Wide([make] * 2, autoreset_mode="SameStep")


def test_an_env_pool_infers_a_layout_where_the_first_observation_does_not_fit(caplog):
    make = functools.partial(Observing, BYTES, np.array([300, 0, 0]), NONE)
    with moolink.env_pool.EnvPool(make, 1, 1) as pool:
        outputs = pool.step(0, np.zeros(1, np.int64)).result(LONG)
        assert outputs["state"].tolist() == [[300, 0, 0]]
    assert "which its observations are not in" in caplog.text


def test_a_reward_is_a_number():
    for reward in ("1.5", None, [1.0, 2.0], 1j):
        make = functools.partial(Observing, BYTES, NONE, NONE, reward)
        with moolink.VectorEnv(make, 1) as envs:
            envs.reset()
            with pytest.raises(moolink.EnvError, match="raised in step: TypeError"):
                envs.step([0])


class Taking(Observing):
    """Takes bytes."""

    action_space = BYTES

    def __init__(self):
        super().__init__(BYTES, NONE, NONE)

    def step(self, action):
        return action, 0.0, False, False, {}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kind", [np.int64, np.uint16])
def test_an_action_that_does_not_fit_is_refused(check, kind):
    with moolink.VectorEnv(Taking, 2, check_actions=check) as envs:
        envs.reset()
        actions = np.array([[0, 1, 2], [3, 4, 300]], kind)
        with pytest.raises(ValueError, match="300"):
            envs.step(actions)
        assert envs.step(actions % 256)[0].tolist() == (actions % 256).tolist()


class Telling(Observing):
    """Gives its own value as an info."""

    VALUES = (1, 0.5, np.arange(2), "text", {"a": 1}, None)

    def __init__(self, index, first):
        super().__init__(BYTES, NONE, NONE)
        self.index, self.first = index, first

    def reset(self, *, seed=None, options=None):
        return NONE, {"value": self.VALUES[(self.index + self.first) % len(self.VALUES)]}


@pytest.mark.parametrize("first", range(len(Telling.VALUES)))
def test_infos_of_environments_that_differ_keep_their_values(first):
    with moolink.VectorEnv(functools.partial(Telling, first=first), 2) as envs:
        infos = envs.reset()[1]
    for row, got in enumerate(infos["value"]):
        expected = Telling.VALUES[(row + first) % len(Telling.VALUES)]
        np.testing.assert_array_equal(got, expected)
    assert infos["_value"].all()


def test_torch_observations_are_read():
    torch = sys.modules.get("torch") or pytest.importorskip("torch")
    value = torch.ones(3, requires_grad=True)
    make = functools.partial(Observing, spaces.Box(0, 1, (3,), np.float32), value, value)
    with moolink.VectorEnv(make, 1, start="program") as envs:
        assert envs.reset()[0].tolist() == [[1, 1, 1]]
