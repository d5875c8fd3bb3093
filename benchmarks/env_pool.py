"""EnvPool and VectorEnv beside the same environments in one process, in a bare loop over shared
memory, and in the worker processes of Gymnasium and, where they are installed, of
Stable-Baselines3 and PufferLib. If sail-sg's EnvPool is installed, CartPole in it and here.

    python benchmarks/env_pool.py --workers 2 --batch-size 64
    PYTHONPATH=. build/interop/current/bin/python benchmarks/env_pool.py      SB3 and EnvPool
    PYTHONPATH=. build/interop/pufferlib/bin/python benchmarks/env_pool.py    PufferLib

`make test-interop` builds the Python environments of the last two commands. PufferLib's has a
gymnasium that is too old for VectorEnv, so VectorEnv's rows are missing there.

All but PufferLib take turns, so a change of the machine's speed affects each of them. A row gives
the environment steps a second of the median and the best turn, and the CPU time a step of all
processes together. The trivial environments do nothing, so the figures show the cost of the pool
itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import mmap
import multiprocessing
import os
import select
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import moolink

TICKS = os.sysconf("SC_CLK_TCK")


class Trivial(gymnasium.Env[Any, Any]):
    """Returns always the same; episodes have 100 steps."""

    action_space = spaces.Discrete(6)

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        self.observation_space = spaces.Box(0, 1 if dtype is np.float32 else 255, shape, dtype)
        self.observation = np.zeros(shape, dtype)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return self.observation, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation, 1.0, self.steps == 100, False, {}


def small() -> Trivial:
    return Trivial((4,), np.float32)


def frames() -> Trivial:
    return Trivial((4, 84, 84), np.uint8)


def raw_atari() -> Trivial:
    return Trivial((210, 160, 3), np.uint8)


ENVIRONMENTS = {"4 float32": small, "4x84x84 uint8": frames, "210x160x3 uint8": raw_atari}

Run = Callable[[int], None]


class PoolRunner:
    """EnvPool, with one batch or two that take turns."""

    def __init__(self, make: Callable[[], Any], workers: int, size: int, batches: int) -> None:
        self.pool = moolink.env_pool.EnvPool(make, workers, size // batches, batches)
        self.actions = np.zeros(size // batches, np.int64)
        self.futures = [self.pool.step(i, self.actions) for i in range(batches)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for i, future in enumerate(self.futures):
                future.result()
                self.futures[i] = self.pool.step(i, self.actions)

    def close(self) -> None:
        self.pool.close()


class VectorRunner:
    """VectorEnv: all environments in step, or half of them at a time, first ready first served."""

    def __init__(
        self,
        make: Callable[[], Any],
        workers: int,
        size: int,
        halves: int,
        autoreset_mode: str = "SameStep",
    ) -> None:
        self.envs = moolink.VectorEnv(
            make,
            size,
            num_workers=workers,
            batch_size=size // halves,
            autoreset_mode=autoreset_mode,
            copy=False,
        )
        self.actions = np.zeros(size // halves, np.int64)
        self.halves = halves
        if halves == 1:
            self.envs.reset()
        else:
            self.envs.async_reset()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.halves == 1:
                self.envs.step(self.actions)
                continue
            for _ in range(self.halves):
                *_, infos = self.envs.recv()
                self.envs.send(self.actions, infos["env_id"])

    def close(self) -> None:
        self.envs.close()


class InProcess:
    """The same environments in a loop: what no pool can beat on one core."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self.environments = [make() for _ in range(size)]
        first, _ = self.environments[0].reset()
        self.observations = np.stack([first] * size)
        self.rewards = np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.bool_)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for i, environment in enumerate(self.environments):
                observation, reward, terminated, truncated, _ = environment.step(0)
                if terminated or truncated:
                    observation, _ = environment.reset()
                self.observations[i] = observation
                self.rewards[i] = reward
                self.dones[i] = terminated or truncated

    def close(self) -> None:
        """Nothing to do."""


class BareLoop:
    """The least that worker processes cost: a loop over shared arrays, a byte each way a batch.

    A pool is compared with it. It has no checks, statistics, failures or other spaces, and one flag
    for each environment instead of `terminated` and `truncated`. It has the processes, copies and
    arrays of a pool, and wakes its workers as often. A pool has to do all that it leaves out.
    """

    def __init__(self, make: Callable[[], Any], workers: int, size: int, batches: int) -> None:
        first, _ = make().reset()
        rows = size // batches
        self.memory = mmap.mmap(-1, size * (first.nbytes + 32))
        offset = 0

        def array(shape: tuple[int, ...], dtype: Any) -> Any:
            nonlocal offset
            made: Any = np.ndarray((size, *shape), dtype, self.memory, offset)
            offset += made.nbytes + (-made.nbytes) % 64
            return made

        self.arrays = [array((), np.int64), array((), np.float32), array((), np.bool_)]
        self.arrays.append(array(first.shape, first.dtype))
        self.pipes: list[list[Any]] = [[] for _ in range(batches)]
        self.children = []
        for worker in range(workers):
            pairs = [multiprocessing.Pipe() for _ in range(batches)]
            parts = [
                range(
                    b * rows + worker * rows // workers, b * rows + (worker + 1) * rows // workers
                )
                for b in range(batches)
            ]
            child = multiprocessing.get_context("fork").Process(
                target=self.work, args=(make, [theirs for _, theirs in pairs], parts), daemon=True
            )
            child.start()
            self.children.append(child)
            for batch, (ours, theirs) in enumerate(pairs):
                theirs.close()
                self.pipes[batch].append(ours)
        self.parts = [slice(b * rows, (b + 1) * rows) for b in range(batches)]
        for batch in range(batches):
            self.send(batch)

    def work(self, make: Callable[[], Any], pipes: list[Any], parts: list[range]) -> None:
        actions, rewards, dones, observations = self.arrays
        environments = [[make() for _ in part] for part in parts]
        for row, environment in zip(parts, environments, strict=True):
            for i, each in zip(row, environment, strict=True):
                observations[i], _ = each.reset()
        poll = select.poll()
        batch_of = {pipe.fileno(): batch for batch, pipe in enumerate(pipes)}
        for descriptor in batch_of:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                os.read(descriptor, 1)
                batch = batch_of[descriptor]
                for i, environment in zip(parts[batch], environments[batch], strict=True):
                    observation, reward, terminated, truncated, _ = environment.step(actions[i])
                    if terminated or truncated:
                        observation, _ = environment.reset()
                    observations[i] = observation
                    rewards[i] = reward
                    dones[i] = terminated or truncated
                os.write(descriptor, b"x")

    def send(self, batch: int) -> None:
        self.arrays[0][self.parts[batch]] = 0
        for pipe in self.pipes[batch]:
            os.write(pipe.fileno(), b"x")

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for batch, pipes in enumerate(self.pipes):
                for pipe in pipes:
                    os.read(pipe.fileno(), 1)
                self.send(batch)

    def close(self) -> None:
        for child in self.children:
            child.terminate()
            child.join()


class GymnasiumAsync:
    """gymnasium's AsyncVectorEnv, a process for each environment; `size` is what it is told."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        self.environments = gymnasium.vector.AsyncVectorEnv([make] * size, shared_memory=True)
        self.environments.reset()
        self.actions = np.zeros(size, np.int64)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.environments.step(self.actions)

    def close(self) -> None:
        self.environments.close()


class StableBaselines3:
    """SubprocVecEnv, a process for each environment."""

    def __init__(self, make: Callable[[], Any], size: int) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        self.environments = SubprocVecEnv([make] * size, start_method="fork")
        self.environments.reset()
        self.actions = np.zeros(size, np.int64)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.environments.step(self.actions)

    def close(self) -> None:
        self.environments.close()


class PufferLib:
    """Its Multiprocessing vectorization; its workers never sleep."""

    def __init__(self, make: Callable[[], Any], workers: int, size: int) -> None:
        import pufferlib.emulation
        import pufferlib.vector

        def emulated(buf: Any = None, seed: int = 0) -> Any:
            return pufferlib.emulation.GymnasiumPufferEnv(make(), buf=buf, seed=seed)

        self.environments = pufferlib.vector.make(
            emulated,
            num_envs=size,
            num_workers=workers,
            batch_size=size // 2,
            backend=pufferlib.vector.Multiprocessing,
        )
        self.environments.async_reset()
        self.actions = np.zeros(size // 2, np.int64)

    def run(self, steps: int) -> None:
        for _ in range(2 * steps):
            self.environments.recv()
            self.environments.send(self.actions)

    def close(self) -> None:
        self.environments.close()


class SailEnvPool:
    """CartPole in sail-sg's EnvPool, which has it in C++ and steps it in threads."""

    def __init__(self, workers: int, size: int, halves: int) -> None:
        import envpool

        self.environments = envpool.make(
            "CartPole-v1",
            env_type="gymnasium",
            num_envs=size,
            batch_size=size // halves,
            num_threads=workers,
        )
        self.environments.async_reset()
        self.actions = np.zeros(size // halves, np.int64)
        self.halves = halves

    def run(self, steps: int) -> None:
        for _ in range(self.halves * steps):
            *_, infos = self.environments.recv()
            self.environments.send(self.actions, infos["env_id"])

    def close(self) -> None:
        self.environments.close()


def vector_runners(make: Callable[[], Any], workers: int, size: int) -> dict[str, tuple[Any, int]]:
    """Returns VectorEnv's runners; none where gymnasium is too old for it."""
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        return {}
    return {
        "VectorEnv, step": (VectorRunner(make, workers, size, 1), size),
        "VectorEnv, recv of half": (VectorRunner(make, workers, size, 2), size),
    }


def native_cart_poles(rows: int) -> Any:
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return CartPoleVectorEnv(num_envs=rows)


class InProcessNative:
    """One of Gymnasium's own vector environments, without a pool."""

    def __init__(self, size: int) -> None:
        self.environments = native_cart_poles(size)
        self.environments.reset()
        self.actions = np.zeros(size, np.int64)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.environments.step(self.actions)

    def close(self) -> None:
        self.environments.close()


def native_runners(workers: int, rows: int) -> dict[str, tuple[Any, int]]:
    """Vector environments of `rows` rows in the workers, and all their rows in one process."""
    make, mode = functools.partial(native_cart_poles, rows), "NextStep"
    step, halves = rows * workers, 2 * rows * workers
    return {
        "in one process, no pool": (InProcessNative(step), step),
        "VectorEnv, step": (VectorRunner(make, workers, step, 1, mode), step),
        "VectorEnv, recv of half": (VectorRunner(make, workers, halves, 2, mode), halves),
    }


def cart_pole_runners(workers: int, size: int) -> dict[str, tuple[Any, int]]:
    """Returns runners of CartPole: Gymnasium's, in Python and in numpy, and EnvPool's."""
    make, mode = functools.partial(gymnasium.make, "CartPole-v1"), "NextStep"
    native = functools.partial(native_cart_poles, size // workers)
    return {
        "VectorEnv, step": (VectorRunner(make, workers, size, 1, mode), size),
        "VectorEnv of CartPoleVectorEnv": (VectorRunner(native, workers, size, 1, mode), size),
        "EnvPool of sail-sg, recv of all": (SailEnvPool(workers, size, 1), size),
        "EnvPool of sail-sg, recv of half": (SailEnvPool(workers, size, 2), size),
    }


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time used so far by `pid` and its descendants, while they live."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    total = (int(fields[11]) + int(fields[12])) / TICKS
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
            total += sum(cpu_seconds(int(child)) for child in file.read().split())
    return total


def measure(runners: dict[str, tuple[Any, int]], seconds: float, turns: int) -> None:
    """Runs each runner for `turns` turns of about `seconds`, prints its row and closes it."""
    rates: dict[str, list[float]] = {name: [] for name in runners}
    used = dict.fromkeys(runners, 0.0)
    counts = {}
    for name, (runner, _) in runners.items():
        begin = time.perf_counter()
        runner.run(3)
        counts[name] = max(1, int(seconds * 3 / (time.perf_counter() - begin)))
    for _ in range(turns):
        for name, (runner, size) in runners.items():
            cpu, begin = cpu_seconds(os.getpid()), time.perf_counter()
            runner.run(counts[name])
            steps = counts[name] * size
            rates[name].append(steps / (time.perf_counter() - begin))
            used[name] += cpu_seconds(os.getpid()) - cpu
    for name, (_, size) in runners.items():
        # Over all turns: the kernel counts in hundredths of a second.
        cost = used[name] / (turns * counts[name] * size)
        print(
            f"  {name:32} {statistics.median(rates[name]):>10,.0f} {max(rates[name]):>10,.0f}"
            f" {cost * 1e6:>8.2f}"
        )
    for runner, _ in runners.values():
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--native-rows", type=int, default=4096, help="of a vector environment")
    options = parser.parse_args()
    workers, size = options.workers, options.batch_size
    print(f"{len(os.sched_getaffinity(0))} cores, {workers} workers, {size} environments")
    for title, make in ENVIRONMENTS.items():
        print(f"\n{title:34} {'steps/s':>10} {'best':>10} {'µs CPU':>8}")
        runners: dict[str, tuple[Any, int]] = {
            "in one process, no pool": (InProcess(make, size), size),
            "EnvPool, one batch": (PoolRunner(make, workers, size, 1), size),
            "EnvPool, two half batches": (PoolRunner(make, workers, size, 2), size),
            **vector_runners(make, workers, size),
            "bare loop, two half batches": (BareLoop(make, workers, size, 2), size),
            f"gymnasium Async, {workers} processes": (GymnasiumAsync(make, workers), workers),
        }
        if importlib.util.find_spec("stable_baselines3") is not None:
            title = f"SB3 Subproc, {workers} processes"
            runners[title] = (StableBaselines3(make, workers), workers)
        measure(runners, options.seconds, options.turns)
        if importlib.util.find_spec("pufferlib") is not None:
            # After the others, because its workers take the processors in others' turns too.
            runners = {"PufferLib, half batches": (PufferLib(make, workers, size), size)}
            measure(runners, options.seconds, options.turns)
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        return
    print(f"\n{f'CartPoleVectorEnv, {options.native_rows} rows':34} {'steps/s':>10}")
    measure(native_runners(workers, options.native_rows), options.seconds, options.turns)
    if importlib.util.find_spec("envpool") is not None:
        print(f"\n{'CartPole-v1':34} {'steps/s':>10}")
        measure(cart_pole_runners(workers, size), options.seconds, options.turns)


if __name__ == "__main__":
    main()
