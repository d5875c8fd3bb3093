"""Environments that declare no spaces, the old Gym's API, and a pool forked from this process."""

import logging
import subprocess
import sys

import numpy as np

from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments as environments

LONG = 60.0


def test_the_first_observation_decides_where_no_space_is_declared(caplog):
    with (
        caplog.at_level(logging.WARNING, logger="moolink"),
        EnvPool(environments.Bare, 2, 4) as pool,
    ):
        first = pool.step(0, np.zeros(4, np.int64)).result(LONG)
        assert first["image"].shape == (4, 2, 3)
        assert first["image"].dtype == np.uint8
        outputs = pool.step(0, np.arange(4)).result(LONG)
        np.testing.assert_array_equal(outputs["image"][:, 0, 0], np.arange(4))
    told = [text for text in caplog.messages if text.startswith("Bare declares")]
    assert told == [
        "Bare declares no observation_space: the layout is uint8 (2, 3), as in the first "
        "observation. It declares no action_space: actions are int64 numbers"
    ]


def test_the_old_gyms_api_is_recognised():
    with EnvPool(environments.OldGym, 1, 2, final_obs=True) as pool:
        pool.step(0, np.zeros(2, np.int64)).result(LONG)
        three = pool.step(0, np.array([3, 3])).result(LONG)
        assert three["reward"].tolist() == [3, 3]
        assert not three["done"].any()
        four = pool.step(0, np.array([4, 5])).result(LONG)
        assert four["terminated"].tolist() == [True, False]
        assert four["truncated"].tolist() == [False, True]


FORKED = """
import numpy as np
from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments

def main():
    shift = 7
    pool = EnvPool(lambda index: pool_environments.Counter(index + shift), 2, 4, start="fork")
    print(pool.step(0, np.zeros(4, np.int64)).result(60)["state"][:, 0].tolist())
    pool.close()
    import threading
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="logger")
    thread.start()
    try:
        EnvPool(lambda: pool_environments.Counter(0), 1, 1, start="fork")
    except Exception as error:
        print(error)
    stop.set()

main()
"""


def test_a_fork_has_what_main_made_and_is_refused_once_threads_run():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=LONG, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "[7.0, 8.0, 9.0, 10.0]"
    assert "the threads logger run" in lines[1]


def test_observations_rewards_and_flags_come_in_every_form():
    with EnvPool(environments.Shapeshifter, 1, 8) as pool:
        pool.step(0, np.zeros(8, np.int64)).result()
        outputs = pool.step(0, np.arange(8)).result()
        plain = np.arange(6).reshape(2, 3)
        for row in range(7):
            np.testing.assert_array_equal(outputs["state"][row], plain + row)
        np.testing.assert_array_equal(outputs["state"][7], [[7, 8, 9]] * 2)
        assert outputs["reward"].tolist() == [0, 1, 2, 3, 4, 5, 1, 7]
        assert not outputs["done"].any()
