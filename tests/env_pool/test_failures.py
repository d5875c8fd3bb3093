"""What happens when environments, workers, the server or the pool's process fail."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import pathlib
import re
import signal
import threading
import time

import numpy as np
import pytest

import moolink
from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments as environments
from tests.processes import kill, wait_until_gone

LONG = 60.0


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


def children(pid: int) -> list[int]:
    """Returns the processes started by `pid`, and by those, and so on."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *children(int(child))]
    return found


of_other_tests: set[int] = set()  # such as multiprocessing's server, which lives on


@pytest.fixture(autouse=True)
def _note_processes() -> None:
    of_other_tests.clear()
    of_other_tests.update(children(os.getpid()))


def pool_processes() -> list[int]:
    """The processes that this test has started: a pool's server, then its workers."""
    return [pid for pid in children(os.getpid()) if pid not in of_other_tests]


def misbehave(action: int, row: int = 1) -> np.ndarray:
    actions = zeros(4)
    actions[row] = action
    return actions


@pytest.mark.parametrize(
    ("action", "message", "in_traceback"),
    [
        (environments.RAISE, "raised in step: ValueError: the lander has crashed", "line "),
        (environments.EXIT, "raised in step: SystemExit: enough", "sys.exit"),
        (
            environments.BAD_SHAPE,
            r"obs: the observation has shape \(1,\), its space has \(4,\)",
            "",
        ),
        (environments.BAD_DTYPE, "obs: the observation has dtype complex64, its space has", ""),
        (environments.NO_REWARD, "raised in step: TypeError: float", ""),
        (environments.TWO_VALUES, "raised in step: TypeError: step.* got 2 values", ""),
    ],
)
def test_an_environment_that_raises_is_named(action, message, in_traceback):
    with EnvPool(environments.Misbehaving, 2, 4, 2) as pool:
        for batch in range(2):
            pool.step(batch, zeros(4)).result(LONG)
        future = pool.step(1, misbehave(action, row=3))
        with pytest.raises(moolink.EnvError, match=message) as failure:
            future.result(LONG)
        assert "environment 7 raised" in str(failure.value)
        assert failure.value.environments == (7,)
        assert "Traceback" in failure.value.remote_traceback
        assert in_traceback in failure.value.remote_traceback
        with pytest.raises(moolink.EnvError, match="environment 7"):
            pool.step(0, zeros(4))
        assert future.wait(LONG)
        assert future.done()
        assert isinstance(future.exception(), moolink.EnvError)


@pytest.mark.parametrize(
    ("create_env", "message", "indices"),
    [
        (environments.RaisesWhenMade, "environment 3 raised in create_env: .*no ROM", (3,)),
        (environments.NoReset, "raised in create_env: .*which has no reset", None),
        (environments.Textual, r"obs\.mission: Text spaces are not supported", None),
        (environments.Different, "all environments of a pool need the same spaces", None),
    ],
)
def test_an_environment_that_cannot_be_made_is_named(create_env, message, indices):
    with pytest.raises(moolink.EnvError, match=message) as failure:
        EnvPool(create_env, 2, 4, 1)
    if indices is not None:
        assert failure.value.environments == indices
    wait_until_gone(pool_processes())


@pytest.mark.parametrize("results", [4, 5])
def test_an_info_that_is_no_dict_is_an_error_of_the_environment(results):
    create_env = functools.partial(environments.InfoOf, ["info"], results)
    pool = moolink.VectorEnv([create_env])
    pool.reset()
    with pytest.raises(moolink.EnvError, match="a dict as its info, got list") as failure:
        pool.step(np.array([1]))
    assert failure.value.environments == (0,)
    pool.close()


def test_a_worker_that_dies_while_it_makes_environments_is_reported():
    with pytest.raises(moolink.EnvError, match="was killed by SIGKILL"):
        EnvPool(environments.DiesWhenMade, 1, 1, 1, on_crash="restart")


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(EnvPool, environments.HangsWhenMade, 2, 4),
        functools.partial(moolink.VectorEnv, environments.HangsWhenMade, 4, num_workers=2),
    ],
    ids=["EnvPool", "VectorEnv"],
)
def test_an_environment_whose_making_hangs_is_named(make):
    late = r"not made within \d+ s: worker 1 \(pid \d+\) is in create_env of environment 3\. If "
    for limit in (1, 4, 16):  # on a busy machine it takes a while until the workers are there
        with pytest.raises(moolink.TimeoutError, match=f"not made within {limit} s") as error:
            make(start_timeout=limit)
        if re.search("worker 0|has not begun", str(error.value)) is None:
            break
    assert re.search(late, str(error.value))
    wait_until_gone(pool_processes())


@pytest.mark.parametrize(
    ("processes", "size", "batches", "message"),
    [
        (2, 2**40, 1, "at most 1048576 environments, not 1099511627776 x 1"),
        (1, 1, 2**40, "at most 1048576 environments"),
        (2**20, 2**20, 1, r"needs \d+ file descriptors, and this process may have \d+"),
    ],
)
def test_a_pool_of_absurd_size_is_refused(processes, size, batches, message):
    with pytest.raises(ValueError, match=message):
        EnvPool(environments.Counter, processes, size, batches)


@pytest.mark.parametrize("where", ["create_env", "reset", "step", "exit"])
def test_a_child_that_an_environment_forks_does_not_serve(where, capfd):
    with EnvPool(functools.partial(environments.Forks, where), 1, 1) as pool:
        for t in range(3):
            outputs = pool.step(0, np.array([t])).result(LONG)
            assert outputs["state"][0, 2] == t
    said = capfd.readouterr().err
    doing = "step" if where == "exit" else where
    assert f"environment 0 has forked in {doing}, and its child" in said


def test_an_observation_key_of_ours_is_refused():
    with pytest.raises(ValueError, match=r"keys \['reward'\]"):
        EnvPool(environments.NameClash, 1, 1, 1)


def test_an_environment_that_raises_in_reset_is_named():
    message = "environment 2 raised in reset: RuntimeError: no level file"
    with (
        EnvPool(environments.RaisesInReset, 2, 4, 1) as pool,
        pytest.raises(moolink.EnvError, match=message),
    ):
        pool.step(0, zeros(4)).result(LONG)


@pytest.mark.parametrize(
    ("action", "number"),
    [(environments.DIE, signal.SIGKILL), (environments.SEGFAULT, signal.SIGSEGV)],
)
def test_a_worker_that_dies_is_named_with_its_signal_and_environment(action, number):
    with EnvPool(environments.Misbehaving, 2, 4, 1) as pool:
        pool.step(0, zeros(4)).result(LONG)
        with pytest.raises(moolink.EnvError, match=f"was killed by {number.name}") as failure:
            pool.step(0, misbehave(action)).result(LONG)
        assert failure.value.environments == (1,)
        assert failure.value.returncode == -number
        assert f"pid {failure.value.worker_pid}" in str(failure.value)


def test_a_death_wakes_threads_and_tasks_that_wait():
    with EnvPool(environments.Misbehaving, 2, 4, 2) as pool:
        for batch in range(2):
            pool.step(batch, zeros(4)).result(LONG)
        hanging = pool.step(0, misbehave(environments.HANG))
        errors = []

        def wait() -> None:
            try:
                hanging.result(LONG)
            except moolink.Error as error:
                errors.append(error)

        async def main() -> None:
            killer = asyncio.get_running_loop().call_later(
                0.1, lambda: os.kill(worker_pids()[0], signal.SIGKILL)
            )
            with pytest.raises(moolink.EnvError, match="SIGKILL"):
                await hanging
            killer.cancel()

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        asyncio.run(main())
        for thread in threads:
            thread.join(LONG)
        assert len(errors) == 3
        assert all(isinstance(error, moolink.EnvError) for error in errors)


def worker_pids() -> list[int]:
    """The workers of the only pool: the children of its server."""
    _, *workers = pool_processes()
    return workers


def test_a_death_is_noticed_by_those_who_only_ask():
    with EnvPool(environments.Misbehaving, 2, 4, 1) as pool:
        pool.step(0, zeros(4)).result(LONG)
        future = pool.step(0, misbehave(environments.DIE))
        deadline = time.monotonic() + LONG
        while not future.done():
            assert time.monotonic() < deadline
        assert isinstance(future.exception(), moolink.EnvError)


def test_a_killed_worker_is_restarted_and_its_episodes_cut_off(caplog):
    with EnvPool(environments.Misbehaving, 2, 4, 2, on_crash="restart", final_obs=True) as pool:
        for batch in range(2):
            pool.step(batch, zeros(4)).result(LONG)
            pool.step(batch, np.full(4, 11)).result(LONG)
        with caplog.at_level(logging.WARNING, logger="moolink"):
            outputs = pool.step(0, misbehave(environments.DIE)).result(LONG)
        assert "was killed by SIGKILL" in caplog.text
        # Rows 0 and 1 were the dead worker's; the other one's episodes go on.
        assert outputs["done"].tolist() == [True, True, False, False]
        assert outputs["truncated"].tolist() == [True, True, False, False]
        assert not outputs["terminated"].any()
        np.testing.assert_array_equal(outputs["state"][:2], [[0, 0, 0, -1], [1, 0, 0, -1]])
        np.testing.assert_array_equal(outputs["state"][2:, 2], [2, 2])
        np.testing.assert_array_equal(outputs["final_obs"][1], [1, 0, 1, 11])
        assert outputs["reward"].tolist() == [0, 0, 0, 0]
        # The other batch, not under way when the worker died, hears of it at its next step.
        outputs = pool.step(1, np.full(4, 12)).result(LONG)
        assert outputs["done"].tolist() == [True, True, False, False]
        assert outputs["reward"].tolist() == [0, 0, 12, 12]
        for batch in range(2):
            outputs = pool.step(batch, np.full(4, 13)).result(LONG)
            assert outputs["reward"].tolist() == [13] * 4
            assert not outputs["done"].any()


def test_batches_go_on_through_many_kills():
    with EnvPool(environments.Counter, 3, 6, 2, on_crash="restart") as pool:
        futures = [pool.step(i, zeros(6)) for i in range(2)]
        random = np.random.default_rng(0)
        for t in range(60):
            for i in range(2):
                outputs = futures[i].result(LONG)
                np.testing.assert_array_equal(outputs["state"][:, 0], 6 * i + np.arange(6))
                futures[i] = pool.step(i, np.full(6, t))
            if t % 6 == 0:
                kill(random.choice(worker_pids()))
        for future in futures:
            future.result(LONG)


def test_an_environment_that_raised_is_made_anew(caplog):
    with EnvPool(environments.Misbehaving, 2, 4, 1, on_crash="restart") as pool:
        pool.step(0, zeros(4)).result(LONG)
        pool.step(0, zeros(4)).result(LONG)
        pids = worker_pids()
        with caplog.at_level(logging.WARNING, logger="moolink"):
            outputs = pool.step(0, misbehave(environments.RAISE)).result(LONG)
            assert outputs["truncated"].tolist() == [False, True, False, False]
            assert outputs["state"][:, 2].tolist() == [2, 0, 2, 2]
            outputs = pool.step(0, np.full(4, 20)).result(LONG)
        assert outputs["reward"].tolist() == [20] * 4
        assert worker_pids() == pids
        deadline = time.monotonic() + LONG
        while "environment 1 raised in step and was made anew" not in caplog.text:
            pool._supervisor.handle_alarms()
            assert time.monotonic() < deadline


def test_what_fails_again_and_again_is_reported():
    with EnvPool(environments.Misbehaving, 2, 4, 1, on_crash="restart") as pool:
        pool.step(0, zeros(4)).result(LONG)
        with pytest.raises(moolink.EnvError, match="environment 1 raised in step: ValueError"):
            for _ in range(20):
                pool.step(0, misbehave(environments.RAISE)).result(LONG)


def test_a_dead_server_is_reported_and_takes_its_workers_along():
    with EnvPool(environments.Misbehaving, 2, 4, 1) as pool:
        pool.step(0, zeros(4)).result(LONG)
        pids = worker_pids()
        future = pool.step(0, misbehave(environments.HANG))
        os.kill(pool_processes()[0], signal.SIGKILL)
        with pytest.raises(moolink.EnvError, match=r"fork server .* was killed by SIGKILL"):
            future.result(LONG)
        wait_until_gone(pids)


def test_a_hang_is_named_by_the_timeout_and_ended_by_close():
    with EnvPool(environments.Misbehaving, 2, 4, 1) as pool:
        pool.step(0, zeros(4)).result(LONG)
        future = pool.step(0, misbehave(environments.HANG, row=2))
        late = r"batch 0 was not finished within 0.3 s: worker 1 \(pid \d+\) is in environment 2"
        with pytest.raises(moolink.TimeoutError, match=late):
            future.result(0.3)
        assert not future.wait(0.1)
        assert not future.done()
        assert future.exception() is None
        pids = worker_pids()
    wait_until_gone(pids)
    with pytest.raises(moolink.Closed):
        future.result(LONG)


def test_ctrl_c_interrupts_a_wait_and_leaves_the_pool_usable():
    with EnvPool(environments.Misbehaving, 1, 1, 2) as pool:
        for batch in range(2):
            pool.step(batch, zeros(1)).result(LONG)
        future = pool.step(0, np.array([environments.HANG]))
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            future.result(LONG)
        timer.join()
        assert not future.done()


def test_use_after_close_is_refused():
    pool = EnvPool(environments.Counter, 1, 2, 1)
    future = pool.step(0, zeros(2))
    pool.close()
    pool.close()
    with pytest.raises(moolink.Closed, match="the EnvPool is closed"):
        pool.step(0, zeros(2))
    with pytest.raises(moolink.Closed):
        future.result(LONG)


def test_environments_are_closed_and_nothing_is_left_over(tmp_path):
    def resources() -> tuple[int, list[int]]:
        gc.collect()  # Earlier tests' exceptions may hold their pools.
        return len(os.listdir("/proc/self/fd")), pool_processes()

    create = functools.partial(environments.Recorder, str(tmp_path))
    EnvPool(create, 2, 3, 2).close()  # Modules are loaded, memory is mapped.
    before = resources()
    for path in tmp_path.iterdir():
        path.unlink()
    for _ in range(3):
        with EnvPool(create, 2, 3, 2) as pool:
            pool.step(0, zeros(3)).result(LONG)
        with pytest.raises(moolink.EnvError):
            EnvPool(environments.RaisesWhenMade, 2, 4, 1)
    del pool  # Outputs stay readable after close, so the memory goes with the last of them.
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"closed-{i}" for i in range(6)]
    assert resources() == before


def test_two_pools_at_once():
    with (
        EnvPool(environments.Counter, 2, 4, 1) as one,
        EnvPool(environments.Large, 1, 2, 1) as two,
    ):
        for t in range(5):
            futures = one.step(0, np.full(4, t)), two.step(0, np.full(2, t))
            assert futures[0].result(LONG)["reward"].tolist() == [t if t else 0] * 4
            assert futures[1].result(LONG)["state"][0, 0, 0, 0] == t


def test_a_pool_may_be_made_by_a_thread_that_ends():
    pools = []
    thread = threading.Thread(target=lambda: pools.append(EnvPool(environments.Counter, 1, 1, 1)))
    thread.start()
    thread.join(LONG)
    with pools[0] as pool:
        for t in range(3):
            pool.step(0, np.array([t])).result(LONG)


def test_a_fork_cannot_use_its_parents_pool():
    with EnvPool(environments.Counter, 1, 1, 1) as pool:
        pid = os.fork()
        if pid == 0:
            try:
                pool.step(0, zeros(1))
            except moolink.Closed:
                pool.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pool.step(0, zeros(1)).result(LONG)
