"""Peers in torch and in JAX learn one model in one group, through the real path."""

import csv
import re
import signal
import time

import numpy as np
import pytest

from examples.common import checkpoint
from tests.learning import mixed_job
from tests.learning.processes import broker, read_until, start
from tests.processes import killed_at_the_end
from tests.waiting import PROCESS_LIMIT

pytest.importorskip("jax")
pytest.importorskip("optax")

CATCH = [
    "--env-id",
    "moolink/Catch-v0",
    "--log-interval",
    "1",
    "--num-peers",
    "2",
    "--total-steps",
    "100000000",
]

ORDERS = [("torch", "jax"), ("jax", "torch")]


@pytest.mark.nightly  # its twin is in test_every_learner.py
def test_two_jax_peers_learn_catch(tmp_path):
    """As two torch peers do: to a mean return of 0.9, in step."""
    command = ["-m", "moolink", "run", "-n", "2", "-m", "examples.jax.impala", *CATCH[:4]]
    process = start(*command, "--total-steps", "300000", "--save-dir", str(tmp_path))
    output = process.communicate(timeout=PROCESS_LIMIT)[0]
    assert process.returncode == 0, output
    with (tmp_path / "learning_curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["mean_return"]) >= 0.9, output
    assert {row["batch_size"] for row in rows} == {"8"}
    checksums = re.findall(r"model (\w{16}) at update (\d+)", output)
    assert len(checksums) == 2, output
    assert len(set(checksums)) == 1, output
    evaluate = [*CATCH[:2], "--mode", "evaluate", "--save-dir", str(tmp_path), "--episodes", "200"]
    for framework in ("jax", "torch"):
        output = start("-m", f"examples.{framework}.impala", *evaluate).communicate(timeout=270)[0]
        mean = re.search(r"mean return (-?[\d.]+) of 200 episodes", output)
        assert mean is not None, output
        assert float(mean[1]) >= 0.9


@pytest.fixture
def peer(tmp_path):
    """Returns a function that starts a peer of a framework, all of one group."""
    with broker() as address, killed_at_the_end() as started:

        def start_peer(framework, *arguments):
            index = str(len(started))
            process = start(
                *["-m", f"examples.{framework}.impala", *CATCH, "--connect", address],
                *["--group", "mixed", "--name", f"{framework}-{index}", "--peer-index", index],
                *["--save-dir", str(tmp_path / framework), *arguments],
            )
            started.append(process)
            return process

        yield start_peer


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_the_parameters_are_the_same_at_the_end(peer, first, second):
    leader = peer(first)
    read_until(leader, "of 1 peer |")
    other = peer(second, "--max-seconds", "30")
    read_until(leader, "of 2 peers |")
    outputs = [process.communicate(timeout=270)[0] for process in (other, leader)]
    ends = [re.search(r"model (\w{16}) at update (\d+)", output) for output in outputs]
    assert all(ends), outputs
    assert ends[0].groups() == ends[1].groups(), outputs
    assert int(ends[0][2]) > 100
    assert leader.returncode == other.returncode == 0, outputs


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_the_other_framework_goes_on_when_the_leader_is_killed(peer, tmp_path, first, second):
    leader = peer(first)
    read_until(leader, "of 1 peer |")
    other = peer(second)
    read_until(leader, "of 2 peers |")
    leader.kill()
    killed = time.monotonic()
    read_until(other, "of 1 peer |")  # says so at once when it leads
    assert time.monotonic() - killed < 15.0
    again = peer(first, "--max-seconds", "30")  # a newcomer, now with the other's optimiser state
    read_until(other, "of 2 peers |")
    outputs = [process.communicate(timeout=270)[0] for process in (again, other)]
    ends = [re.search(r"model (\w{16}) at update (\d+)", output) for output in outputs]
    assert all(ends), outputs
    assert ends[0].groups() == ends[1].groups(), outputs
    saved = checkpoint.load(tmp_path / second)
    assert saved["model_version"] == int(ends[0][2])


def test_who_is_killed_and_does_not_lead_is_not_missed(peer):
    leader = peer("jax")
    read_until(leader, "of 1 peer |")
    other = peer("torch")
    read_until(leader, "of 2 peers |")
    other.kill()
    read_until(leader, "of 1 peer |")
    leader.send_signal(signal.SIGTERM)
    output = leader.communicate(timeout=PROCESS_LIMIT)[0]
    assert leader.returncode == 0, output


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_a_checkpoint_of_one_framework_is_gone_on_from_in_the_other(tmp_path, first, second):
    arguments = [*CATCH[:4], "--num-peers", "1", "--save-dir", str(tmp_path)]
    outputs = []
    for framework, steps in ((first, "20000"), (second, "30000")):
        process = start("-m", f"examples.{framework}.impala", *arguments, "--total-steps", steps)
        outputs.append(process.communicate(timeout=270)[0])
        assert process.returncode == 0, outputs
        saved = checkpoint.load(tmp_path)
        if framework == first:
            before = saved
    assert re.search(r"resumed from .* at step 20,", outputs[1])
    assert saved["optimizer"]["count"] > before["optimizer"]["count"]
    assert sorted(saved["parameters"]) == sorted(before["parameters"])
    for name, array in before["parameters"].items():
        assert saved["parameters"][name].shape == array.shape
        assert saved["parameters"][name].dtype == np.float32


@pytest.mark.timeout(300)  # four processes start, one after the other
def test_every_round_is_the_same_in_both_frameworks_and_each_goes_on_alone(tmp_path):
    with mixed_job.job(tmp_path, CATCH[:2]) as job:
        mixed_job.play(job, seconds=0, kills=2)
        rounds, equal, both = job.check()
        assert min(equal, both) >= mixed_job.ENOUGH
        assert rounds >= max(equal, both)
