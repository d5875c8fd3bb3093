"""``moolink run`` as a user meets it: real processes, real signals, the real broker."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from moolink.cli.run import parse
from tests.processes import wait_until_gone

# Waits only bound a hang: nothing here asserts how fast something is.
LONG = 60.0

REPORT = """
import json, os, sys
print(json.dumps([{k: v for k, v in os.environ.items() if k.startswith(("MOOLINK", "OMP"))},
                  sys.argv[1:]]))
"""

WAIT = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
index = os.environ["MOOLINK_PEER_INDEX"]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / f"{index}.tmp").write_text(f"{os.getpid()} {worker.pid}")
(folder / f"{index}.tmp").rename(folder / f"{index}.pids")
time.sleep(600)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moolink", "run", *arguments]


def script(folder: pathlib.Path, text: str) -> str:
    path = folder / "peer_script.py"
    path.write_text(text)
    return str(path)


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), check=False, capture_output=True, text=True, timeout=LONG, **options
    )


def start_waiting(folder: pathlib.Path, *options: str) -> tuple[subprocess.Popen, list[int]]:
    """Starts two waiting peers; returns the launcher and all processes of the job's peers."""
    launcher = subprocess.Popen(
        command("-n", "2", *options, script(folder, WAIT), str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + LONG
    while len(list(folder.glob("*.pids"))) < 2:
        assert launcher.poll() is None, launcher.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    return launcher, pids


def test_peers_learn_who_they_are_and_arguments_are_verbatim(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    arguments = ["-n", "7", "--", "--lr=1", "-m"]
    result = run("-n", "3", "--cores", "7", script(tmp_path, REPORT), *arguments, env=environment)
    assert result.returncode == 0, result.stderr
    seen = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        if prefix == "[broker]":
            continue
        seen[prefix], rest = json.loads(text)
        assert rest == arguments
    assert sorted(seen) == ["[0]", "[1]", "[2]"]
    assert [seen[f"[{i}]"]["MOOLINK_PEER_INDEX"] for i in range(3)] == ["0", "1", "2"]
    assert [seen[f"[{i}]"]["MOOLINK_CORES"] for i in range(3)] == ["3", "2", "2"]
    assert [seen[f"[{i}]"]["OMP_NUM_THREADS"] for i in range(3)] == ["3", "2", "2"]
    assert {peer["MOOLINK_NUM_PEERS"] for peer in seen.values()} == {"3"}
    assert len({peer["MOOLINK_GROUP"] for peer in seen.values()}) == 1
    (broker,) = {peer["MOOLINK_BROKER"] for peer in seen.values()}
    assert broker.startswith("127.0.0.1:")
    assert int(broker.rpartition(":")[2]) > 0


GROUP_OF_ITS_OWN = """
import moolink
from moolink.launch import place

where = place()
with moolink.Rpc(where.name) as rpc:
    rpc.connect(where.broker)
    with moolink.Group(rpc, where.group) as group:
        group.wait_for_members(1)
"""


def test_a_job_that_ends_well_says_nothing_of_itself(tmp_path):
    done = run("-n", "1", script(tmp_path, GROUP_OF_ITS_OWN))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["SCRIPT", "-n", "2"], ["run -n 2 SCRIPT"]),
        (["SCRIPT", "-n2", "--restart=3"], ["run -n2 SCRIPT", "run --restart=3 SCRIPT"]),
        (["-n", "1", "SCRIPT", "-n", "2"], []),
        (["--", "SCRIPT", "-n", "2"], []),
        (["SCRIPT", "--group", "mine"], []),
    ],
)
def test_options_after_the_script_are_said_to_be_its_own(
    tmp_path: pathlib.Path, arguments: list[str], told: list[str], capsys: pytest.CaptureFixture
) -> None:
    path = script(tmp_path, "")
    parse([path if argument == "SCRIPT" else argument for argument in arguments])
    lines = capsys.readouterr().err.replace(path, "SCRIPT").splitlines()
    assert [line.rpartition(": moolink ")[2] for line in lines] == told
    assert all("options of moolink run come before the script" in line for line in lines)


def test_connect_uses_a_running_broker_and_group(tmp_path):
    result = run("--connect", "10.0.0.1:99", "--group", "mine", script(tmp_path, REPORT))
    environment, _ = json.loads(result.stdout.removeprefix("[0] "))
    assert environment["MOOLINK_BROKER"] == "10.0.0.1:99"
    assert environment["MOOLINK_GROUP"] == "mine"


def test_a_module_is_run_from_the_working_directory(tmp_path):
    script(tmp_path, "import sys; print('module', sys.argv[1:])")
    result = run(
        "--connect", "h:1", "-m", "peer_script", "--help", cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert result.stdout == "[0] module ['--help']\n"


def test_the_first_failure_ends_the_job_with_its_error_last(tmp_path):
    text = """
import os, time
if os.environ["MOOLINK_PEER_INDEX"] == "1":
    raise ValueError("the unroll is too short")
time.sleep(600)
"""
    result = run("-n", "2", "--connect", "h:1", script(tmp_path, text))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "[1] ValueError: the unroll is too short"
    assert "peer 1 (pid " in result.stderr
    assert "exited with status 1" in result.stderr


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(7)", 7, "exited with status 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11, "was killed by SIGSEGV"),
    ],
)
def test_the_exit_status_is_the_failed_peers(tmp_path, end, status, words):
    result = run("--connect", "h:1", script(tmp_path, f"import os, signal, sys\n{end}"))
    assert result.returncode == status
    assert words in result.stderr


def test_peers_at_a_running_broker_say_their_group(tmp_path):
    result = run(
        "--connect", "h:1", script(tmp_path, "import os; print(os.environ['MOOLINK_GROUP'])")
    )
    group = result.stdout.split()[-1]
    assert (
        f"these peers form the group {group}; others join it with --group {group}" in result.stderr
    )
    result = run("--connect", "h:1", "--group", "g", script(tmp_path, ""))
    assert "others join it" not in result.stderr


def test_a_peer_that_crashes_prints_its_python_stacks(tmp_path):
    text = "import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncrash()"
    result = run("--connect", "h:1", script(tmp_path, text))
    assert "[0] Fatal Python error: Segmentation fault" in result.stderr
    assert "line 3 in crash" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_of_the_job(tmp_path, number):
    launcher, pids = start_waiting(tmp_path)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=LONG)
    assert launcher.returncode == 128 + number, output
    assert f"ended by {number.name}" in output
    wait_until_gone(pids)


def test_a_peer_that_ignores_sigterm_is_killed(tmp_path):
    text = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    launcher = subprocess.Popen(
        command("--connect", "h:1", "--grace", "0.2", script(tmp_path, text), str(tmp_path))
    )
    deadline = time.monotonic() + LONG
    while not (tmp_path / "0.pids").exists():
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LONG) == 128 + signal.SIGINT
    wait_until_gone([int(pid) for pid in (tmp_path / "0.pids").read_text().split()])


def test_a_peer_may_save_its_state_on_sigterm(tmp_path):
    text = """
import signal, sys, time
def save(*_):
    time.sleep(2)  # as long as a large model's checkpoint may take
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen(
        command("--connect", "h:1", script(tmp_path, text)), stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout.readline() == "[0] ready\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "[0] saved\n"
    assert launcher.wait(LONG) == 128 + signal.SIGINT
    launcher.stdout.close()


def test_no_orphan_survives_the_launchers_sigkill(tmp_path):
    launcher, pids = start_waiting(tmp_path)
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    pids += [int(pid) for pid in children.read_text().split()]
    launcher.kill()
    launcher.wait(LONG)
    launcher.stdout.close()
    wait_until_gone(pids)


TRAINS = """
import os, pathlib, sys, time
import torch, moolink
folder = pathlib.Path(sys.argv[1])
index = int(os.environ["MOOLINK_PEER_INDEX"])
runs = folder / f"runs-{index}"
count = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (count + 1))

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

if index == 1 and sys.argv[2] == "before":
    if count == 0:
        sys.exit(7)
    (folder / "restarted-1").touch()
    wait_for(folder / "ended-0")  # it is restarted late
if index == 1 and sys.argv[2] == "after":
    wait_for(folder / "ended-0")
    sys.exit(7)
if index == 0 and sys.argv[2] == "before":
    wait_for(folder / "restarted-1")
model = [torch.zeros(2, requires_grad=True)]
with moolink.Rpc(os.environ["MOOLINK_PEER_NAME"]) as rpc:
    rpc.connect(os.environ["MOOLINK_BROKER"])
    with moolink.Group(rpc, os.environ["MOOLINK_GROUP"]) as group, moolink.Accumulator(
        "model", model, group=group
    ) as accumulator:
        for step in accumulator.training_steps(lambda: None, until=lambda t: t["turns"] >= 3):
            model[0].grad = torch.ones(2)
            step.reduce(1, {"turns": 1})
            print("turn", flush=True)
(folder / f"ended-{index}").touch()
"""


def test_a_peer_restarted_after_the_end_does_not_train_the_job_again(tmp_path):
    path = script(tmp_path, TRAINS)
    result = run("-n", "2", "--restart", "3", path, str(tmp_path), "before")
    assert result.returncode == 1, result.stderr
    assert (tmp_path / "runs-1").read_text() == "xx"  # once, before the others had ended
    assert not (tmp_path / "ended-1").exists()
    assert "[1] turn" not in result.stdout
    assert re.search(r"the job of group 'run-\w+' has finished at version 3", result.stderr)
    assert "it is not restarted, for the job has finished" in result.stderr


def test_a_peer_that_fails_after_the_end_leaves_the_others_alone(tmp_path):
    path = script(tmp_path, TRAINS)
    result = run("-n", "2", "--restart", "3", path, str(tmp_path), "after")
    assert result.returncode == 7, result.stderr
    assert (tmp_path / "runs-1").read_text() == "x"
    assert "it is not restarted, for the job has finished" in result.stderr


def test_a_failed_peer_is_restarted_as_often_as_asked(tmp_path):
    text = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
runs = int(count.read_text()) if count.exists() else 0
count.write_text(str(runs + 1))
sys.exit(0 if runs == 2 else 5)
"""
    count = tmp_path / "count"
    path = script(tmp_path, text)
    result = run("--connect", "h:1", "--restart", "2", path, str(count))
    assert (result.returncode, count.read_text()) == (0, "3"), result.stderr
    count.unlink()
    assert run("--connect", "h:1", "--restart", "1", path, str(count)).returncode == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "no script given"),
        (["-n", "2", "-m"], "no script given"),
        (["-n", "0", __file__], "-n must be at least 1"),
        (["nowhere.py"], "no such script: nowhere.py\n"),
        (["package.nowhere"], "no such script: package.nowhere (a module is run with -m pack"),
        (["--connect", "localhost", __file__], "--connect takes HOST:PORT"),
        (["--frobnicate", __file__], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(capsys, arguments, words):
    with pytest.raises(SystemExit) as refusal:
        parse(arguments)
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err


def test_output_to_a_closed_pipe_does_not_stop_the_job(tmp_path):
    text = "print('x' * 1000, flush=True)\n" * 200
    job = " ".join(command("--connect", "h:1", script(tmp_path, text)))
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {job} | head -n 1"],
        check=False, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
