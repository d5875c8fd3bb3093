"""N-step transitions, compared with a plain computation from whole episodes."""

from __future__ import annotations

import itertools
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
        client = ReplayClient(actor, server="replay")
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


REWARDS = [1.0, 10.0, 100.0, 1000.0, 10000.0]


def fails_at(call: int, error: BaseException) -> Any:
    """A priority that raises the error once."""
    calls = itertools.count()

    def priority(*_: Any) -> float:
        if next(calls) == call:
            raise error
        return 1.0

    return priority


@pytest.mark.parametrize("error", [RuntimeError("no value"), KeyboardInterrupt()])
def test_an_episode_in_which_a_step_failed_does_not_go_on(error: BaseException) -> None:
    with (
        moolink.Replay(Table("t", 100, Fifo(), max_times_sampled=1)) as replay,
        NStepWriter(replay, 2, 1.0, priority=fails_at(0, error)) as writer,
    ):
        for reward in REWARDS[:2]:
            writer.append(reward, 0, reward)
        with pytest.raises(type(error)):
            writer.append(100.0, 0, 100.0)
        for reward in REWARDS[2:]:
            with pytest.raises(ValueError, match=r"terminate\(\) or truncate\(\)"):
                writer.append(reward, 0, reward)
        writer.truncate(0.0)
        assert replay.stats()["tables"]["t"]["size"] == 0
        for reward in REWARDS:
            writer.append(reward, 0, reward)
        writer.terminate()
        data = replay.sample(5, timeout=0).data
        assert data["reward"].tolist() == [11, 110, 1100, 11000, 10000]
        assert data["observation"].tolist() == REWARDS


def test_a_first_step_that_failed_is_given_up() -> None:
    with moolink.Replay(Table("t", 100)) as replay, NStepWriter(replay, 2, 1.0) as writer:
        with pytest.raises(TypeError, match="only arrays"):
            writer.append("text", 0, 1.0)
        with pytest.raises(ValueError, match="a step of this episode failed"):
            writer.append(0.0, 0, 1.0)
        writer.terminate()
        writer.append(0.0, 0, 1.0)
        writer.terminate()
        assert replay.stats()["tables"]["t"]["size"] == 1


def test_an_end_that_failed_has_ended_the_episode() -> None:
    with moolink.Replay(Table("t", 100, Fifo(), max_times_sampled=1)) as replay:
        for bad in (float("nan"), -1.0):
            given = iter([bad, *[1.0] * 9])
            with NStepWriter(replay, 2, 1.0, priority=lambda *_, it=given: next(it)) as writer:
                writer.append(1.0, 0, 1.0)
                with pytest.raises(ValueError, match="finite"):
                    writer.terminate()
                for reward in REWARDS[1:3]:
                    writer.append(reward, 0, reward)
                writer.terminate()
            assert replay.sample(2, timeout=0).data["reward"].tolist() == [110, 100]
