"""Returns that the learners reach on whole environments; `test_job.py`, `test_roles.py` and
`test_on_device.py` in `tests/learning` have short versions."""

import csv
import math

import pytest

from tests.learning.processes import run

RECALL = ["--env-id", "moolink/Recall-v0", "--total-steps", "200000", "--learning-rate", "3e-3"]
RECALL += ["--entropy-cost", "0.003", "--max-grad-norm", "40"]
CARTPOLE = ["--env-id", "CartPole-v1"]
# The learning rate falls over 2,000,000 steps; the test judges the return reached before.
# The thresholds are those of games without sticky actions.
PONG = ["--env-id", "ALE/Pong-v5", "--repeat-action-probability", "0"]
BREAKOUT = ["--env-id", "ALE/Breakout-v5", "--repeat-action-probability", "0"]
WITHIN = {"ALE/Pong-v5": 1_200_000, "ALE/Breakout-v5": 800_000}
CARTPOLES = ["--env-id", "examples.torch.cartpole:CartPole"]
MEET = ["--env-id", "examples.common.tasks:Meet", "--total-steps", "200000"]
PENDULUM = ["--env-id", "Pendulum-v1", "--total-steps", "200000", "--normalize"]
PENDULUM += ["--normalize-reward", "--learning-rate", "1e-3", "--discount", "0.9"]
PENDULUM += ["--entropy-cost", "0", "--epochs", "10", "--rollout-length", "256"]
CHEETAH = ["--env-id", "HalfCheetah-v5", "--total-steps", "1000000", "--normalize"]
CHEETAH += ["--normalize-reward", "--num-envs", "8", "--rollout-length", "128", "--epochs", "20"]
CHEETAH += ["--minibatches", "8", "--learning-rate", "1e-4", "--discount", "0.98"]
CHEETAH += [
    "--gae-lambda",
    "0.92",
    "--clip",
    "0.1",
    "--initial-std",
    "0.135",
    "--hidden-size",
    "256",
]
CHEETAH += ["--entropy-cost", "0.0004", "--max-grad-norm", "0.8", "--torch-threads", "1"]


def best_return(tmp_path, learner, arguments, peers=2):
    """The greatest mean return of 100 episodes that the job reached within its steps."""
    within = WITHIN.get(arguments[1], math.inf)
    command = ["-m", "moolink", "run", "-n", str(peers), "-m", f"examples.{learner}", *arguments]
    status, output = run(*command, "--save-dir", str(tmp_path), timeout=3000)
    assert status == 0, output
    with (tmp_path / "learning_curve.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if int(row["episodes"]) >= 100 and int(row["steps"]) <= within
        ]
    return max(float(row["mean_return"]) for row in rows)


@pytest.mark.timeout(3100)
@pytest.mark.parametrize(
    ("learner", "arguments", "least"),
    [
        ("torch.impala", PONG, 18),
        ("jax.impala", PONG, 18),
        ("torch.impala", BREAKOUT, 20),
        ("jax.impala", BREAKOUT, 20),
        *((f"{f}.{a}", CARTPOLE, 475) for f in ("torch", "jax") for a in ("impala", "ppo")),
        ("torch.impala", [*RECALL, "--lstm"], 0.9),
        ("jax.impala", [*RECALL, "--lstm"], 0.9),
        ("torch.impala", MEET, 0.85),
        ("torch.ppo", PENDULUM, -250),
        ("torch.on_device", CARTPOLES, 475),
    ],
)
def test_two_peers_learn(tmp_path, learner, arguments, least):
    assert best_return(tmp_path, learner, arguments) >= least


@pytest.mark.timeout(3100)
def test_one_peer_learns_half_cheetah(tmp_path):
    pytest.importorskip("mujoco", reason="the extra `mujoco` is not installed")
    assert best_return(tmp_path, "torch.ppo", CHEETAH, peers=1) >= 3000


@pytest.mark.timeout(3100)
@pytest.mark.parametrize(
    ("learner", "peers", "least"),
    [
        ("torch.actor_learner", 3, 475),
        ("jax.actor_learner", 3, 475),
        ("torch.seed", 4, 475),
        ("torch.apex_dqn", 3, 195),
    ],
)
def test_a_learner_with_actors_learns_cartpole(tmp_path, learner, peers, least):
    assert best_return(tmp_path, learner, CARTPOLE, peers) >= least


@pytest.mark.timeout(3100)
def test_a_network_without_a_memory_does_not_recall(tmp_path):
    assert best_return(tmp_path, "torch.impala", RECALL) <= 0.45  # at best 1/4, but for chance
