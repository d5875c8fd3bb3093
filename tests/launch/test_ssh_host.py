"""``moolink launch --hosts`` with a program in place of ssh: hosts that fail, or lie."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moolink import tokens

LONG = 60.0  # only bounds a hang
HERE = """
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 2"
for last; do :; done
exec sh -c "$last"
"""
# An agent that says what its argument names, in a message about the first process.
LIES = """
import json, struct, sys
from moolink.launch import wire
def say(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
up = {"is": "up", "cores": 1, "gpus": [], "launcher": "127.0.0.1", "host": "127.0.0.1"}
given = json.loads(sys.argv[1])
say(b"\\n" + wire.GREETING + b"\\n" + wire.control(**(given if "cores" in given else up)))
for line in sys.stdin:
    message = json.loads(line)
    if message["do"] == "start":
        say(wire.control(**{"is": "started", "number": message["number"], "pid": 5}))
        if given == "deep":
            say(struct.pack(">cII", b"c", 0, 10**5) + b"[" * 10**5)
        else:
            say(wire.control(**given, number=message["number"]))
"""
STAYS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("here", flush=True)
while True:
    time.sleep(600)
"""


def ssh(folder: Path, text: str) -> str:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o700)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moolink", "launch", "--broker", "h:1", *arguments]


def launch(*arguments: str, files: int | None = None) -> subprocess.CompletedProcess[str]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))

    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=LONG, check=False,
        preexec_fn=limit,
    )  # fmt: skip


def test_what_is_no_agent_does_not_get_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    tokens.write(token, [tokens.new()])
    repeats = ssh(tmp_path, "echo Welcome; timeout 2 head -n 1 >&2; exit 1")
    result = launch("--hosts", "a", "--ssh", repeats, "--token-file", str(token), "x.py")
    assert result.returncode == 1
    assert "Welcome" in result.stderr
    assert "token" not in result.stderr


def test_too_many_files_for_all_hosts_is_an_error_and_no_hang(tmp_path: Path) -> None:
    hosts = ",".join(f"h{number}" for number in range(8))
    result = launch("--hosts", hosts, "--ssh", ssh(tmp_path, HERE), "x.py", files=24)
    assert result.returncode == 1
    assert "ssh cannot be started" in result.stderr


def test_an_error_of_the_system_is_not_one_of_the_arguments() -> None:
    result = launch("--insecure", sys.executable, "-c", "pass", files=8)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"moolink launch: .*Too many open files.*\n", result.stderr), result.stderr


def test_a_directory_may_lie_in_the_home_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ("--hosts", "a", "--insecure", "--ssh", ssh(tmp_path, HERE))
    for directory, expected in (("~/a b", tmp_path / "a b"), ("~", tmp_path)):
        result = launch(*options, f"--directory={directory}", "pwd")
        assert (result.returncode, result.stdout) == (0, f"[0] {expected}\n"), result.stderr


def test_words_of_a_host_do_not_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "ssh"
    path.write_text(
        f"#!/bin/sh\nprintf '\\033]0;title\\007refused {'x' * 5000}\\n' >&2\nexit 255\n"
    )
    path.chmod(0o755)
    result = launch("--hosts", "a", "--insecure", "--ssh", str(path), "true")
    assert result.returncode != 0
    assert "?]0;title?refused xxx" in result.stderr
    assert all(each.isprintable() or each == "\n" for each in result.stderr)
    assert "x" * 500 not in result.stderr


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    arguments = ("--ssh", ssh(tmp_path, HERE), "--grace", "50", str(tmp_path / "stays.py"))
    with subprocess.Popen(
        command("--hosts", "a", "--insecure", *arguments), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] here\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "[0] asked\n"
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 130
        assert time.monotonic() - asked < 25, "the grace is not waited for"


@pytest.mark.parametrize(
    "lie",
    [
        {"is": "up", "cores": "many", "gpus": [], "launcher": None, "host": None},
        {"is": "up", "cores": 1, "gpus": [1], "launcher": None, "host": None},
        {"is": "ended", "code": 1, "notes": []},
        {"is": "ended", "code": 1, "notes": {"x": 1}},
        {"is": "ended", "code": "x", "notes": {}},
        {"is": "drained"},
        "deep",
    ],
)
def test_a_host_that_lies_is_lost(tmp_path: Path, lie: object) -> None:
    (tmp_path / "lies.py").write_text(LIES)
    agent = f"exec {sys.executable} {tmp_path / 'lies.py'} '{json.dumps(lie)}'"
    hosts = ("--hosts", "a", "--insecure", "--ssh", ssh(tmp_path, agent))
    result = launch(*hosts, "x.py")
    assert result.returncode == 1, result.stderr
    assert "its agent is not understood" in result.stderr
    assert "Traceback" not in result.stderr
    assert "usage" not in result.stderr


def test_hosts_are_given_the_time_of_two_heartbeats(tmp_path: Path) -> None:
    result = launch("--hosts", "a", "--lost-after", "0.5", "--ssh", ssh(tmp_path, HERE), "x.py")
    assert result.returncode == 2
    assert "lost_after is 0.5; it must be at least 2 s" in result.stderr


def test_the_environment_is_not_on_command_lines(tmp_path: Path) -> None:
    shows = ssh(tmp_path, f'echo "$@" > {tmp_path}/arguments\n{HERE}')
    options = ("--insecure", "--env", "KEY=secret", "--ssh", shows)
    assert launch("--hosts", "a", *options, sys.executable, "-c", "pass").returncode == 0
    assert "secret" not in (tmp_path / "arguments").read_text()
    assert os.getcwd() in (tmp_path / "arguments").read_text()
