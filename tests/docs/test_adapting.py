"""The scripts of docs/adapting.md, run as a reader would: with `examples` in the path."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.examples import ROOT, examples_of
from tests.waiting import PROCESS_LIMIT

PAGE = "docs/adapting.md"
WALK, WIDE, REINFORCE = examples_of(PAGE)


def moolink_run(folder, *arguments):
    """Two peers in the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "moolink", "run", "-n", "2", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def last_models(output):
    """Checksums and updates at which the peers ended."""
    return re.findall(r"model (\w{16}) at update (\d+)", output)


def test_your_own_environment(tmp_path):
    (tmp_path / "walk.py").write_text(WALK)
    ends = last_models(moolink_run(tmp_path, "walk.py", "--total-steps", "6000"))
    assert len(ends) == 2
    assert len(set(ends)) == 1


def test_your_own_model(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    ends = last_models(moolink_run(tmp_path, "wide.py", "--total-steps", "6000"))
    assert len(ends) == 2
    assert len(set(ends)) == 1


def changes():
    """The page's changes of the learner, each as a list of lines."""
    return [
        x.splitlines() for x in re.findall(r"```diff\n(.*?)```", (ROOT / PAGE).read_text(), re.S)
    ]


def changed(change):
    """The learner with a change of the page."""
    learner = (ROOT / "examples" / "torch" / "impala.py").read_text()
    for hunk in "\n".join(change).split("@@ ")[1:]:
        lines = hunk.splitlines()[1:]
        old = "\n".join(line[1:] for line in lines if line[:1] != "+")
        new = "\n".join(line[1:] for line in lines if line[:1] != "-")
        assert learner.count(old) == 1, f"the learner has not these lines once:\n{old}"
        learner = learner.replace(old, new)
    return learner


@pytest.mark.parametrize("number", range(3))
def test_a_change_of_the_algorithm(tmp_path, number):
    """A recorded quantity, an auxiliary loss and a replay ratio change two places each at most."""
    change = changes()[number]
    assert sum(line.startswith("@@") for line in change) <= 2
    (tmp_path / "learner.py").write_text(changed(change))
    arguments = ["--env-id", "moolink/Catch-v0", "--total-steps", "6000"]
    output = moolink_run(tmp_path, "learner.py", *arguments)
    ends = last_models(output)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    said = re.search(r"all steps are done after ([\d,]+) steps", output)[1]
    steps, updates = int(said.replace(",", "")), int(ends[0][1])
    # A round has 160 steps. Of three rounds from one unroll, only the first has new steps.
    assert steps // 160 * (3 if number == 2 else 1) == pytest.approx(updates, abs=12)


def test_a_copy_with_a_new_network_learns_a_new_environment_after_a_few_changes(tmp_path):
    change = changes()[-1]
    assert sum(line.startswith("+") for line in change) <= 20
    said = re.search(r"after this change of (\d+) lines", (ROOT / PAGE).read_text())[1]
    assert int(said) == sum(line.startswith("+") for line in change)
    learner = changed(change)
    (tmp_path / "learner.py").write_text(learner)
    (tmp_path / "walk.py").write_text(WALK)
    # Twice the steps that three runs needed: when learning begins differs from run to run.
    arguments = ["--total-steps", "120000", "--discount", "0.95"]
    output = moolink_run(tmp_path, "learner.py", *arguments)
    ends = last_models(output)
    assert len(ends) == 2
    assert len(set(ends)) == 1
    returns = re.findall(r"return (-?[\d.]+) \|", output)
    assert float(returns[-1]) > 0.5, output  # at random: -0.2


def test_a_program_of_one_process_becomes_one_of_many(tmp_path):
    (tmp_path / "reinforce.py").write_text(REINFORCE)
    output = moolink_run(tmp_path, "reinforce.py", "4000")
    said = re.findall(r"(\d+) steps, (\d+) a game, by (\d+) updates", output)
    assert len(said) == 2, output
    assert len(set(said)) == 1, output
    assert int(said[0][0]) >= 4000 - 256  # the last turn's totals are those before the last round
