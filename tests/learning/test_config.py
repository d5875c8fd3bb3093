"""Presets, what `moolink run` says in the environment, and the command line; and the curve."""

import csv
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from examples.common.config import default_config, parse
from examples.common.curve import COLUMNS, LearningCurve

ROOT = Path(__file__).resolve().parents[2]


def test_a_peer_alone_contributes_the_whole_virtual_batch():
    config = parse([], {})
    assert config.virtual_batch_size == config.learner.batch_size


def test_the_job_is_shared_out_among_the_peers_of_moolink_run():
    environ = {
        "MOOLINK_BROKER": "127.0.0.1:5000",
        "MOOLINK_GROUP": "run-1",
        "MOOLINK_PEER_INDEX": "1",
        "MOOLINK_PEER_NAME": "peer-1",
        "MOOLINK_NUM_PEERS": "2",
        "MOOLINK_CORES": "3",
    }
    config = parse(["--env", "pong"], environ)
    assert config.group.connect == "127.0.0.1:5000"
    assert (config.group_name, config.peer_name) == ("run-1", "peer-1")
    assert (config.actor.num_envs, config.learner.batch_size) == (16, 4)
    assert config.virtual_batch_size == 8
    assert (config.env_threads, config.torch_threads) == (3, 1)
    other = parse(["--env", "pong"], environ | {"MOOLINK_PEER_INDEX": "0"})
    assert config.actor_seed != other.actor_seed
    assert config.job.seed == other.job.seed


def test_the_shallow_net_has_more_environments():
    config = parse(["--env", "pong", "--net", "shallow"], {"MOOLINK_NUM_PEERS": "2"})
    assert (config.actor.num_envs, config.learner.batch_size) == (32, 4)


def test_the_command_line_wins():
    environ = {"MOOLINK_BROKER": "127.0.0.1:5000", "MOOLINK_NUM_PEERS": "2"}
    config = parse(["--connect=10.0.0.1:4431", "--num-peers", "4", "--group", "g"], environ)
    assert config.group.connect == "10.0.0.1:4431"
    assert config.group_name == "g"
    assert (config.actor.num_envs, config.learner.batch_size) == (8, 2)
    assert config.virtual_batch_size == 8


def test_catch_has_its_own_preset():
    config = parse(["--env=catch"], {})
    assert (config.learner.net, config.actor.num_envs) == ("mlp", 32)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--num-envs", "20"], {}, "--num-envs 20 must be a multiple of"),
        (["--net", "mlp"], {}, "--net mlp belongs to --env catch"),
        (["--env", "catch", "--net", "small"], {}, "--net mlp belongs to --env catch"),
        (["--total-steps", "0"], {}, "--total-steps is 0"),
        ([], {"MOOLINK_NUM_PEERS": "two"}, "number of peers is 'two'"),
        ([], {"MOOLINK_CORES": "0"}, "MOOLINK_CORES is '0'"),
    ],
)
def test_contradictions_are_said(arguments, environ, message):
    with pytest.raises(SystemExit) as caught:
        parse(arguments, environ)
    assert message in str(caught.value)


def test_help_shows_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--env", "catch", "--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "default: 400000" in re.sub(r"[\s│]+", " ", text)
    for option in ("--vtrace-lambda", "--save-dir", "--connect", "--parallel-gradients"):
        assert option in text


def test_the_checkpoint_remembers_the_options():
    remembered = default_config("pong", 2, {}).as_dict()
    assert remembered["job"]["env"] == "pong"
    assert remembered["group"]["num_peers"] == 2


def row(steps, mean_return):
    return dict.fromkeys(COLUMNS, 0) | {"steps": steps, "mean_return": mean_return}


def test_the_curve_goes_on_from_the_checkpoint(tmp_path):
    curve = LearningCurve(tmp_path / "run")
    curve.start(0)
    for steps in (100, 200, 300):
        curve.append(row(steps, None if steps == 100 else steps / 100))
    curve.start(from_step=250)  # the checkpoint was older than the last row
    curve.append(row(260, 2.6))
    with curve.csv_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["steps"] for r in rows] == ["100", "200", "260"]
    assert rows[0]["mean_return"] == ""
    curve.plot("breakout")
    assert curve.png_path.read_bytes().startswith(b"\x89PNG")
    curve.start(0)  # another job
    assert len(curve.csv_path.read_text().splitlines()) == 1


@pytest.mark.parametrize(("framework", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_learner_needs_its_own_framework_only(framework, other):
    pytest.importorskip(framework)
    program = f"import sys; sys.modules[{other!r}] = None; import examples.{framework}.impala"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["examples"]
    assert not any(re.search(rf"\b{name}\b", need) for need in extra for name in (framework, other))
