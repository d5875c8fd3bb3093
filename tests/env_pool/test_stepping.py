"""What goes into a pool and what comes out."""

import asyncio
import functools
import threading
import time

import numpy as np
import pytest
import torch

import moolink
from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments as environments

LONG = 60.0


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


@pytest.fixture(scope="module")
def counters():
    with EnvPool(environments.Counter, 2, 4, 1) as pool:
        yield pool


@pytest.fixture(scope="module")
def echoes():
    with EnvPool(environments.Echo, 2, 4, 1) as pool:
        yield pool


@pytest.mark.parametrize(("processes", "size", "batches"), [(1, 1, 1), (2, 5, 1), (3, 7, 3)])
def test_every_environment_is_stepped_with_its_own_action(processes, size, batches):
    with EnvPool(environments.Counter, processes, size, batches) as pool:
        assert pool.num_envs == size * batches
        for batch in range(batches):
            first = pool.step(batch, zeros(size)).result(LONG)
            indices = batch * size + np.arange(size)
            expected = np.stack([indices, zeros(size), zeros(size), zeros(size) - 1], axis=1)
            np.testing.assert_array_equal(first["state"], expected)
            assert not first["done"].any()
            assert not first["reward"].any()
        for t in range(1, 8):
            actions = [10 * t + np.arange(size) + 100 * batch for batch in range(batches)]
            futures = [pool.step(batch, actions[batch]) for batch in range(batches)]
            for batch, future in enumerate(futures):
                outputs = future.result(LONG)
                np.testing.assert_array_equal(outputs["reward"], actions[batch])
                assert outputs["reward"].dtype == np.float32
                np.testing.assert_array_equal(
                    outputs["state"][:, 0], batch * size + np.arange(size)
                )
                np.testing.assert_array_equal(outputs["done"], [t == 5] * size)


def test_an_episodes_end_resets_at_once_and_keeps_what_was_seen_last():
    with EnvPool(environments.Counter, 2, 4, 1, final_obs=True) as pool:
        pool.step(0, zeros(4)).result(LONG)
        for t in range(1, 13):
            outputs = pool.step(0, np.full(4, t)).result(LONG)
            ended = t % 5 == 0
            even = np.arange(4) % 2 == 0
            np.testing.assert_array_equal(outputs["done"], [ended] * 4)
            np.testing.assert_array_equal(outputs["terminated"], even & ended)
            np.testing.assert_array_equal(outputs["truncated"], ~even & ended)
            start = 5 * ((t - 1) // 5)
            np.testing.assert_array_equal(outputs["episode_step"], [t - start] * 4)
            np.testing.assert_array_equal(
                outputs["episode_return"], [sum(range(start + 1, t + 1))] * 4
            )
            seen = outputs["final_obs"] if ended else outputs["state"]
            np.testing.assert_array_equal(seen[:, 1:], [[(t - 1) // 5, t - start, t]] * 4)
            if ended:
                np.testing.assert_array_equal(outputs["state"][:, 1:], [[t // 5, 0, -1]] * 4)


def test_final_observations_are_not_kept_unasked():
    with EnvPool(environments.Counter, 1, 1, 1) as pool:
        assert set(pool.step(0, zeros(1)).result(LONG)) == {
            "state", "reward", "done", "terminated", "truncated", "episode_return", "episode_step",
        }  # fmt: skip


ACTION = {
    "button": np.array([2, 6, 4, 3]),
    "stick": np.linspace(-1, 1, 16, dtype=np.float64).reshape(2, 8)[:, ::2].T,
    "keys": np.array([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 1]], np.int8),
    "menu": (np.array([[0, 3], [1, 2], [2, 1], [2, 0]]),),
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_nested_spaces_and_strides_survive_both_ways(echoes, framework):
    action = ACTION
    if framework == "torch":
        action = {
            key: tuple(map(torch.from_numpy, part)) if key == "menu" else torch.from_numpy(part)
            for key, part in ACTION.items()
        }
        assert not action["stick"].is_contiguous()
    echoes.step(0, action).result(LONG)
    outputs = echoes.step(0, action).result(LONG)
    kind = np.ndarray if framework == "numpy" else torch.Tensor
    assert isinstance(outputs["transposed"], kind)
    assert isinstance(outputs["reward"], kind)
    base = np.arange(24, dtype=np.uint8).reshape(4, 6)
    for i in range(4):
        np.testing.assert_array_equal(outputs["transposed"][i], (base + i)[:, ::2].T)
    np.testing.assert_array_equal(outputs["inner"]["discrete"], ACTION["button"])
    np.testing.assert_array_equal(outputs["inner"]["flag"], ACTION["keys"][:, ::-1])
    np.testing.assert_array_equal(outputs["pair"][0], ACTION["menu"][0])
    np.testing.assert_allclose(outputs["pair"][1], ACTION["stick"][:, ::-1])
    assert echoes.action_space == environments.Echo.action_space
    assert echoes.observation_space == environments.Echo.observation_space


@pytest.mark.parametrize(
    "actions",
    [
        np.arange(12)[::3],
        np.arange(12, dtype=np.uint8)[::3],
        torch.arange(12)[::3],
        torch.arange(12, dtype=torch.int32)[::3],
        [0, 3, 6, 9],
    ],
)
def test_actions_of_any_kind_and_stride(counters, actions):
    counters.step(0, actions).result(LONG)
    outputs = counters.step(0, actions).result(LONG)
    assert torch.is_tensor(outputs["reward"]) == torch.is_tensor(actions)
    np.testing.assert_array_equal(outputs["reward"], [0, 3, 6, 9])


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (np.zeros(3, np.int64), ValueError, r"action: expected shape \(4,\), got \(3,\)"),
        (
            np.zeros(4, np.float32),
            TypeError,
            "have dtype float32, its space has int64",
        ),
        (np.array([0, 1, 1000, 2]), ValueError, r"action\[2\] is 1000, which is outside"),
        (np.array([0, 1, 2, -1]), ValueError, r"action\[3\] is -1, which is outside"),
        ({"a": np.zeros(4)}, ValueError, "expected shape"),
        (None, ValueError, "expected shape"),
    ],
)
def test_wrong_actions_are_refused_and_the_pool_goes_on(counters, action, error, message):
    with pytest.raises(error, match=message):
        counters.step(0, action)
    counters.step(0, zeros(4)).result(LONG)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stick", np.full((4, 2), np.nan), r"action\.stick\[0, 0\] is nan"),
        ("stick", np.full((4, 2), 1.5), r"action\.stick\[0, 0\] is 1.5"),
        ("menu", (np.array([[0, 3], [3, 0], [0, 0], [0, 0]]),), r"action\.menu\[0\]\[1, 0\] is 3"),
        ("menu", (), r"action\.menu: expected a tuple of 1 parts, got 0"),
        ("button", np.array([1, 2, 2, 2]), r"action\.button\[0\] is 1"),
        ("other", np.zeros(4), r"action: expected a dict with keys"),
    ],
)
def test_wrong_nested_actions_are_named(echoes, key, value, message):
    with pytest.raises(ValueError, match=message):
        echoes.step(0, ACTION | {key: value})


def test_unchecked_actions_pass():
    with EnvPool(environments.Counter, 1, 1, 1, check_actions=False) as pool:
        pool.step(0, zeros(1)).result(LONG)
        assert pool.step(0, np.array([5000])).result(LONG)["reward"][0] == 5000


def test_large_observations_in_two_batches():
    with EnvPool(environments.Large, 2, 16, 2) as pool:
        futures = [pool.step(i, zeros(16)) for i in range(2)]
        for t in range(1, 5):
            for i in range(2):
                futures[i].result(LONG)
                futures[i] = pool.step(i, np.full(16, 10 * t + i))
        for i in range(2):
            outputs = futures[i].result(LONG)
            assert (outputs["state"] == 40 + i).all()


def test_outputs_are_views_of_the_batchs_memory_or_copies():
    with EnvPool(environments.Counter, 1, 2, 1) as pool:
        first = pool.step(0, zeros(2)).result(LONG)
        second = pool.step(0, np.array([7, 8])).result(LONG)
        assert np.shares_memory(first["reward"], second["reward"])
        assert first["reward"].tolist() == [7, 8]
    assert second["reward"].tolist() == [7, 8]  # Still readable.
    for arrays in ("numpy", "torch"):
        with EnvPool(environments.Counter, 1, 2, 1, copy=True, arrays=arrays) as pool:
            first = pool.step(0, zeros(2)).result(LONG)
            second = pool.step(0, np.array([7, 8])).result(LONG)
            assert torch.is_tensor(first["reward"]) == (arrays == "torch")
            assert first["reward"].tolist() == [0, 0]
            assert second["reward"].tolist() == [7, 8]


def play(processes: int, seed: int | None) -> np.ndarray:
    with EnvPool(environments.Random, processes, 6, 2, seed=seed, copy=True) as pool:
        return np.array([pool.step(t % 2, zeros(6)).result(LONG)["state"] for t in range(2 * 8)])


def test_the_seed_determines_everything_however_many_workers_there_are():
    once = play(1, 5)
    np.testing.assert_array_equal(once, play(3, 5))
    assert len(np.unique(once)) == once.size  # No two environments see the same numbers.
    assert (once != play(1, 6)).all()
    assert (play(1, None) != play(1, None)).all()


def test_a_result_may_be_taken_again_and_must_be_taken_before_the_next_step():
    with EnvPool(environments.Counter, 1, 2, 2) as pool:
        future = pool.step(0, zeros(2))
        with pytest.raises(moolink.Error, match="batch 0 is being stepped: take the result"):
            pool.step(0, zeros(2))
        pool.step(1, zeros(2)).result(LONG)
        assert future.wait(LONG)
        assert future.done()
        assert future.exception() is None
        with pytest.raises(moolink.Error, match="take the result"):
            pool.step(0, zeros(2))
        assert future.result(LONG) is future.result()
        pool.step(0, zeros(2)).result(LONG)


def test_a_result_is_awaited_by_several_tasks():
    async def main() -> list:
        with EnvPool(environments.Counter, 2, 4, 2) as pool:
            for i in range(2):
                await pool.step(i, zeros(4))
            futures = [pool.step(i, np.full(4, 3 + i)) for i in range(2)]
            waits = [_await(futures[i % 2]) for i in range(6)]
            results = await asyncio.wait_for(asyncio.gather(*waits), LONG)
            return [outputs["reward"].tolist() for outputs in results]

    assert asyncio.run(main()) == [[3] * 4, [4] * 4] * 3


async def _await(future):
    return await future


def test_threads_step_batches_of_their_own():
    with EnvPool(environments.Counter, 2, 4, 3) as pool:
        seen = {}

        def play_batch(batch: int) -> None:
            pool.step(batch, zeros(4)).result(LONG)
            for t in range(100):
                rewards = pool.step(batch, np.full(4, t)).result(LONG)["reward"].tolist()
                seen[batch, t] = rewards == [t] * 4

        threads = [threading.Thread(target=play_batch, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert len(seen) == 300
        assert all(seen.values())


def test_create_env_may_take_the_index_or_not():
    with EnvPool(environments.counter_without_index, 1, 3, 1) as pool:
        assert pool.step(0, zeros(3)).result(LONG)["state"][:, 0].tolist() == [0, 0, 0]
    short = functools.partial(environments.Counter, length=1)
    with EnvPool(short, 2, 3, 1) as pool:
        assert pool.step(0, zeros(3)).result(LONG)["state"][:, 0].tolist() == [0, 1, 2]
        assert pool.step(0, zeros(3)).result(LONG)["done"].all()
    with pytest.raises(TypeError, match="it needs width, height"):
        EnvPool(environments.needs_two, 1, 1, 1)


def test_more_processes_than_environments_are_not_started():
    with EnvPool(environments.Counter, 8, 2, 1) as pool:
        assert pool.num_processes == 2
        pool.step(0, zeros(2)).result(LONG)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((0, 1, 1), {}, ValueError),
        ((1, 0, 1), {}, ValueError),
        ((1, 1, 0), {}, ValueError),
        ((1, 1, 1), {"on_crash": "ignore"}, ValueError),
        ((1, 1, 1), {"arrays": "jax"}, ValueError),
        ((1, 1, 1), {"start": "spoon"}, ValueError),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error):
    with pytest.raises(error):
        EnvPool(environments.Counter, *arguments, **options)


def test_there_is_no_such_batch():
    with EnvPool(environments.Counter, 1, 1, 2) as pool:
        for index in (2, -1):
            with pytest.raises(IndexError, match=f"no batch {index}: num_batches is 2"):
                pool.step(index, zeros(1))


def test_signals_that_environments_handle_interrupt_no_worker():
    with EnvPool(environments.Alarmed, 1, 1, 1) as pool:
        pool.step(0, zeros(1)).result(LONG)
        time.sleep(0.1)  # The worker waits through about ten signals.
        assert pool.step(0, zeros(1)).result(LONG)["reward"] == [0.0]
