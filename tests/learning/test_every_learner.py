"""Every learner in environments of every kind, through the real path: trained by two peers, gone on
with from the checkpoint, and evaluated."""

import json
import re

import numpy as np
import pytest

from examples.common import checkpoint
from tests.learning.processes import run

COUNTDOWN = "tests.learning.stubs:Countdown"
SMALL = ["--hidden-size", "16", "--log-interval", "0.5"]
JOBS = {
    "torch.ppo": ["--env-id", "CartPole-v1", "--normalize-reward"],
    "jax.ppo": ["--env-id", "Pendulum-v1", "--lstm", "--normalize"],
    "torch.impala": ["--env-id", COUNTDOWN, "--lstm", "--normalize"],
    "jax.impala": ["--env-id", "examples.common.tasks:Meet"],
}


@pytest.mark.parametrize("learner", JOBS)
def test_trains_goes_on_and_is_evaluated(tmp_path, learner):
    pytest.importorskip(learner.partition(".")[0])
    arguments = [*JOBS[learner], *SMALL, "--save-dir", str(tmp_path)]
    result = tmp_path / "result.json"
    for steps in (4000, 8000):
        command = ["-m", "moolink", "run", "-n", "2", "-m", f"examples.{learner}", *arguments]
        status, output = run(*command, "--total-steps", str(steps), "--result-json", str(result))
        assert status == 0, output
        ends = re.findall(r"model (\w{16}) at update (\d+)", output)
        assert len(ends) == 2, output
        assert len(set(ends)) == 1, output
    assert re.search(r"resumed from .* at step 4,", output)
    saved = checkpoint.load(tmp_path)
    assert saved["totals"]["steps"] >= 8000
    assert saved["model_version"] == int(ends[0][1])
    assert json.loads(result.read_text())["mean_return"] is not None
    for count, total, squares in saved["state"]["normalizer"].values():
        assert np.min(count) > 0
        assert np.isfinite(total).all()
        assert (np.asarray(squares) >= 0).all()
    command = ["-m", f"examples.{learner}", *arguments, "--mode", "evaluate", "--episodes", "5"]
    status, output = run(*command)
    assert status == 0, output
    assert re.search(r"after 8,\d+ steps: mean return -?[\d.]+ of 5 episodes", output)


@pytest.mark.parametrize("learner", ["torch.ppo", "jax.ppo"])
def test_a_damaged_checkpoint_or_one_of_another_network_is_refused(tmp_path, learner):
    pytest.importorskip(learner.partition(".")[0])
    command = ["-m", f"examples.{learner}", "--env-id", "CartPole-v1", *SMALL]
    command += ["--save-dir", str(tmp_path)]
    status, output = run(*command, "--total-steps", "1000")
    assert status == 0, output
    saved = checkpoint.load(tmp_path)
    command += ["--mode", "evaluate", "--episodes", "5"]
    name, array = next((k, v) for k, v in saved["parameters"].items() if v.ndim == 2)
    parameters = saved["parameters"] | {name: np.zeros((3, *array.shape), np.float32)}
    checkpoint.save(tmp_path, saved | {"parameters": parameters})
    other = f"is of another network or environment: {name} is (3, "
    for error in (other, f"{checkpoint.PREVIOUS} is damaged: the checksum of its "):
        status, output = run(*command)
        assert status == 2, output
        assert error in output
        assert "Traceback" not in output
        for file in (checkpoint.NAME, checkpoint.PREVIOUS):
            data = bytearray((tmp_path / file).read_bytes())
            data[len(data) // 2] ^= 1
            (tmp_path / file).write_bytes(data)


@pytest.mark.parametrize("learner", ["torch.impala", "jax.ppo"])
def test_learns_in_a_vector_environment_of_another_library(tmp_path, learner):
    pytest.importorskip(learner.partition(".")[0])
    arguments = ["--env-id", "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"]
    arguments += ["--save-dir", str(tmp_path), "--learning-rate", "3e-3", "--num-envs", "16"]
    status, output = run("-m", f"examples.{learner}", *arguments, "--total-steps", "40000")
    assert status == 0, output
    status, output = run(
        "-m", f"examples.{learner}", *arguments, "--mode", "evaluate", "--episodes", "16"
    )
    assert status == 0, output
    found = re.search(r"mean return ([\d.]+) of 16 episodes", output)
    assert found, output
    assert float(found[1]) > 100  # random play: 22


@pytest.mark.parametrize("learner", ["torch.impala", "jax.ppo"])
def test_parameters_that_are_not_finite_end_the_job_with_advice(tmp_path, learner):
    pytest.importorskip(learner.partition(".")[0])
    arguments = ["--env-id", "CartPole-v1", "--learning-rate", "1e30", "--max-grad-norm", "1e30"]
    status, output = run("-m", f"examples.{learner}", *arguments, "--save-dir", str(tmp_path))
    assert status == 1, output
    assert re.search(r"error: FloatingPointError: .*lower --learning-rate", output)
    assert "Traceback" not in output
