"""VectorEnv: Gymnasium's three modes, infos, and first ready, first served."""

import functools
import logging

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import moolink
from tests.env_pool import pool_environments as environments
from tests.waiting import until

LONG = 60.0
make = functools.partial(environments.Informed, length=2)


def test_same_step_gives_the_next_episode_and_keeps_the_last_ones_end():
    with_final = moolink.VectorEnv(make, 3, num_workers=2)
    observations, infos = with_final.reset(seed=1)
    assert infos["episode"].tolist() == [0, 0, 0]
    with_final.step([4, 5, 6])
    observations, rewards, terminated, truncated, infos = with_final.step([7, 8, 9])
    assert rewards.tolist() == [7, 8, 9]
    assert terminated.tolist() == [True, False, True]
    assert truncated.tolist() == [False, True, False]
    np.testing.assert_array_equal(observations[:, 1:], [[1, 0, -1]] * 3)
    np.testing.assert_array_equal(np.stack(infos["final_obs"])[:, 3], [7, 8, 9])
    assert infos["final_info"]["action"].tolist() == [7, 8, 9]
    assert infos["episode"].tolist() == [1, 1, 1]
    with_final.close()


def test_next_step_ignores_the_action_of_the_reset():
    envs = moolink.VectorEnv(make, 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    envs.reset()
    envs.step([1, 1])
    observations, _, terminated, truncated, _ = envs.step([2, 2])
    assert (terminated | truncated).all()
    assert observations[:, 2].tolist() == [2, 2]
    observations, rewards, terminated, truncated, _ = envs.step([3, 3])
    assert observations[:, 2].tolist() == [0, 0]
    assert rewards.tolist() == [0, 0]
    assert not (terminated | truncated).any()
    envs.close()


def test_disabled_resets_whom_the_mask_names():
    envs = moolink.VectorEnv(make, 2, autoreset_mode="Disabled")
    envs.reset()
    envs.step([1, 1])
    observations, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert observations[:, 2].tolist() == [0, 1]
    envs.close()


def test_a_slow_environment_holds_up_nobody_of_another_worker():
    envs = moolink.VectorEnv(environments.Informed, 3, num_workers=3, batch_size=2)
    envs.async_reset()
    *_, infos = envs.recv(LONG)
    envs.send([99 if row == 0 else 1 for row in infos["env_id"]])
    for _ in range(5):
        *_, infos = envs.recv(LONG)
        if 0 not in infos["env_id"]:
            assert sorted(infos["env_id"]) == [1, 2]
        envs.send(np.ones(2, np.int64), infos["env_id"])
    envs.close()


def test_a_half_batch_is_one_request_a_worker():
    envs = moolink.VectorEnv(environments.Informed, 8, num_workers=2, batch_size=4)
    envs.async_reset()
    assert envs._requests.made == 4  # 0 and 1, 2 and 3, 4 and 5, 6 and 7
    seen = np.zeros(8, np.int64)
    for _ in range(20):
        made = envs._requests.made
        *_, infos = envs.recv(LONG)
        seen[infos["env_id"]] += 1
        envs.send(np.ones(4, np.int64), infos["env_id"])
        assert envs._requests.made == made + 2
    assert seen.sum() == 80
    envs.close()


def test_attributes_and_errors_of_calls_leave_the_pool_usable():
    envs = moolink.VectorEnv(environments.Informed, 2)
    envs.reset()
    envs.set_attr("length", [3, 4])
    assert envs.get_attr("length") == (3, 4)
    with pytest.raises(moolink.EnvError, match="environment 0 raised in missing: AttributeError"):
        envs.call("missing")
    envs.step([0, 0])
    envs.close()


def test_infos_wait_for_the_recv_that_gives_their_environment(tmp_path):
    make_flagging = functools.partial(environments.Flagging, str(tmp_path))
    with_infos = moolink.VectorEnv(make_flagging, 3, num_workers=1, batch_size=1)
    with_infos.async_reset()
    # One worker resets them in order: when 2 is reset, 0 and 1 are ready, infos and all.
    until((tmp_path / "reached").exists, "environment 2 to be reset")
    for row in range(3):
        *_, infos = with_infos.recv(LONG)
        assert infos["env_id"].tolist() == [row]
        assert infos["episode"].tolist() == [0]
    with_infos.close()


def restarting(folder, told, **options):
    """A VectorEnv of four, whose environment 1 kills its worker when it is next told to."""
    envs = moolink.VectorEnv(
        functools.partial(environments.Remembering, str(folder)),
        4,
        num_workers=2,
        on_crash="restart",
        **options,
    )

    def tell():
        (folder / "told").write_text(told)

    return envs, tell


def receive_all(envs):
    """Receives until every environment was received once: arrays [num_envs], by environment."""
    found = {}
    while len(found) < envs.num_envs:
        observations, rewards, terminated, truncated, infos = envs.recv(LONG)
        for position, row in enumerate(infos["env_id"].tolist()):
            found[row] = (observations[position], rewards[position], truncated[position])
        assert not terminated.any()
    return [np.stack(part) for part in zip(*(found[row] for row in sorted(found)), strict=True)]


@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_a_worker_that_dies_during_recv_cuts_its_episodes_off(tmp_path, caplog, mode):
    envs, tell = restarting(tmp_path, "step", batch_size=2, autoreset_mode=mode)
    everybody = np.arange(4)
    envs.async_reset(seed=10)
    observations, _, truncated = receive_all(envs)
    assert observations[:, 1].tolist() == [10, 11, 12, 13]
    tell()
    with caplog.at_level(logging.WARNING, logger="moolink"):
        envs.send(np.full(4, 5), everybody)
        observations, rewards, truncated = receive_all(envs)
    assert "was killed by SIGKILL" in caplog.text
    assert "while it ran environment 1; it had" in caplog.text
    # Environment 0 took its step before 1 killed their worker; 2 and 3 are another worker's.
    assert truncated.tolist() == [False, True, False, False]
    assert rewards.tolist() == [5, 0, 5, 5]
    if mode == "SameStep":  # The next episode's first observation; seeds are not given again.
        assert observations[1].tolist() == [1, -1, -1, -1]
    else:  # The last observation that there was.
        assert observations[1].tolist() == [1, 11, -1, -1]
    if mode == "Disabled":
        envs.send(np.full(2, 6), [2, 3])
        envs.recv(LONG)
        envs.reset(seed=20, options={"reset_mask": np.array([True, True, False, False])})
    envs.send(np.full(4, 7), everybody)
    observations, rewards, truncated = receive_all(envs)
    if mode == "SameStep":
        assert truncated.tolist() == [True, False, False, False]
        assert rewards.tolist() == [0, 7, 7, 7]
    elif mode == "NextStep":  # 0 hears of it now, 1 is reset in place of a step.
        assert truncated.tolist() == [True, False, False, False]
        assert rewards.tolist() == [0, 0, 7, 7]
        assert observations[1].tolist() == [1, -1, -1, -1]
    else:
        assert not truncated.any()
        assert rewards.tolist() == [7] * 4
        assert observations[:2, 1].tolist() == [20, 21]
    envs.close()


def test_a_restarted_worker_gets_the_arguments_again(tmp_path):
    envs, tell = restarting(tmp_path, "reset")
    tell()
    observations, infos = envs.reset(seed=[7, 8, 9, 10], options={"x": 3})
    assert not (tmp_path / "told").exists()
    assert observations[:, 1].tolist() == [7, 8, 9, 10]
    assert observations[:, 2].tolist() == [3] * 4
    assert infos["seed"].tolist() == [7, 8, 9, 10]
    envs.close()


def test_a_restarted_worker_gets_a_call_again(tmp_path):
    envs, tell = restarting(tmp_path, "plus")
    envs.reset(seed=1)
    tell()
    assert envs.call("plus", 100) == (100, 101, 102, 103)
    assert not (tmp_path / "told").exists()
    _, rewards, _, truncated, _ = envs.step([1, 1, 1, 1])
    assert truncated.tolist() == [True, True, False, False]
    assert rewards.tolist() == [0, 0, 1, 1]
    envs.close()


def test_a_restarted_worker_gets_actions_in_messages_again(tmp_path):
    make_written = functools.partial(environments.Written, str(tmp_path))
    envs = moolink.VectorEnv(make_written, 2, num_workers=2, on_crash="restart")
    envs.reset()
    (tmp_path / "told").write_text("step")
    observations, _, _, truncated, _ = envs.step(("ab", "cd"))
    assert truncated.tolist() == [False, True]
    assert observations == ("ab", "")
    observations, _, _, truncated, _ = envs.step(("ef", "gh"))
    assert observations == ("ef", "gh")
    assert not truncated.any()
    envs.close()


def test_values_larger_than_a_socket_holds_go_both_ways():
    make_long = functools.partial(environments.Long, 1_000_000)
    envs = moolink.VectorEnv(make_long, 3, num_workers=1, batch_size=1)
    envs.async_reset()
    for _ in range(3):
        envs.recv(LONG)
    # While later actions are sent, the worker has results to send that its socket cannot hold.
    envs.send([letter * 1_000_000 for letter in "abc"], np.arange(3))
    for letter in "abc":
        observations, *_ = envs.recv(LONG)
        assert observations == (letter * 1_000_000,)
    envs.set_attr("note", ["x" * 1_000_000] * 3)
    assert envs.get_attr("note") == ("x" * 1_000_000,) * 3
    envs.close()


def test_arguments_that_cannot_be_pickled_leave_the_pool_usable():
    envs = moolink.VectorEnv(environments.Informed, 4, num_workers=2)
    envs.reset()
    with pytest.raises(moolink.Error, match="cannot be sent to the worker processes: "):
        envs.set_attr("note", [1, 2, 3, lambda: 0])
    assert envs.get_attr("length") == (5,) * 4
    envs.step([1, 1, 1, 1])
    envs.close()


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [
        (0, {}),
        (None, {}),
        (2, {"num_workers": 0}),
        (2, {"batch_size": 3}),
        (2, {"batch_size": 0}),
        (2, {"on_crash": "ignore"}),
        (2, {"start": "spoon"}),
        (2, {"observation_mode": "alike"}),
        (2, {"autoreset_mode": "sometimes"}),
    ],
)
def test_wrong_arguments_are_refused(num_envs, options):
    with pytest.raises(ValueError):
        moolink.VectorEnv(environments.Informed, num_envs, **options)


@pytest.mark.parametrize(
    ("num_envs", "workers", "message"),
    [
        (2**40, 2, "at most 1048576 environments, not 1099511627776 x 1"),
        (2**20, 2**20, r"needs \d+ file descriptors, and this process may have \d+"),
    ],
)
def test_a_vector_environment_of_absurd_size_is_refused(num_envs, workers, message):
    with pytest.raises(ValueError, match=message):
        moolink.VectorEnv(environments.Informed, num_envs, num_workers=workers)


def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match="did you mean 'num_workers'"):
        moolink.VectorEnv(environments.Informed, 2, num_worker=2)


def test_the_arguments_of_gymnasiums_async_vector_env_are_taken():
    for shared_memory in (True, False):
        envs = moolink.VectorEnv(
            env_fns=[functools.partial(environments.Informed, row) for row in range(3)],
            shared_memory=shared_memory,
            copy=True,
            context="forkserver",
            daemon=False,
            worker=None,
            observation_mode="same",
            autoreset_mode="NextStep",
            max_concurrency=1,
        )
        assert envs.reset()[0][:, 0].tolist() == [0, 1, 2]
        assert envs._requests.made == 1  # of one worker, which runs one environment at a time
        envs.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": "illegal"}, ValueError, "cannot find context for 'illegal'"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be at least 1"),
        ({"max_concurrency": 1.5}, ValueError, "max_concurrency must be an integer"),
        ({"env_fns": [make]}, TypeError, "either create_env or env_fns, got both"),
        ({"create_env": None}, TypeError, "either create_env or env_fns, got neither"),
        ({"observation_mode": (1, 2)}, TypeError, "the batched and the single space"),
    ],
)
def test_wrong_arguments_of_async_vector_env_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        moolink.VectorEnv(**{"create_env": make, "num_envs": 2} | options)


def test_a_worker_function_has_no_effect_and_a_warning_says_so():
    with pytest.warns(UserWarning, match="worker=. has no effect"):
        envs = moolink.VectorEnv(make, 2, worker=print)
    envs.close()


def test_errors_are_moolinks_and_gymnasiums():
    envs = moolink.VectorEnv(make, 2)
    for kind in (moolink.Error, gymnasium.error.NoAsyncCallError):
        with pytest.raises(kind):
            envs.step_wait()
    envs.reset_async()
    for kind in (moolink.Error, gymnasium.error.AlreadyPendingCallError):
        with pytest.raises(kind, match="pending call to `reset`") as raised:
            envs.step_async([0, 0])
        assert raised.value.name == "reset"
    envs.reset_wait()
    envs.close()
    for kind in (moolink.Closed, gymnasium.error.ClosedEnvironmentError):
        with pytest.raises(kind, match="is closed"):
            envs.reset()


@pytest.mark.parametrize("space", ["number", "parts"])
def test_numbers_of_actions_are_numpys_as_in_gymnasiums_classes(space):
    """Programs written for Gymnasium's and SB3's classes call `action.item()`."""
    envs = moolink.VectorEnv(functools.partial(environments.Typed, space), 2, num_workers=2)
    envs.action_space.seed(1)
    envs.reset()
    infos = envs.step(envs.action_space.sample())[4]
    assert infos["final_info"]["type"].tolist() == ["int8", "int8"]
    envs.close()


def test_a_space_is_one_object_and_keeps_its_seed():
    with moolink.env_pool.EnvPool(make, 1, 2) as pool, moolink.VectorEnv(make, 2) as envs:
        kinds = ("observation_space", "action_space")
        owned = [(owner, name) for owner in (pool, envs) for name in kinds]
        owned += [(envs, f"single_{name}") for name in kinds]
        for owner, name in owned:
            getattr(owner, name).seed(1)
            first = getattr(owner, name).sample()
            getattr(owner, name).seed(1)
            np.testing.assert_array_equal(getattr(owner, name).sample(), first)
            assert getattr(owner, name) is getattr(owner, name)


def test_functions_and_their_number_must_agree():
    with pytest.raises(ValueError, match="num_envs is 3, with 2 functions"):
        moolink.VectorEnv([make, make], 3)


def test_large_observations_of_some_and_of_all_in_turn():
    make = functools.partial(environments.Picture, side=128)
    with moolink.VectorEnv(make, 4, num_workers=2, batch_size=2) as envs:
        for episode in range(0, 6, 2):
            envs.async_reset()
            for _ in range(2):
                some = envs.recv()[0]
                assert some.shape == (2, 128, 128, 4)
                assert (some == episode).all()
                del some
            observations, _ = envs.reset()
            assert observations.shape == (4, 128, 128, 4)
            assert (observations == episode + 1).all()
            del observations


def test_environments_without_spaces_are_refused():
    with pytest.raises(TypeError, match="declare no observation_space, which"):
        moolink.VectorEnv(environments.Bare, 2)
