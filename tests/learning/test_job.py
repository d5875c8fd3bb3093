"""The whole job through the real path: `moolink run`, a broker, peers, the accumulator."""

import contextlib
import csv
import importlib.util
import os
import re
import resource
import signal
from pathlib import Path

import pytest

from examples.common import checkpoint
from tests.learning.processes import broker, finish, read_until, run, start
from tests.processes import ROOT, kill, killed_at_the_end

LEARNER = ["-m", "examples.torch.impala"]
CATCH = ["--env-id", "moolink/Catch-v0", "--log-interval", "1"]


def job(peers, save_dir, *arguments, **options):
    command = ["-m", "moolink", "run", "-n", str(peers), *LEARNER, *CATCH]
    return run(*command, "--save-dir", str(save_dir), *arguments, **options)


def rows(save_dir):
    with Path(save_dir, "learning_curve.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_peers_learn_catch(tmp_path):
    """Catch to a mean return of 0.9 (random play: -0.6), both peers in the rounds, equal bits."""
    status, output = job(2, tmp_path, "--total-steps", "120000")
    assert status == 0, output
    curve = rows(tmp_path)
    assert float(curve[-1]["mean_return"]) >= 0.9, output
    # One peer may start seconds after the other. Later, a peer that the machine holds up for a
    # second is filled in for by the other; seldom.
    both = [row["contributors"] == "2" for row in curve]
    together = both[both.index(True) :]
    assert len(together) >= 0.5 * len(both), output
    assert sum(together) >= 0.8 * len(together), output
    assert {row["batch_size"] for row in curve} == {"8"}
    checksums = re.findall(r"model (\w{16}) at update (\d+)", output)
    assert len(checksums) == 2, output
    assert len(set(checksums)) == 1, output
    assert Path(tmp_path, "learning_curve.png").stat().st_size > 0


def test_all_peers_end_at_one_round_when_the_time_is_up(tmp_path):
    status, output = job(3, tmp_path, "--max-seconds", "10", "--total-steps", "100000000")
    assert status == 0, output
    assert output.count("the time is up") == 3
    assert len(set(re.findall(r"model (\w{16}) at update (\d+)", output))) == 1, output


def test_a_job_goes_on_from_its_checkpoint_and_can_be_evaluated(tmp_path):
    status, output = job(1, tmp_path, "--total-steps", "150000")
    assert status == 0, output
    assert checkpoint.load(tmp_path)["totals"]["steps"] >= 150_000
    status, output = job(2, tmp_path, "--total-steps", "200000")
    assert status == 0, output
    assert re.search(r"resumed from .* at step 150,", output)
    assert int(rows(tmp_path)[0]["steps"]) < 150_000 < int(rows(tmp_path)[-1]["steps"])
    arguments = [*CATCH, "--mode", "evaluate", "--save-dir", str(tmp_path), "--episodes", "200"]
    status, output = run(*LEARNER, *arguments)
    assert status == 0, output
    mean = float(re.search(r"mean return (-?[\d.]+) of 200 episodes", output)[1])
    assert mean >= 0.9


def test_learners_of_one_environment_have_folders_of_their_own(tmp_path):
    """In the order of docs/adapting.md; a start that is refused changes nothing."""
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    arguments = ["--env-id", "CartPole-v1", "--total-steps", "2000", "--log-interval", "0.5"]
    for learner in ("impala", "ppo", "ppo"):
        command = ["-m", "moolink", "run", "-n", "2", "-m", f"examples.torch.{learner}"]
        status, output = run(*command, *arguments, **options)
        assert status == 0, output
        assert f"new run runs/CartPole-v1/torch.{learner}/" in output
    runs = sorted(tmp_path.glob("runs/CartPole-v1/*/*"))
    assert [path.parent.name for path in runs] == ["torch.impala", "torch.ppo", "torch.ppo"]

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("Weights & Biases is installed, and would log in")
    before = files()
    refused = ["--no-resume", "--wandb-project", "x", "--save-dir", str(runs[0])]
    status, output = run(*LEARNER, *arguments, *refused, **options)
    assert status == 2, output
    assert "--wandb-project needs" in output
    assert files() == before
    evaluate = ["--mode", "evaluate", "--save-dir", str(runs[0]), "--episodes", "2"]
    status, output = run(*LEARNER, *evaluate, **options)
    assert status == 0, output
    assert re.search(r"CartPole-v1 after 2,\d+ steps: mean return .* of 2 episodes", output)
    after = files()
    assert {path.stem for path in after.keys() - before.keys()} == {
        "evaluation",
        "evaluation_rliable",
        "evaluation_marl_eval",
    }
    assert before.items() <= after.items()


@contextlib.contextmanager
def by_hand(tmp_path, *arguments):
    """A broker, a peer, and later another that gets the first one's state."""
    with broker() as address, killed_at_the_end() as started:
        common = [*LEARNER, *CATCH, "--connect", address, "--group", "by-hand"]
        common += ["--num-peers", "2", "--total-steps", "100000000"]
        for index, name in enumerate(("first", "second")):
            own = ["--name", name, "--peer-index", str(index), "--save-dir", str(tmp_path / name)]
            started.append(start(*common, *own, *(arguments if name == "second" else ())))
            read_until(started[0], f"of {index + 1} peer")
        yield started


def test_a_newcomer_joins_by_hand_and_leaves(tmp_path):
    with by_hand(tmp_path) as (first, second):
        second.send_signal(signal.SIGTERM)
        finish(second)
        assert second.returncode == 0
        read_until(first, "of 1 peer |")
    assert not (tmp_path / "second").exists()  # only the leader writes


def test_a_newcomer_takes_the_settings_of_the_group(tmp_path):
    """Told of another number of peers, it would have rounds of another size."""
    settings = ["--num-peers", "3", "--parallel-gradients", "2"]
    with by_hand(tmp_path, *settings) as (first, second):
        said = "".join(read_until(second, "joined the job at step"))
        assert "rounds of 8 as in the group, not 6" in said
        for process in (second, first):
            process.send_signal(signal.SIGTERM)
            assert "SIGTERM after" in finish(process)


@pytest.mark.nightly
def test_a_newcomer_ends_with_the_parameters_of_the_first(tmp_path):
    with by_hand(tmp_path, "--max-seconds", "40") as (first, second):
        outputs = [finish(second), finish(first)]
    checksums = [re.search(r"model (\w{16}) at update (\d+)", output) for output in outputs]
    assert all(checksums), outputs
    assert checksums[0].groups() == checksums[1].groups()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_job(tmp_path, number):
    command = ["-m", "moolink", "run", "-n", "2", *LEARNER, *CATCH, "--total-steps", "100000000"]
    process = start(*command, "--save-dir", str(tmp_path))
    read_until(process, "of 2 peers |")
    read_until(process, "of 2 peers |")
    process.send_signal(number)
    output = finish(process, timeout=120)
    assert process.returncode == 128 + number, output
    saved = checkpoint.load(tmp_path)
    assert saved["totals"]["steps"] >= int(rows(tmp_path)[-1]["steps"]) > 0
    assert round(saved["seconds"], 2) >= float(rows(tmp_path)[-1]["seconds"])  # rows are rounded
    assert Path(tmp_path, "learning_curve.png").stat().st_size > 0


def test_a_full_disk_does_not_end_the_job(tmp_path):
    """Files may not grow beyond 40 kB, which the curve needs little of and a checkpoint more."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    arguments = ["--total-steps", "60000", "--checkpoint-interval", "1", "--save-dir"]
    # The learner alone, with a broker of its own: shared segments are files for the kernel, too.
    status, output = run(*LEARNER, *CATCH, *arguments, str(tmp_path), preexec_fn=limit)
    assert status == 0, output
    assert re.search(r"checkpoint .*checkpoint\.npz was not written.*the job goes on", output)
    assert int(rows(tmp_path)[-1]["steps"]) >= 60_000


def test_a_truncated_checkpoint_is_named_and_the_previous_one_used(tmp_path):
    for steps in ("20000", "40000"):
        status, output = job(1, tmp_path, "--total-steps", steps)
        assert status == 0, output
    path = tmp_path / checkpoint.NAME
    os.truncate(path, path.stat().st_size // 2)
    status, output = job(1, tmp_path, "--total-steps", "60000")
    assert status == 0, output
    assert re.search(rf"{path} .*cannot be read.*going on from .*previous", output)
    assert re.search(r"resumed from .* at step 20,", output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env-id", "Brekout"], "no environment 'Brekout'"),
        (["--mode", "evaluate"], "no checkpoint in"),
        (["--num-envs", "7"], "--num-envs 7 must be a multiple"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, arguments, message):
    status, output = run(*LEARNER, *arguments, "--save-dir", str(tmp_path))
    assert status != 0
    assert message in output
    assert "Traceback" not in output


def test_the_checkpoint_of_another_job_or_a_finished_one_is_refused(tmp_path):
    assert job(1, tmp_path, "--total-steps", "5000")[0] == 0
    for arguments, message in (
        (["--env-id", "ALE/Pong-v5"], "is of --env-id moolink/Catch-v0, not ALE/Pong-v5"),
        ([*CATCH, "--optimizer", "rmsprop"], "is of --optimizer adam, not rmsprop"),
        ([*CATCH, "--total-steps", "5000"], "has learned from 5,"),
    ):
        status, output = run(*LEARNER, *arguments, "--save-dir", str(tmp_path))
        assert status == 2, output
        assert message in output
        assert "Traceback" not in output


def test_environments_that_die_end_the_job_with_their_error(tmp_path):
    """The worker processes of the pool are killed; the job ends with EnvError, at once."""
    arguments = ["--env-id", "CartPole-v1", "--env-processes", "2", "--save-dir", str(tmp_path)]
    process = start(*LEARNER, *arguments, "--log-interval", "1")
    for _ in range(3):  # by then both groups of environments are there
        read_until(process, "/s of 1 peer")
    for worker in pool_workers(process.pid):
        kill(worker)  # the job ends the others after the first
    output = finish(process, timeout=120)
    assert process.returncode == 1, output
    assert "EnvError" in output


def pool_workers(pid):
    """The descendants that have no children of their own."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except FileNotFoundError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    descendants = {pid}
    for _ in range(4):
        descendants |= {child for child, parent in parents.items() if parent in descendants}
    return [d for d in descendants - {pid} if d not in parents.values()]
