"""Evaluations: independent episodes, their statistics, and the files for other programs."""

import json

import numpy as np
import pytest

from examples.common import checkpoint, statistics
from examples.common.evaluation import Evaluation, evaluated
from examples.common.options import ImpalaOptions, defaults


def evaluation_of(tmp_path, env_id, episodes=100, **given):
    """Options of an evaluation, and a checkpoint for it."""
    o = defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1)
    o.save_dir, o.episodes, o.mode, o.env_threads = tmp_path, episodes, "evaluate", 1
    for name, value in given.items():
        setattr(o, name, value)
    saved = {"options": o.as_dict(), "totals": {"steps": 50}, "state": {"normalizer": {}}}
    checkpoint.save(tmp_path, saved)
    return o


def play(evaluation):
    """Plays with one action after the other, which is a deterministic policy."""
    number = 0
    while not evaluation.is_over():
        action = np.full((evaluation.envs.num_envs, 1), number % evaluation.envs.actions.choices[0])
        evaluation.step(action)
        number += 1


def test_episodes_of_a_game_are_distinct(tmp_path, monkeypatch):
    """With sticky actions. Without them, a deterministic policy can only play as many games as
    there are numbers of no-ops."""
    monkeypatch.setattr("examples.common.evaluation.MAX_ENVS", 8)  # a game takes long to begin
    distinct = []
    for episodes, rules in (
        (100, {}),
        (16, {"repeat_action_probability": 0.0, "no_op_max": 1}),
    ):
        o = evaluation_of(tmp_path, "ALE/Breakout-v5", episodes, max_frames=120, **rules)
        evaluation = Evaluation(o)
        play(evaluation)
        evaluation.envs.close()
        assert len(evaluation.returns) == len(evaluation.lengths) == episodes
        distinct.append(len(set(evaluation.digests)))
    assert distinct[0] >= 95
    assert distinct[1] <= 2


def test_an_evaluation_is_repeated_by_its_seed(tmp_path):
    digests = []
    for seed in (0, 0, 1):
        evaluation = Evaluation(evaluation_of(tmp_path, "CartPole-v1", episodes=12, seed=seed))
        play(evaluation)
        evaluation.envs.close()
        digests.append(evaluation.digests)
        assert len(set(evaluation.digests)) == 12
        assert evaluation.returns == evaluation.lengths  # each step is worth 1
    assert digests[0] == digests[1]
    assert not set(digests[1]) & set(digests[2])


def test_the_result_is_said_and_written(tmp_path, capsys):
    o = evaluation_of(tmp_path, "CartPole-v1", episodes=10, result_json=tmp_path / "result.json")
    with evaluated(o) as evaluation:
        play(evaluation)
    said = capsys.readouterr().out
    assert "CartPole-v1 after 50 steps: mean return" in said
    assert "likeliest actions, seed 0, 10 of 10 episodes are distinct" in said
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["number"] == len(result["returns"]) == len(result["lengths"]) == 10
    assert result["mean"] == pytest.approx(np.mean(result["returns"]))
    assert result["environment"] == {"id": "CartPole-v1", "max_episode_steps": 500}
    assert (result["actions"], result["distinct"], result["steps"]) == ("likeliest", 10, 50)
    # As rliable takes it: algorithms' matrices of runs and games.
    matrices = json.loads((tmp_path / "evaluation_rliable.json").read_text())
    assert matrices == {o.learner: [[result["mean"]]]}
    tree = json.loads((tmp_path / "evaluation_marl_eval.json").read_text())
    run = tree["Gymnasium"]["CartPole-v1"][o.learner]["seed_0"]
    assert run == {
        "step_0": {"step_count": 50, "return": result["returns"]},
        "absolute_metrics": {"return": result["returns"]},
    }


def test_scores_of_atari_are_also_relative_to_a_humans(tmp_path):
    o = evaluation_of(tmp_path, "ALE/Pong-v5", episodes=2, max_frames=200)
    with evaluated(o) as evaluation:
        play(evaluation)
    result = json.loads((tmp_path / "evaluation.json").read_text())
    expected = (result["mean"] + 20.7) / (14.6 + 20.7)
    assert result["human_normalized"]["mean"] == pytest.approx(expected)
    assert result["environment"]["repeat_action_probability"] == 0.25
    assert result["actions"] == "sampled"
    matrices = json.loads((tmp_path / "evaluation_rliable.json").read_text())
    assert matrices[o.learner][0][0] == pytest.approx(expected)


def test_human_normalized_scores():
    assert statistics.human_normalized("breakout", [1.7, 30.5]).tolist() == [0, 1]
    assert statistics.human_normalized("adventure", [1.0]) is None
    assert len(statistics.RANDOM_AND_HUMAN) == 57
    roms = pytest.importorskip("ale_py.roms").get_all_rom_ids()
    assert statistics.RANDOM_AND_HUMAN.keys() <= set(roms)


def test_the_interquartile_mean_is_scipys_trimmed_mean():
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    for shape in ((1, 1), (5, 1), (100, 1), (3, 7)):
        scores = random.normal(size=shape)
        expected = stats.trim_mean(scores, 0.25, axis=None)
        assert statistics.iqm(scores) == pytest.approx(expected)
        assert statistics.summary(scores)["iqm"] == pytest.approx(expected)
    scores = random.normal(size=(100, 1))
    theirs = stats.bootstrap(
        (scores[:, 0],),
        lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
        method="percentile",
        n_resamples=5000,
        rng=random,
    ).confidence_interval
    assert statistics.interval(scores, statistics.iqm) == pytest.approx(list(theirs), abs=0.02)


def test_a_bootstrap_draws_the_runs_of_each_game_apart():
    """Games whose runs are equal have no deviation, however different the games are."""
    scores = np.array([[1.0, 10.0, 100.0]] * 4)
    found = statistics.summary(scores)
    assert found["interval_95"] == {"mean": [37, 37], "median": [10, 10], "iqm": [23.5, 23.5]}


def test_an_interval_holds_the_mean_as_often_as_it_says():
    random = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        least, most = statistics.interval(random.normal(size=(40, 1)), statistics.mean)
        held += least <= 0 <= most
    assert 88 <= held <= 100


def test_runs_for_marl_eval_are_by_environment_and_task():
    runs = {"ALE/Pong-v5": {"a": {3: [(10, [1.0]), (20, [2.0, 4.0])]}}, "minigrid:X-v0": {"a": {}}}
    assert statistics.for_marl_eval(runs) == {
        "ALE": {
            "Pong-v5": {
                "a": {
                    "seed_3": {
                        "step_0": {"step_count": 10, "return": [1.0]},
                        "step_1": {"step_count": 20, "return": [2.0, 4.0]},
                        "absolute_metrics": {"return": [2.0, 4.0]},
                    }
                }
            }
        },
        "Gymnasium": {"X-v0": {"a": {}}},
    }
