"""Descriptions of jobs: what they hold, and errors that name the role and the key."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from moolink.launch import Job, Role

WHOLE = """
name = "atari"
group = "mine"
grace = 3
insecure = true
broker = "10.0.0.1:4431"

[[role]]
name = "learner"
command = ["-m", "train", "--lr=1"]
restarts = 2
gpus = 1
env = {SEED = "4"}

[[role]]
name = "actor"
command = "act.py 'two words'"
count = 8
cores = 2
elastic = true
hosts = ["a:4", "me@b:4"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def test_a_file_says_the_same_as_a_call(tmp_path: Path) -> None:
    learner = Role("learner", ["-m", "train", "--lr=1"], env={"SEED": "4"}, restarts=2, gpus=1)
    actor = Role(
        "actor", ["act.py", "two words"], 8, cores=2, elastic=True, hosts=["a:4", "me@b:4"]
    )
    job = Job(
        "atari", [learner, actor], group="mine", insecure=True, broker="10.0.0.1:4431", grace=3
    )
    assert Job.from_toml(written(tmp_path, WHOLE)) == job
    assert job.count == 9
    assert pickle.loads(pickle.dumps(job)) == job


def test_scripts_and_modules_are_run_by_python() -> None:
    assert Role("a", ["train.py", "-x"]).argv("py") == ["py", "train.py", "-x"]
    assert Role("a", ["-m", "train"]).argv("py") == ["py", "-m", "train"]
    assert Role("a", ["./serve", "-x"]).argv("py") == ["./serve", "-x"]


def test_a_description_does_not_change_with_what_it_was_made_from() -> None:
    command, env = ["train.py"], {"A": "1"}
    job = Job.of_command(command, 2, env=env, restarts=1)
    command.append("-x")
    env["A"] = "2"
    (role,) = job.roles
    assert (role.name, role.command, role.env, role.count) == ("peer", ("train.py",), {"A": "1"}, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.count = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "a b"}, "role 'a b': name must be 1 to 40 letters"),
        ({"name": "broker"}, "role 'broker': name is taken"),
        ({"command": []}, "role 'actor': command is empty"),
        ({"command": "act.py"}, "role 'actor': command is 'act.py'; it must be a list of strings"),
        ({"command": ["-m"]}, "role 'actor': command has no module after -m"),
        ({"count": 0}, "role 'actor': count is 0; it must be a whole number, at least 1"),
        ({"count": True}, "role 'actor': count is True"),
        ({"restarts": -1}, "role 'actor': restarts is -1"),
        ({"cores": 0.5}, "role 'actor': cores is 0.5"),
        ({"gpus": "1"}, "role 'actor': gpus is '1'"),
        ({"elastic": 1}, "role 'actor': elastic is 1; it must be true or false"),
        ({"env": {"A": 1}}, "role 'actor': env: A is 1; it must be a string"),
        ({"env": {"A B": "1"}}, "role 'actor': env has 'A B' in it"),
        ({"hosts": ["a", 1]}, "role 'actor': hosts has 1 in it"),
    ],
)
def test_an_error_names_the_role_and_the_key(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Role(**({"name": "actor", "command": ["act.py"]} | arguments))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": ""}, "job: name is ''"),
        ({"roles": []}, "job: roles must be one Role or several"),
        ({"roles": [Role("a", ["x"]), Role("a", ["y"])]}, "two roles have the name 'a'"),
        ({"broker": "localhost"}, "job: broker is 'localhost'; it must be HOST:PORT"),
        ({"grace": -1}, "job: grace is -1"),
        ({"insecure": True, "token_file": "t"}, "job: give one of token_file and insecure"),
        ({"group": " a"}, "its name begins or ends in space"),
    ],
)
def test_an_error_names_the_jobs_key(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Job(**({"name": "job", "roles": [Role("a", ["x"])]} | arguments))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'a'", "job: there is no table [[role]]"),
        ("[[role]]\nname = 'a'", "role 'a': command is missing"),
        ("[[role]]\ncommand = 'x'", "role '?': name is missing"),
        ("[[role]]\nname = 'a'\ncommand = 'x'\ncuont = 2", "role 'a': cuont is no key of it"),
        ("gruop = 'g'\n[[role]]\nname = 'a'\ncommand = 'x'", "job: gruop is no key of it"),
        ("[[role]]\nname = 'a'\ncommand = 'x \"'", "role 'a': command: No closing quotation"),
        ("[[role]", "Expected"),
    ],
)
def test_an_error_in_a_file_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as refusal:
        Job.from_toml(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert words in str(refusal.value)
