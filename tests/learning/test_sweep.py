"""The search for hyperparameters, with tiny trials."""

import json
import re

import optuna
from optuna.trial import TrialState

from tests.learning.processes import run


def trials_of(storage, env_id):
    study = optuna.load_study(study_name=env_id, storage=storage)
    return study, study.get_trials()


def test_trials_run_at_once_and_the_best_is_named(tmp_path):
    storage, env_id = f"sqlite:///{tmp_path}/sweep.db", "moolink/Catch-v0"
    status, output = run(
        *["-m", "examples.sweep", "--learner", "examples.torch.ppo", "--env-id", env_id],
        *["--trials", "3", "--at-once", "2", "--save-dir", str(tmp_path), "--storage", storage],
        *["--total-steps", "6000"],  # for the learner
    )
    assert status == 0, output
    study, trials = trials_of(storage, env_id)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 3
    # The second was begun before the first had ended.
    assert trials[1].datetime_start < trials[0].datetime_complete
    for trial in trials:
        result = json.loads((tmp_path / f"trial-{trial.number}" / "result.json").read_text())
        assert result["mean_return"] == trial.value
        assert result["steps"] >= 6000
        assert result["options"]["learning_rate"] == trial.params["learning_rate"]
        assert result["options"]["group"] == f"trial-{trial.number}"
    assert re.search(rf"best: {study.best_value:.2f} with", output)


def test_failed_trials_are_told_as_such(tmp_path):
    storage = f"sqlite:///{tmp_path}/sweep.db"
    status, output = run(
        *["-m", "examples.sweep", "--env-id", "NoSuch-v0", "--trials", "2", "--at-once", "2"],
        *["--save-dir", str(tmp_path), "--storage", storage],
    )
    assert status == 1, output
    _, trials = trials_of(storage, "NoSuch-v0")
    assert [trial.state for trial in trials] == [TrialState.FAIL] * 2
    assert "trial 0 failed: the job ended with status" in output
    assert "NoSuch" in (tmp_path / "trial-0" / "output.txt").read_text()
    assert "error: no trial has a result" in output
