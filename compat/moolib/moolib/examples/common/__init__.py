"""What moolib's examples share: statistics of a run, local and over all peers."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch

import moolib

Stats = dict[str, Any]  # of StatMean and StatSum


@dataclasses.dataclass
class StatMean:
    """A mean of the numbers that were added with ``+=`` since the last reset."""

    value: float = 0
    n: int = 0

    def result(self) -> float | None:
        """The mean, or None of nothing."""
        return self.value / self.n if self.n else None

    def __sub__(self, other: StatMean) -> StatMean:
        return StatMean(self.value - other.value, self.n - other.n)

    def __iadd__(self, other: StatMean | float) -> StatMean:
        if isinstance(other, StatMean):
            self.value += other.value
            self.n += other.n
        else:
            self.value += other
            self.n += 1
        return self

    def reset(self) -> None:
        """Forgets all numbers."""
        self.value, self.n = 0, 0

    def __repr__(self) -> str:
        return repr(self.result())


@dataclasses.dataclass
class StatSum:
    """A sum of the numbers that were added with ``+=``; it survives resets."""

    value: float = 0

    def result(self) -> float:
        """The sum."""
        return self.value

    def __sub__(self, other: StatSum) -> StatSum:
        return StatSum(self.value - other.value)

    def __iadd__(self, other: StatSum | float) -> StatSum:
        self.value += other.value if isinstance(other, StatSum) else other
        return self

    def reset(self) -> None:
        """Does nothing: a sum goes on."""

    def __repr__(self) -> str:
        return repr(self.value)


class GlobalStatsAccumulator:
    """Adds what each peer's statistics have grown by to statistics of all peers.

    Args:
        rpc_group: the group of the peers.
        global_stats: the statistics of all peers; they are changed in place.
    """

    def __init__(self, rpc_group: moolib.Group, global_stats: Stats) -> None:
        self.rpc_group = rpc_group
        self.global_stats = global_stats
        self.reduce_future: moolib.AllReduce | None = None
        self.queued_global_stats: Stats | None = None  # what has not been sent
        self.sent_global_stats: Stats | None = None
        self.prev_stats: Stats | None = None

    def add_stats(self, dst: Stats, src: Stats) -> Stats:
        """Adds ``src`` to ``dst`` and returns that."""
        for key, stat in dst.items():
            stat += src[key]
        return dst

    def enqueue_global_stats(self, stats: Stats) -> None:
        """Adds to what the next reduction sends."""
        if self.queued_global_stats is None:
            self.queued_global_stats = copy.deepcopy(stats)
        else:
            self.add_stats(self.queued_global_stats, stats)

    def reduce(self, stats: Stats) -> None:
        """Takes in the result of the last reduction if there is one, and begins the next if none
        is under way. One that failed is sent again with the next."""
        self._take_result()
        before = self.prev_stats
        grown = stats if before is None else {k: stat - before[k] for k, stat in stats.items()}
        self.enqueue_global_stats(grown)
        self.prev_stats = copy.deepcopy(stats)
        if self.reduce_future is None:
            self.sent_global_stats, self.queued_global_stats = self.queued_global_stats, None
            # A copy: the reduction adds to what it is given.
            self.reduce_future = self.rpc_group.all_reduce(
                "global stats", copy.deepcopy(self.sent_global_stats), self.add_stats
            )

    def _take_result(self) -> None:
        future = self.reduce_future
        if future is None or not future.done():
            return
        self.reduce_future = None
        error = future.exception()
        if error is None:
            self.add_stats(self.global_stats, future.result())
            return
        logging.info("the statistics of all peers were not reduced: %s", error)
        assert self.sent_global_stats is not None
        self.enqueue_global_stats(self.sent_global_stats)

    def reset(self) -> None:
        """Tells that the peer's statistics are reset."""
        for stat in (self.prev_stats or {}).values():
            stat.reset()


class RunningMeanStd:
    """Mean and variance of all rows seen (Chan et al.'s update of moments)."""

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] = ()) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.var = torch.ones(shape, dtype=torch.float64)
        self.count = epsilon

    def update(self, x: torch.Tensor) -> None:
        """Takes in the rows of a tensor."""
        self.update_from_moments(x.mean(0), x.var(0, unbiased=False), len(x))

    def update_from_moments(
        self, batch_mean: torch.Tensor, batch_var: torch.Tensor, batch_count: int
    ) -> None:
        """Takes in rows of which the moments are known."""
        count = self.count + batch_count
        delta = batch_mean - self.mean
        between = delta.square() * (self.count * batch_count / count)
        self.mean = self.mean + delta * (batch_count / count)
        self.var = (self.var * self.count + batch_var * batch_count + between) / count
        self.count = count


class EnvBatchState:
    """What an actor knows of one batch of environments between two steps.

    Args:
        flags: ``actor_batch_size``, ``device``, ``discounting`` and ``unroll_length``.
        model: has ``initial_state(batch_size)``.
    """

    def __init__(self, flags: Any, model: Any) -> None:
        self.batch_size = flags.actor_batch_size
        self.prev_action = torch.zeros(self.batch_size, dtype=torch.int64, device=flags.device)
        self.future: moolib.EnvStepperFuture | None = None
        state = model.initial_state(batch_size=self.batch_size)
        self.core_state = tuple(part.to(flags.device) for part in state)
        self.initial_core_state = self.core_state
        self.running_reward = torch.zeros(self.batch_size)
        self.step_count = torch.zeros(self.batch_size)
        self.discounting = flags.discounting
        self.weighted_returns = torch.zeros(self.batch_size)
        self.weighted_returns_rms = RunningMeanStd()
        self.time_batcher = moolib.Batcher(flags.unroll_length + 1, flags.device)

    def update(self, env_outputs: dict[str, Any], action: torch.Tensor, stats: Stats) -> None:
        """Takes in the outputs of a step and the action that follows; adds to the statistics."""
        reward, done = env_outputs["reward"], env_outputs["done"]
        self.prev_action = action
        self.running_reward += reward
        self.step_count += 1
        self.weighted_returns = self.weighted_returns * self.discounting + reward
        self.weighted_returns_rms.update(self.weighted_returns)
        self.scaled_reward = reward / torch.sqrt(self.weighted_returns_rms.var + 1e-8)
        ended = int(done.sum())
        if ended:
            stats["mean_episode_return"] += float(self.running_reward[done].sum()) / ended
            stats["mean_episode_step"] += float(self.step_count[done].sum()) / ended
        stats["steps_done"] += done.numel()
        stats["episodes_done"] += ended
        stats["running_reward"] += float(self.running_reward.mean())
        stats["running_step"] += float(self.step_count.mean())
        for running in (self.running_reward, self.step_count, self.weighted_returns):
            running *= ~done
