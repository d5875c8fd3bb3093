"""``moolib.examples.common``: what moolib's examples share."""

from __future__ import annotations

import collections
import json
import types
from pathlib import Path
from typing import Any

import moolib
import pytest
import torch
from moolib.examples import common
from moolib.examples.common import nest, record, vtrace

from tests.waiting import until

Pair = collections.namedtuple("Pair", "left right")


def test_nests() -> None:
    n = {"a": [1, (2, 3)], "b": Pair(4, 5)}
    assert nest.map(lambda x: 2 * x, n) == {"a": [2, (4, 6)], "b": Pair(8, 10)}
    assert list(nest.flatten(n)) == [1, 2, 3, 4, 5]
    assert nest.map_many(sum, n, n) == nest.map(lambda x: 2 * x, n)
    assert nest.zip([1, {"x": 2}], [3, {"x": 4}]) == [[1, 3], {"x": [2, 4]}]


def test_statistics() -> None:
    mean, total = common.StatMean(), common.StatSum()
    assert mean.result() is None
    for number in (1, 2, 6):
        mean += number
        total += number
    assert (mean.result(), total.result()) == (3, 9)
    assert repr(mean) == "3.0"
    mean += common.StatMean(7, 1)
    total += common.StatSum(1)
    assert mean == common.StatMean(16, 4)
    assert mean - common.StatMean(6, 2) == common.StatMean(10, 2)
    assert total - common.StatSum(4) == common.StatSum(6)
    mean.reset()
    total.reset()
    assert mean == common.StatMean()
    assert total == common.StatSum(10)


def test_statistics_of_all_peers() -> None:
    with (
        moolib.Broker(first=True) as broker,
        moolib.Rpc("a", timeout=20) as a,
        moolib.Rpc("b", timeout=20) as b,
        moolib.Group(a, "group") as group_a,
        moolib.Group(b, "group") as group_b,
    ):
        address = broker.listen("127.0.0.1:0")[0]
        for rpc in (a, b):
            rpc.connect(address)
        groups = (group_a, group_b)

        def both() -> bool:
            for group in groups:
                group.update()
            return all(len(group.members()) == 2 for group in groups)

        until(both, "the group")
        everywhere = [{"steps": common.StatSum(), "score": common.StatMean()} for _ in groups]
        accumulators = [
            common.GlobalStatsAccumulator(group, stats)
            for group, stats in zip(groups, everywhere, strict=True)
        ]
        own = [{"steps": common.StatSum(), "score": common.StatMean()} for _ in groups]

        def rounds(steps: int) -> None:
            for i, (accumulator, stats) in enumerate(zip(accumulators, own, strict=True)):
                stats["steps"] += steps
                stats["score"] += i
                accumulator.reduce(stats)
            for accumulator in accumulators:
                assert accumulator.reduce_future is not None
                accumulator.reduce_future.wait()

        for steps in (1, 10, 100):
            rounds(steps)
        # The result of a round is taken in by the call after it.
        for stats in everywhere:
            assert stats["steps"].result() == 22
            assert stats["score"].result() == 0.5
        accumulators[0].reset()
        assert accumulators[0].prev_stats is not None
        assert accumulators[0].prev_stats["score"].n == 0


def test_a_reduction_that_fails_is_sent_again() -> None:
    class Future:
        """A reduction that the test ends."""

        def __init__(self, error: Exception | None, result: Any) -> None:
            self._error, self._result = error, result

        def done(self) -> bool:
            return True

        def exception(self) -> Exception | None:
            return self._error

        def result(self) -> Any:
            return self._result

    class Group:
        """A group of one, whose first reduction fails."""

        sent: list[Any] = []

        def all_reduce(self, name: str, data: Any, op: Any) -> Future:
            self.sent.append(data["n"].value)
            return Future(RuntimeError("lost") if len(self.sent) == 1 else None, data)

    group: Any = Group()
    everywhere = {"n": common.StatSum()}
    accumulator = common.GlobalStatsAccumulator(group, everywhere)
    stats = {"n": common.StatSum()}
    for _ in range(3):
        stats["n"] += 1
        accumulator.reduce(stats)
    assert group.sent == [1, 2, 1]
    assert everywhere["n"].value == 2


def test_running_mean_and_deviation() -> None:
    rows = torch.randn(3, 50, 2, dtype=torch.float64) * 3 + 7
    running = common.RunningMeanStd(epsilon=0, shape=(2,))
    for part in rows:
        running.update(part)
    everything = rows.flatten(0, 1)
    torch.testing.assert_close(running.mean, everything.mean(0))
    torch.testing.assert_close(running.var, everything.var(0, unbiased=False))
    assert running.count == 150


def test_the_state_of_a_batch_of_environments() -> None:
    flags = types.SimpleNamespace(
        actor_batch_size=2, device="cpu", discounting=0.5, unroll_length=3
    )
    model = types.SimpleNamespace(initial_state=lambda batch_size: (torch.zeros(batch_size, 4),))
    state = common.EnvBatchState(flags, model)
    assert state.prev_action.tolist() == [0, 0]
    assert state.core_state[0].shape == (2, 4)
    assert state.future is None
    stats = {
        name: common.StatMean()
        for name in ("mean_episode_return", "mean_episode_step", "running_reward", "running_step")
    } | {"steps_done": common.StatSum(), "episodes_done": common.StatSum()}
    action = torch.tensor([1, 0])
    for done in ([False, False], [True, False]):
        outputs = {"reward": torch.tensor([1.0, 2.0]), "done": torch.tensor(done)}
        state.update(outputs, action, stats)
    assert state.prev_action is action
    assert stats["mean_episode_return"].result() == 2
    assert stats["mean_episode_step"].result() == 2
    assert (stats["steps_done"].result(), stats["episodes_done"].result()) == (4, 1)
    assert state.running_reward.tolist() == [0, 4]
    assert state.weighted_returns.tolist() == [0, 3]
    assert state.step_count.tolist() == [0, 2]
    for i in range(4):
        state.time_batcher.stack(torch.tensor(i))
    assert state.time_batcher.get().tolist() == [0, 1, 2, 3]


def reference(rhos: Any, discounts: Any, rewards: Any, values: Any, last: Any) -> list[float]:
    """Targets by the sum of the definition, for one unroll and thresholds of 1."""
    length = len(rewards)
    following = [*values[1:], last]
    clipped = [min(1.0, rho) for rho in rhos]
    targets = []
    for s in range(length):
        target, product = values[s], 1.0
        for t in range(s, length):
            delta = rewards[t] + discounts[t] * following[t] - values[t]
            target += product * clipped[t] * delta
            product *= discounts[t] * clipped[t]
        targets.append(target)
    return targets


def test_vtrace() -> None:
    length, unrolls, actions = 5, 3, 4
    torch.manual_seed(0)
    logits = torch.randn(2, length, unrolls, actions, dtype=torch.float64)
    taken = torch.randint(actions, (length, unrolls))
    discounts = torch.rand(length, unrolls, dtype=torch.float64)
    rewards, values = torch.randn(2, length, unrolls, dtype=torch.float64)
    values.requires_grad_()
    last = torch.randn(unrolls, dtype=torch.float64)
    found = vtrace.from_logits(logits[0], logits[1], taken, discounts, rewards, values, last)
    picked = logits.log_softmax(-1).gather(-1, taken.expand(2, -1, -1).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.behavior_action_log_probs, picked[0])
    torch.testing.assert_close(found.target_action_log_probs, picked[1])
    torch.testing.assert_close(found.log_rhos, picked[1] - picked[0])
    rhos = found.log_rhos.exp()
    for b in range(unrolls):
        columns = [x[:, b].tolist() for x in (rhos, discounts, rewards, values)]
        expected = reference(*columns, float(last[b]))
        assert found.vs[:, b].tolist() == pytest.approx(expected)
    following = torch.cat([found.vs[1:], last[None]])
    advantages = rhos.clamp(max=1) * (rewards + discounts * following - values)
    torch.testing.assert_close(found.pg_advantages, advantages.detach())
    assert not found.vs.requires_grad
    free = vtrace.from_importance_weights(
        found.log_rhos, discounts, rewards, values, last, None, clip_pg_rho_threshold=None
    )
    assert not torch.equal(free.vs, found.vs)


def test_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record.log_to_file(step=1, loss=0.5)
    record.log_to_file(step=2, loss=0.25)
    assert (tmp_path / "logs.tsv").read_text().split() == ["step", "loss", "1", "0.5", "2", "0.25"]
    assert record.symlink_path("logs.tsv", tmp_path / "latest")
    assert record.symlink_path("other", tmp_path / "latest")
    assert (tmp_path / "latest").readlink() == Path("other")
    (tmp_path / "file").touch()
    assert not record.symlink_path("logs.tsv", tmp_path / "file")
    record.write_metadata(tmp_path, tmp_path, flags={"lr": 1})
    described = json.loads((tmp_path / "meta.json").read_text())
    assert described["flags"] == {"lr": 1}
    assert {"env", "date_start"} <= described.keys()
    record.write_metadata(None, tmp_path)


def test_the_revision_of_a_run(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    if record._revision(root) is None:
        pytest.skip("these sources are in no git repository")
    record.write_metadata(tmp_path, root)
    described = json.loads((tmp_path / "meta.json").read_text())
    assert len(described["git"]["commit"]) == 40
    assert type(described["git"]["is_dirty"]) is bool
