"""Each run has a folder of its own; which one goes on, and what an evaluation takes from it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import moolink
from examples.common import checkpoint, folder
from examples.common.folder import RunFolder
from examples.common.options import ImpalaOptions, OptionError, PpoOptions, parse

CARTPOLE = ["--env-id", "CartPole-v1"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImpalaOptions, "learner", "torch.impala")
    monkeypatch.setattr(PpoOptions, "learner", "torch.ppo")


def impala(*arguments):
    return parse(ImpalaOptions, [*CARTPOLE, *arguments], {})


def a_run(options, steps=100):
    """A run that has ended with a checkpoint: its folder."""
    made = RunFolder(options)
    path = made.make()
    made.write_options()
    tree = {"options": options.as_dict(), "totals": {"steps": steps}, "model_version": 1}
    checkpoint.save(path, tree | {"parameters": {"w": np.ones(2, np.float32)}})
    folder.os.close(made._lock)
    return path


def test_a_run_has_a_folder_once_it_leads():
    made = RunFolder(impala())
    assert made.path is None
    assert not folder.Path("runs").exists()
    path = made.make()
    assert path.parent.as_posix() == "runs/CartPole-v1/torch.impala"
    assert made.make() == path
    assert RunFolder(impala()).make() != path  # in the same second, perhaps
    assert made.begins(0) == f"new run {path}"


def test_the_newest_run_of_the_same_network_goes_on():
    first = a_run(impala(), 100)
    with_memory = a_run(impala("--lstm"), 200)
    found = RunFolder(impala())
    assert (found.path, found.saved["totals"]) == (first, {"steps": 100})
    assert found.begins(100) == f"resumed from {first} at step 100"
    assert RunFolder(impala("--lstm")).path == with_memory
    assert RunFolder(parse(PpoOptions, CARTPOLE, {})).path is None
    assert RunFolder(impala("--no-resume")).path is None
    newest = a_run(impala("--no-resume"), 50)
    assert RunFolder(impala()).path == newest


def test_a_rule_that_is_given_and_the_ids_default_are_the_same_game():
    def breakout(*arguments):
        return parse(ImpalaOptions, ["--env-id", "ALE/Breakout-v5", *arguments], {})

    path = a_run(breakout())
    sticky = breakout("--repeat-action-probability", "0.25", "--no-op-max", "30")
    assert RunFolder(sticky).path == path
    checkpoint.check_can_go_on(sticky, checkpoint.load(path))
    other = breakout("--repeat-action-probability", "0")
    assert RunFolder(other).path is None
    with pytest.raises(OptionError, match="is of --repeat-action-probability the id's default"):
        checkpoint.check_can_go_on(other, checkpoint.load(path))


def test_a_run_with_all_its_steps_is_followed_by_a_new_one():
    path = a_run(impala("--total-steps", "1000"), 1000)
    found = RunFolder(impala("--total-steps", "1000"))
    assert (found.path, found.saved) == (None, None)
    assert found.begins(0).endswith(f"({path.name} has all its steps)")
    assert RunFolder(impala("--total-steps", "2000")).path == path


def test_a_run_under_way_is_left_alone():
    path = a_run(impala())
    writes = RunFolder(impala())
    assert writes.make() == path
    other = RunFolder(impala())
    assert (other.path, other.saved) == (None, None)
    assert f"({path.name} is in use)" in other.begins(0)
    folder.os.close(writes._lock)
    assert RunFolder(impala()).path == path


def test_a_folder_that_cannot_be_made_ends_no_job():
    folder.Path("runs").write_text("not a folder")
    made = RunFolder(impala())
    assert made.make().parent.name == "torch.impala"
    with pytest.raises(OSError, match="Not a directory"):  # which the job says, and goes on
        made.write_options()


def test_peers_write_where_the_leader_tells_them_to():
    leads, follows = RunFolder(impala()), RunFolder(impala())
    follows.told(leads.for_others())
    assert follows.make() == leads.path
    assert follows.begins(500) == f"writes to {leads.path} from step 500"
    given = RunFolder(impala("--save-dir", "mine"))
    assert given.for_others() is None
    given.told(leads.for_others())
    assert given.make() == folder.Path("mine")


@pytest.mark.parametrize(
    "path", ["/a/b/c/d", "runs/../../a", "runs/a/b", "runs/a/b/../c", "x/a/b/c"]
)
def test_a_folder_elsewhere_is_not_taken_from_others(path):
    follows = RunFolder(impala())
    follows.told(path)
    assert follows.path is None


def test_a_new_run_goes_on_after_a_failure(monkeypatch):
    path = a_run(impala("--group", "g", "--no-resume"))
    monkeypatch.setenv("MOOLINK_NUM_PEERS", "1")
    monkeypatch.setenv("MOOLINK_RESTARTED", "1")
    assert RunFolder(impala("--group", "g", "--no-resume")).path == path
    writes = RunFolder(impala("--group", "g"))  # the process that failed may leave children
    writes.make()
    assert RunFolder(impala("--group", "g", "--no-resume")).path == path
    folder.os.close(writes._lock)
    assert RunFolder(impala("--group", "another", "--no-resume")).path is None


def test_an_evaluation_takes_the_environment_and_the_network_from_the_run():
    arguments = ["--env-id", "ALE/Pong-v5", "--lstm", "--frame-size", "84"]
    path = a_run(parse(ImpalaOptions, arguments, {}))
    by_folder = parse(ImpalaOptions, ["--mode", "evaluate", "--save-dir", str(path)], {})
    newest = parse(ImpalaOptions, ["--mode", "evaluate", "--env-id", "ALE/Pong-v5"], {})
    for o in (by_folder, newest):
        assert (o.env_id, o.lstm, o.frame_size, o.hidden_size) == ("ALE/Pong-v5", True, 84, 256)
        assert o.run_dir == path
    assert json.loads((path / "options.json").read_text())["learner"] == "torch.impala"


def test_an_evaluation_of_another_learners_run_says_so():
    path = a_run(parse(PpoOptions, CARTPOLE, {}))
    o = parse(ImpalaOptions, ["--mode", "evaluate", "--save-dir", str(path)], {})
    with pytest.raises(OptionError, match=r"is of torch\.ppo, not of torch\.impala") as caught:
        checkpoint.check_can_go_on(o, checkpoint.load(path))
    assert "resume" not in str(caught.value)


def test_damage_is_said_with_the_remedy():
    path = a_run(impala())
    (path / checkpoint.NAME).write_bytes(b"no zip")
    with pytest.raises(moolink.FileError, match=r"cannot be read.*--no-resume"):
        RunFolder(impala())
    (path / "options.json").write_text("{")
    with pytest.raises(moolink.FileError, match=r"options.json is not a run's options"):
        RunFolder(impala())


def test_a_learner_has_the_name_of_its_program(monkeypatch):
    monkeypatch.undo()
    for main, name in (
        (SimpleNamespace(__spec__=SimpleNamespace(name="examples.jax.ppo")), "jax.ppo"),
        (SimpleNamespace(__spec__=None, __file__="/somewhere/my walk.py"), "my-walk"),
        (SimpleNamespace(__spec__=None), "learner"),
    ):
        monkeypatch.setitem(sys.modules, "__main__", main)
        assert PpoOptions().learner == name
