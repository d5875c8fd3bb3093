"""Jobs of several roles on this machine, by ``moolink launch`` and by a call."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moolink.cli.launch import main

LONG = 60.0  # only bounds a hang

REPORT = """
import json, os, sys
names = ("MOOLINK_ROLE", "MOOLINK_PEER_INDEX", "MOOLINK_NUM_PEERS", "MOOLINK_PEER_NAME",
         "MOOLINK_GROUP", "MOOLINK_CORES", "OMP_NUM_THREADS", "SEED", "CUDA_VISIBLE_DEVICES")
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:]]))
"""
# Counts its runs in a file, and fails as often as its second argument says.
FAILS = """
import pathlib, sys
count = pathlib.Path(sys.argv[1])
runs = count.read_text() if count.exists() else ""
count.write_text(runs + "x")
sys.exit(9 if len(runs) < int(sys.argv[2]) else 0)
"""
STAYS = "import time; print('here', flush=True); time.sleep(600)"


def script(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def job(folder: Path, *roles: tuple[str, list[str], str]) -> str:
    """Writes the file of a job at a broker that nobody needs."""
    tables = [
        f"[[role]]\nname = {json.dumps(name)}\ncommand = {json.dumps(command)}\n{more}\n"
        for name, command, more in roles
    ]
    path = folder / "job.toml"
    path.write_text('broker = "h:1"\ngrace = 1.0\n' + "".join(tables))
    return str(path)


def launch(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moolink", "launch", *arguments]
    return subprocess.run(
        command, env={**os.environ, **options}, capture_output=True, text=True, timeout=LONG,
        check=False,
    )  # fmt: skip


def test_processes_learn_their_place_and_get_what_their_role_says(tmp_path: Path) -> None:
    report = script(tmp_path, "report", REPORT)
    path = job(
        tmp_path,
        ("learner", [report, "--lr", "1"], "gpus = 1\ncores = 3"),
        ("actor", ["-m", "report"], 'count = 2\nenv = {SEED = "7"}'),
    )
    result = launch(path, PYTHONPATH=f"{tmp_path}:{os.getcwd()}", CUDA_VISIBLE_DEVICES="4,5")
    assert result.returncode == 0, result.stderr
    seen = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition("] ")
        seen[prefix + "]"] = json.loads(text)
    assert sorted(seen) == ["[actor 0]", "[actor 1]", "[learner 0]"]
    learner, arguments = seen["[learner 0]"]
    actor, _ = seen["[actor 1]"]
    assert arguments == ["--lr", "1"]
    assert (learner["MOOLINK_ROLE"], actor["MOOLINK_ROLE"]) == ("learner", "actor")
    assert (actor["MOOLINK_PEER_INDEX"], actor["MOOLINK_NUM_PEERS"]) == ("1", "2")
    assert actor["MOOLINK_GROUP"] == learner["MOOLINK_GROUP"]
    assert (learner["SEED"], actor["SEED"]) == (None, "7")
    assert (learner["MOOLINK_CORES"], learner["OMP_NUM_THREADS"]) == ("3", "3")
    assert (learner["CUDA_VISIBLE_DEVICES"], actor["CUDA_VISIBLE_DEVICES"]) == ("4", "")
    names = {place["MOOLINK_PEER_NAME"] for place, _ in seen.values()}
    assert len(names) == 3, "no two have the same at a broker of others"


def test_roles_have_restarts_of_their_own(tmp_path: Path) -> None:
    fails = script(tmp_path, "fails", FAILS)
    learner, actor = tmp_path / "learner", tmp_path / "actor"
    path = job(
        tmp_path,
        ("learner", [fails, str(learner), "0"], "restarts = 5"),
        ("actor", [fails, str(actor), "2"], "restarts = 2"),
    )
    assert launch(path).returncode == 0
    assert (learner.read_text(), actor.read_text()) == ("x", "xxx")
    actor.unlink()
    path = job(tmp_path, ("actor", [fails, str(actor), "2"], "restarts = 1"))
    result = launch(path)
    assert result.returncode == 9
    assert "actor 0 (pid " in result.stderr
    assert "exited with status 9 and ended the job without a word" in result.stderr


def test_elastic_roles_do_not_end_the_job_and_end_with_it(tmp_path: Path) -> None:
    stays = script(tmp_path, "stays", STAYS)
    # Until the launcher has seen the evaluator's end: before that its process is still there.
    waits = script(
        tmp_path,
        "waits",
        "import pathlib, sys, time\n"
        "evaluator = pathlib.Path(sys.argv[1])\n"
        "while not evaluator.exists() or pathlib.Path('/proc', evaluator.read_text()).exists():\n"
        "    time.sleep(0.01)\n",
    )
    fails = script(
        tmp_path,
        "fails",
        "import os, pathlib, sys\n"
        "written = pathlib.Path(sys.argv[1] + '.new')\n"
        "written.write_text(str(os.getpid()))\n"
        "written.rename(sys.argv[1])\n"
        "sys.exit(9)\n",
    )
    failed = tmp_path / "failed"
    path = job(
        tmp_path,
        ("learner", [waits, str(failed)], ""),
        ("actor", [stays], "elastic = true"),
        ("evaluator", [fails, str(failed)], "elastic = true"),
    )
    result = launch(path)
    assert result.returncode == 0, result.stderr
    assert re.search(
        r"evaluator 0 \(pid \d+\) exited with status 9; the job goes on without it", result.stderr
    )
    assert "ended by" not in result.stderr


def test_a_job_of_elastic_roles_ends_with_the_last_of_them(tmp_path: Path) -> None:
    fails = script(tmp_path, "fails", FAILS)
    path = job(tmp_path, ("actor", [fails, str(tmp_path / "n"), "1"], "count = 2\nelastic = true"))
    result = launch(path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "n").read_text() == "xx"


def test_a_program_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    result = launch(job(tmp_path, ("actor", ["/no/such/program"], "")))
    assert result.returncode == 127
    assert "cannot execute /no/such/program" in result.stderr


def test_a_broker_that_is_killed_is_started_again_on_its_port(tmp_path: Path) -> None:
    text = """
import os, pathlib, signal, sys
import moolink
from moolink.launch import place
mine = place()
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        stat = (process / "stat").read_text().rpartition(") ")[2].split()
        command = (process / "cmdline").read_bytes()
    except OSError:
        continue
    if int(stat[1]) == os.getppid() and b"moolink.broker" in command:
        os.kill(int(process.name), signal.SIGKILL)
with moolink.Rpc(mine.name) as rpc, moolink.Group(rpc, mine.group) as group:
    rpc.connect(mine.broker)
    group.wait_for_members(1)
print("member", flush=True)
"""
    result = launch(script(tmp_path, "kills", text))
    assert result.returncode == 0, result.stderr
    assert "[0] member" in result.stdout
    assert re.search(r"the broker was killed by SIGKILL .*; restarting it on 127", result.stderr)


def test_a_job_is_launched_by_a_call(tmp_path: Path) -> None:
    stays = script(tmp_path, "stays", STAYS)
    text = f"""
import sys
from moolink.launch import Job, Role, launch
roles = [
    Role("actor", [{stays!r}], 2, elastic=True),
    Role("learner", ["-c", "import sys; print('learns'); sys.exit(4)"]),
]
roles[1] = Role("learner", [sys.executable, *roles[1].command])
status = launch(Job("call", roles, grace=0.5))
print("status", status)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.stdout.splitlines()[-1] == "status 4", done.stderr
    assert "[learner 0] learns" in done.stdout
    assert "moolink launch: learner 0 (pid " in done.stderr


def test_ctrl_c_ends_all_roles(tmp_path: Path) -> None:
    stays = script(tmp_path, "stays", STAYS)
    path = job(tmp_path, ("learner", [stays], ""), ("actor", [stays], "elastic = true"))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "moolink", "launch", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert launcher.stdout is not None
    assert {launcher.stdout.readline() for _ in range(2)} == {
        "[learner 0] here\n",
        "[actor 0] here\n",
    }
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=LONG)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "moolink launch: ended by SIGINT" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no job given"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["nowhere.toml"], "No such file or directory: 'nowhere.toml'"),
        (["-n", "0", __file__], "role 'peer': count is 0"),
        (["-n", "2", "{job}"], "--peers is for scripts: {job} says it"),
        (["--gpus", "2", "{job}"], "--gpus is for scripts"),
        (["{job}", "more"], "arguments after {job}"),
        (["--broker", "h", "{job}"], "job: broker is 'h'; it must be HOST:PORT"),
        (["--insecure", "--token-file", "t", "{job}"], "give one of --token-file and --insecure"),
        (["--hosts", "a:0", __file__], "--hosts: 'a:0' is no host"),
        (["--hosts", "a:1", "-n", "3", __file__], "role 'peer': count is 3, but the hosts take 1"),
        (["--broker-host", "a", __file__], "broker_host is 'a', but there are no hosts"),
        (["--hosts", "b", "--broker-host", "a", __file__], "broker_host is 'a'; the hosts are b"),
        (["--env", "A", __file__], "'A' must be NAME=VALUE"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    path = job(tmp_path, ("actor", ["x"], ""))
    with pytest.raises(SystemExit) as refusal:
        main([argument.replace("{job}", path) for argument in arguments])
    assert refusal.value.code == 2
    assert words.replace("{job}", path) in capsys.readouterr().err
