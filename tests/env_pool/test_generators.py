"""Random numbers in workers: they differ without a seed, and a seed makes them repeatable."""

import os
import pathlib
import random
import subprocess
import sys

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import moolink

LONG = 60.0
HERE = pathlib.Path(__file__).parents[2]

of_module = np.random.default_rng()  # made when a worker's server loads this module
legacy_of_module = np.random.RandomState()
chosen = np.random.default_rng(7)

SOURCES = {
    "numpy": np.random.random,
    "random": random.random,
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    "a generator of a module": of_module.random,
    "an old generator of a module": legacy_of_module.random_sample,
    "a new generator": lambda: np.random.default_rng().random(),
}


class Dice(gymnasium.Env):
    """Observes numbers drawn when it was made, when it was reset, and now; then one of `chosen`."""

    observation_space = spaces.Box(0, 1, (3, len(SOURCES)), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.made = self.draw()

    def reset(self, *, seed=None, options=None):
        self.begun = self.draw()
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {"chosen": chosen.random()}

    def observe(self):
        return np.array([self.made, self.begun, self.draw()])

    def draw(self):
        return [draw() for draw in SOURCES.values()]


def stepped(seed=None):
    """Two observations of a pool's environments."""
    with moolink.env_pool.EnvPool(Dice, 3, 3, seed=seed, copy=True) as pool:
        return [pool.step(0, np.zeros(3, np.int64)).result(LONG)["state"] for _ in range(2)]


def test_workers_draw_different_numbers_unasked():
    with moolink.VectorEnv(Dice, 3, num_workers=3) as envs:
        observed = [envs.reset()[0], envs.step([0, 0, 0])[0], *stepped(), *stepped()]
        drawn = np.array(observed)  # [6, 3, 3, sources]
        infos = envs.step([0, 0, 0])[4]
    for column, name in enumerate(SOURCES):
        for when in range(3):
            # A pool's two observations have the same first two rows.
            numbers = drawn[1::2, :, when, column].ravel().tolist()
            assert len(set(numbers)) == len(numbers), f"{name} gives twins: {numbers}"
    # A generator that the program has seeded keeps that seed.
    assert len(set(infos["chosen"])) == 1


def test_a_seed_makes_global_generators_repeatable():
    pools = [stepped(5), stepped(5), stepped(6)]
    vectors = []
    for seed in (5, 5, 6):
        with moolink.VectorEnv(Dice, 3, num_workers=3) as envs:
            vectors.append([envs.reset(seed=seed)[0], envs.step([0, 0, 0])[0]])
    for column in range(3):  # numpy, random and torch
        for first, again, other in (pools, vectors):
            for observed, same, different in zip(first, again, other, strict=True):
                rows = slice(1, 3)
                np.testing.assert_array_equal(observed[:, rows, column], same[:, rows, column])
                assert (observed[:, rows, column] != different[:, rows, column]).all()
                assert len(set(observed[:, 2, column])) == 3


LATE = """
import sys
import numpy as np
import moolink
from gymnasium import spaces

class Late:
    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, index):
        assert index or "torch" not in sys.modules
        import torch
        self.torch = torch

    def reset(self, *, seed=None, options=None):
        return self.torch.rand(1, dtype=self.torch.float64).numpy(), {}

if __name__ == "__main__":
    with moolink.VectorEnv(Late, 2, num_workers=2) as envs:
        first, second = envs.reset()[0][:, 0]
        assert first != second, (first, second)
        print("different")
"""


def test_torch_that_is_loaded_by_the_environment_draws_differently(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE.replace("class Late:", "class Late:\n    step = None"))
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("different\n", 0), done.stderr


def seeding(index):
    np.random.seed(3)
    return Dice()


def test_a_seed_that_the_environment_sets_is_kept():
    with moolink.VectorEnv(seeding, 2, num_workers=2) as envs:
        first, second = envs.reset()[0][:, 0, 0]
    assert first == second == np.random.RandomState(3).random_sample()
