"""Learners whose actors are other processes: they learn, and every process can be killed."""

import csv
import os
import re
import signal
from pathlib import Path

import pytest

import moolink
from examples.common import checkpoint
from tests.learning.processes import finish, read_until, run, start
from tests.waiting import until

# The processes of a job, and its steps in Catch.
EXAMPLES = {
    "torch.actor_learner": (3, 60_000),
    "jax.actor_learner": (3, 60_000),
    "torch.seed": (4, 60_000),
    "torch.apex_dqn": (3, 10_000),
}
SMALL = ["--hidden-size", "64", "--log-interval", "0.2", "--learning-rate", "2e-3"]
SMALL_TABLE = ["--min-size", "500", "--publish-interval", "1"]
TIMEOUT = 150  # seconds for what takes a few on a machine without other work

pytestmark = pytest.mark.timeout(400)


def job(example, save_dir, *arguments, launcher=()):
    peers = ["-m", "moolink", "run", "-n", str(EXAMPLES[example][0]), *launcher]
    return [*peers, "-m", f"examples.{example}", *options(example, save_dir), *arguments]


def options(example, save_dir):
    table = SMALL_TABLE if "apex" in example else []
    return [*SMALL, *table, "--save-dir", str(save_dir)]


def rows(save_dir):
    with Path(save_dir, "learning_curve.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("example", EXAMPLES)
def test_learns_catch_and_is_evaluated(tmp_path, example):
    """From -0.6, the return of random play in Catch, towards 1; all processes end by themselves."""
    pytest.importorskip(example.partition(".")[0])
    catch, steps = ["--env-id", "moolink/Catch-v0"], EXAMPLES[example][1]
    status, output = run(*job(example, tmp_path, *catch, "--total-steps", str(steps)))
    assert status == 0, output
    assert float(rows(tmp_path)[-1]["mean_return"]) >= 0.5, output
    assert checkpoint.load(tmp_path)["totals"]["steps"] >= steps
    play = ["-m", f"examples.{example}", *options(example, tmp_path), *catch]
    status, output = run(*play, "--mode", "evaluate", "--episodes", "20")
    assert status == 0, output
    assert re.search(r"mean return -?[\d.]+ of 20 episodes", output)


# One is enough for every landing.
KILLED = [
    example
    if example == "torch.actor_learner"
    else pytest.param(example, marks=pytest.mark.nightly)
    for example in EXAMPLES
]


@pytest.mark.parametrize("example", KILLED)
def test_any_process_can_be_killed(tmp_path, example):
    """Actors are replaced, and the learner goes on from its checkpoint with higher versions."""
    pytest.importorskip(example.partition(".")[0])
    group = f"kills-{os.getpid()}-{example}"
    arguments = ["--env-id", "CartPole-v1", "--total-steps", "100000000"]
    launcher = ["--restart", "9", "--group", group]
    intervals = ["--checkpoint-interval", "0.2"]
    process = start(*job(example, tmp_path, *arguments, *intervals, launcher=launcher))
    try:
        found = re.search(r"127\.0\.0\.1:\d+", read_until(process, "listens on")[-1])
        with (
            moolink.Rpc("watcher") as rpc,
            moolink.Subscriber(rpc, "policy", f"{group}-learner") as policy,
        ):
            rpc.connect(found[0])
            policy.wait(20, TIMEOUT)
            others = sorted(set(peers(group)) - {0})
            for index in others:
                os.kill(peers(group)[index], signal.SIGKILL)
            for _ in others:
                read_until(process, "restarting it")
            # More than can be learned from what those that were killed had sent.
            policy.wait(policy.version + 100, TIMEOUT)
            until(lambda: (tmp_path / checkpoint.NAME).exists(), "a checkpoint")
            os.kill(peers(group)[0], signal.SIGKILL)
            read_until(process, "resumed from")
            policy.wait(policy.version + 20, TIMEOUT)
    finally:
        process.send_signal(signal.SIGINT)
        output = finish(process)
        print(output)
    assert process.returncode == 128 + signal.SIGINT, output
    for name in ("steps", "updates"):
        column = [int(row[name]) for row in rows(tmp_path)]
        assert column == sorted(column), f"{name} went back: {column}"


def peers(group):
    """The processes of the job, by the indices of its peers."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(v.split("=", 1) for v in path.read_text().split("\0") if "=" in v)
        except OSError:  # it has ended, or is another user's
            continue
        pid = int(path.parent.name)
        if variables.get("MOOLINK_GROUP") == group and os.getpgid(pid) == pid:
            found[int(variables["MOOLINK_PEER_INDEX"])] = pid
    return found


def test_a_learner_without_a_broker_says_how_to_start_a_job(tmp_path):
    status, output = run("-m", "examples.torch.actor_learner", "--save-dir", str(tmp_path))
    assert status == 1
    assert "moolink run -n 3" in output
    assert "Traceback" not in output
