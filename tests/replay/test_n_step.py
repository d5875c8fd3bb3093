"""N-step transitions, compared with a plain computation from whole episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.replay import Fifo, NStepWriter, ReplayClient, ReplayServer, Table

DISCOUNT = 0.9


@dataclass
class Episode:
    """T steps, and the observation after the last one if a limit has truncated the episode."""

    observations: list[float]
    actions: list[int]
    rewards: list[float]
    last: float | None

    def transitions(self, n: int) -> list[tuple[Any, ...]]:
        """By definition: step t, return, discount, and the next observation unless terminated."""
        result: list[tuple[Any, ...]] = []
        end = len(self.rewards)
        follows = [*self.observations, self.last]
        for t in range(end):
            to = min(t + n, end)
            total = math.fsum(DISCOUNT**k * r for k, r in enumerate(self.rewards[t:to]))
            terminated = to == end and self.last is None
            discount = 0.0 if terminated else DISCOUNT ** (to - t)
            after = None if terminated else follows[to]
            result.append((self.observations[t], self.actions[t], total, discount, after))
        return result


def episodes(random: np.random.Generator, count: int) -> list[Episode]:
    made = []
    for _ in range(count):
        steps = int(random.integers(1, 9))
        last = float(random.normal()) if random.random() < 0.5 else None
        observations, rewards = random.normal(size=(2, steps)).tolist()
        made.append(Episode(observations, random.integers(5, size=steps).tolist(), rewards, last))
    return made


def play(writer: NStepWriter, episode: Episode) -> None:
    for observation, action, reward in zip(
        episode.observations, episode.actions, episode.rewards, strict=True
    ):
        writer.append({"x": np.float64(observation)}, action, reward, note=observation)
    if episode.last is None:
        writer.terminate()
    else:
        writer.truncate({"x": np.float64(episode.last)}, note=episode.last)


def check(data: Any, expected: list[tuple[Any, ...]]) -> None:
    observation, next_observation = data["observation"]["x"], data["next_observation"]["x"]
    assert len(observation) == len(expected)
    assert data["reward"].dtype == data["discount"].dtype == np.float32
    for i, (x_t, action_t, total, discount, after) in enumerate(expected):
        assert (observation[i], data["action"][i]) == (x_t, action_t)
        assert data["reward"][i] == pytest.approx(total, abs=1e-5)
        assert data["discount"][i] == pytest.approx(discount, rel=1e-6)
        assert math.isfinite(next_observation[i])
        if after is not None:
            assert next_observation[i] == after


@pytest.mark.parametrize("n", [1, 3, 5])
def test_random_episodes_with_terminations_and_truncations(n: int) -> None:
    played = episodes(np.random.default_rng(n), 60)
    expected = [transition for episode in played for transition in episode.transitions(n)]
    with moolink.Replay(Table("t", 1000, Fifo(), max_times_sampled=1)) as replay:
        with NStepWriter(replay, n, DISCOUNT) as writer:
            for episode in played:
                play(writer, episode)
        check(replay.sample(len(expected), timeout=0).data, expected)
        assert replay.stats()["tables"]["t"]["size"] == 0


def test_priorities_by_notes_and_over_a_network() -> None:
    played = episodes(np.random.default_rng(7), 20)
    expected = [transition for episode in played for transition in episode.transitions(3)]

    def error(value: float, reward: float, discount: float, next_value: float) -> float:
        return abs(reward + discount * next_value - value)

    with (
        moolink.Rpc("replay") as rpc,
        moolink.Rpc("actor") as actor,
        moolink.Replay([Table("t", 1000, Fifo(), max_times_sampled=1), Table("u", 1)]) as replay,
        ReplayServer(rpc, replay),
    ):
        actor.connect(rpc.listen("127.0.0.1:0")[0])
        client = ReplayClient(actor, "replay")
        with NStepWriter(client, 3, DISCOUNT, table="t", priority=error) as writer:
            for episode in played:
                play(writer, episode)
        batch = replay.sample(len(expected), table="t", timeout=0)
        check(batch.data, expected)
        for priority, (x_t, _, total, discount, after) in zip(
            batch.priorities, expected, strict=True
        ):
            assert priority == pytest.approx(error(x_t, total, discount, after or 0.0))


def test_an_episode_without_steps_has_no_transitions() -> None:
    with moolink.Replay(Table("t", 10)) as replay, NStepWriter(replay, 2, 1.0) as writer:
        writer.terminate()
        writer.truncate(1.0)
        writer.append(0.0, 0, 1.0)
        writer.terminate()
        writer.terminate()
        assert replay.stats()["tables"]["t"]["size"] == 1


def test_what_is_out_of_range_is_named() -> None:
    with moolink.Replay(Table("t", 10)) as replay:
        with pytest.raises(ValueError, match="n must be at least 1, got 0"):
            NStepWriter(replay, 0, 0.9)
        with pytest.raises(ValueError, match=r"discount must be from 0 to 1, got 1\.5"):
            NStepWriter(replay, 1, 1.5)
