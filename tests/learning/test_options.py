"""Presets, what `moolink run` says in the environment, and the command line; and the curve."""

import csv
import errno
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from examples.common.curve import COLUMNS, LearningCurve
from examples.common.options import ImpalaOptions, OptionError, PpoOptions, defaults, parse
from moolink import files
from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]
PONG = ["--env-id", "ALE/Pong-v5"]


def impala(arguments, environ):
    return parse(ImpalaOptions, arguments, environ)


def test_a_peer_alone_contributes_the_whole_round():
    o = impala(["--env-id", "moolink/Catch-v0"], {})
    assert o.round_size == o.batch_size == 8
    ppo = parse(PpoOptions, ["--env-id", "CartPole-v1", "--rollout-length", "32"], {})
    assert ppo.round_size == ppo.num_envs * 32 // ppo.minibatches


@pytest.mark.parametrize("option", ["--max-frames 0", "--no-op-max -1", "--max-seconds -3"])
def test_limits_below_the_least_are_refused(option):
    name = option.split()[0]
    with pytest.raises(SystemExit, match=rf"error: {name} is -?[\d.]+; it must be at least"):
        impala([*PONG, *option.split()], {})


def test_the_job_is_shared_out_among_the_peers_of_moolink_run():
    environ = {
        "MOOLINK_BROKER": "127.0.0.1:5000",
        "MOOLINK_GROUP": "run-1",
        "MOOLINK_PEER_INDEX": "1",
        "MOOLINK_PEER_NAME": "peer-1",
        "MOOLINK_NUM_PEERS": "2",
        "MOOLINK_CORES": "3",
    }
    o = impala(PONG, environ)
    assert o.connect == "127.0.0.1:5000"
    assert (o.group_name, o.peer_name) == ("run-1", "peer-1")
    assert (o.num_envs, o.batch_size) == (16, 2)
    assert o.round_size == 4
    assert o.cores == 3
    other = impala(PONG, environ | {"MOOLINK_PEER_INDEX": "0"})
    assert o.acting_seed != other.acting_seed
    assert o.seed == other.seed
    cartpole = ["--env-id", "CartPole-v1"]
    alone, shared = (parse(PpoOptions, cartpole, e) for e in ({}, environ))
    assert shared.num_envs == alone.num_envs // 2
    assert shared.round_size == alone.round_size


def test_large_frames_have_more_environments():
    o = impala([*PONG, "--frame-size", "84"], {"MOOLINK_NUM_PEERS": "2"})
    assert (o.num_envs, o.batch_size) == (32, 2)


def test_the_command_line_wins():
    environ = {"MOOLINK_BROKER": "127.0.0.1:5000", "MOOLINK_NUM_PEERS": "2"}
    o = impala(["--connect=10.0.0.1:4431", "--num-peers", "4", "--group", "g"], environ)
    assert o.connect == "10.0.0.1:4431"
    assert o.group_name == "g"
    assert (o.num_envs, o.batch_size) == (8, 1)
    assert o.round_size == 4


def test_the_last_of_equal_options_counts():
    o = impala(["--num-peers", "2", *PONG, "--env-id", "CartPole-v1", "--num-peers=4"], {})
    assert (o.env_id, o.num_peers, o.batch_size, o.round_size) == ("CartPole-v1", 4, 2, 8)


def test_environments_have_presets():
    assert impala([], {}).env_id == "ALE/Breakout-v5"
    assert impala([], {}).clip_reward
    catch = impala(["--env-id=moolink/Catch-v0"], {})
    assert (catch.total_steps, catch.clip_reward, catch.num_envs) == (400_000, False, 32)
    pong = impala(["--env_id", "ALE/Pong-v5"], {})
    assert pong.run_dir == Path("runs/Pong-v5") / pong.learner


@pytest.mark.parametrize(
    ("kind", "arguments", "environ", "message"),
    [
        (ImpalaOptions, ["--num-envs", "20"], {}, "--num-envs 20 must be a multiple of"),
        (ImpalaOptions, ["--total-steps", "0"], {}, "--total-steps is 0"),
        (ImpalaOptions, ["--unroll-length", "0"], {}, "--unroll-length is 0"),
        (PpoOptions, ["--minibatches", "3"], {}, "--minibatches 3 must divide --num-envs x"),
        (PpoOptions, ["--minibatches", "16", "--lstm"], {}, "must divide --num-envs = "),
        (PpoOptions, ["--minibatches", "1024"], {}, "fewer than two steps in each"),
        (ImpalaOptions, [], {"MOOLINK_NUM_PEERS": "two"}, "MOOLINK_NUM_PEERS is 'two'"),
        (ImpalaOptions, [], {"MOOLINK_CORES": "0"}, "MOOLINK_CORES is '0'"),
    ],
)
def test_contradictions_are_said(kind, arguments, environ, message):
    with pytest.raises(SystemExit) as caught:
        parse(kind, arguments, environ)
    assert message in str(caught.value)


def test_help_shows_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        impala(["--env-id", "moolink/Catch-v0", "--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "default: 400000" in re.sub(r"[\s│]+", " ", text)
    for option in ("--vtrace-lambda", "--save-dir", "--connect", "--parallel-gradients"):
        assert option in text


def test_the_checkpoint_remembers_the_options():
    remembered = defaults(ImpalaOptions, {}, env_id="ALE/Pong-v5", num_peers=2).as_dict()
    assert remembered["env_id"] == "ALE/Pong-v5"
    assert remembered["num_peers"] == 2


def test_learning_rate_follows_the_steps():
    o = ImpalaOptions(total_steps=1000, learning_rate=0.5)
    assert [o.rate({"steps": n}) for n in (0, 250, 1000, 1500)] == [0.5, 0.375, 0.0, 0.0]
    assert o.rate({}) == 0.5


def row(steps, mean_return):
    return dict.fromkeys(COLUMNS, 0) | {"steps": steps, "mean_return": mean_return}


def test_the_curve_goes_on_from_the_checkpoint(tmp_path):
    o, curve = ImpalaOptions(), LearningCurve(tmp_path / "run")
    curve.start(0, o)
    for steps in (100, 200, 300):
        curve.append(row(steps, None if steps == 100 else steps / 100))
    curve.start(250, o)  # the checkpoint was older than the last row
    curve.append(row(260, 2.6))
    with curve.csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["steps"] for r in rows] == ["100", "200", "260"]
    assert rows[0]["mean_return"] == ""
    curve.plot("breakout")
    assert curve.png_path.read_bytes().startswith(b"\x89PNG")
    curve.start(0, o)  # another job
    assert len(curve.csv_path.read_text().splitlines()) == 1


def test_a_new_metric_gets_a_column(tmp_path):
    o, curve = ImpalaOptions(), LearningCurve(tmp_path)
    curve.start(0, o)
    curve.append(row(100, 1.0))
    curve.append(row(200, 2.0) | {"value_loss": 0.5})
    curve.start(200, o)  # the process that leads now
    curve.append(row(300, 3.0))
    with curve.csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*COLUMNS, "value_loss"]
    assert [r["value_loss"] for r in rows] == ["", "0.5", ""]


def test_a_curve_whose_file_could_not_get_a_column_goes_on(tmp_path, monkeypatch):
    curve = LearningCurve(tmp_path)
    curve.start(0, ImpalaOptions())
    curve.append(row(100, 1.0))

    def full(path):
        raise OSError(errno.ENOSPC, "no space", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(files, "written", full)
        with pytest.raises(OSError, match="no space"):
            curve.append(row(200, 2.0) | {"value_loss": 0.5})
    curve.append(row(300, 3.0))
    curve.append(row(400, 4.0) | {"value_loss": 0.5})
    assert [r["value_loss"] for r in curve._file.read()] == ["", "", "0.5"]


def test_the_page_of_the_columns_has_each_of_them():
    page = (ROOT / "docs/learning-curve.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == COLUMNS


def test_tensorboard_has_the_rows_of_the_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = LearningCurve(tmp_path)
    curve.start(0, ImpalaOptions())
    for steps in (100, 200):
        curve.append(row(steps, steps / 100) | {"value_loss": 0.5})
    curve.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    def values(name):
        return [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(name)]

    assert values("mean_return") == [(100, 1.0), (200, 2.0)]
    assert values("value_loss") == [(100, 0.5), (200, 0.5)]


def test_weights_and_biases_are_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    curve = LearningCurve(tmp_path)
    curve.start(0, ImpalaOptions())
    curve.append(row(100, 1.5))
    rows = curve.csv_path.read_text()
    with pytest.raises(OptionError, match="--wandb-project needs Weights & Biases: pip install"):
        curve.start(0, ImpalaOptions(wandb_project="p"))
    assert curve.csv_path.read_text() == rows


def test_weights_and_biases_get_the_rows(tmp_path, monkeypatch):
    """A package of that name, which keeps what it is given."""
    fake = tmp_path / "wandb.py"
    fake.write_text(
        "calls = []\n"
        "def init(**options):\n    calls.append(options)\n    return Run()\n"
        "class Run:\n"
        "    def log(self, row, step):\n        calls.append((step, row['mean_return']))\n"
        "    def finish(self):\n        calls.append('finish')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    curve = LearningCurve(tmp_path / "run")
    curve.start(0, ImpalaOptions(wandb_project="p"))
    curve.append(row(100, 1.5))
    curve.close()
    calls = sys.modules.pop("wandb").calls
    assert calls[0]["project"] == "p"
    assert calls[1:] == [(100, 1.5), "finish"]


@pytest.mark.parametrize("algorithm", ["impala", "ppo"])
@pytest.mark.parametrize(("framework", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_learner_needs_its_own_framework_only(framework, other, algorithm):
    pytest.importorskip(framework)
    module = f"examples.{framework}.{algorithm}"
    program = f"import sys; sys.modules[{other!r}] = None; import {module}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=PROCESS_LIMIT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["examples"]
    assert not any(re.search(rf"\b{name}\b", need) for need in extra for name in (framework, other))
