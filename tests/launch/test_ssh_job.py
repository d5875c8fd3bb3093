"""``moolink launch --hosts``: real ssh and sshd, each host a network namespace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.sshd import MakeSshHosts, SshHosts
from tests.processes import kill
from tests.waiting import until

# A peer that says where it is and stays until the file "end" is there.
STAYS = """
import os, pathlib, sys, time
print("here", os.environ["MOOLINK_RESTARTED"], flush=True)
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.02)
print("done", flush=True)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "peer_script.py"
    path.write_text(text)
    return str(path)


def read_until(launcher: subprocess.Popen[str], *wanted: str) -> str:
    """Reads the launcher's output until each pattern was in a line of it; returns all."""
    assert launcher.stdout is not None
    missing, lines = set(wanted), []
    while missing:
        line = launcher.stdout.readline()
        assert line, f"it ended without {missing}:\n{''.join(lines)}"
        lines.append(line)
        missing = {pattern for pattern in missing if not re.search(pattern, line)}
    return "".join(lines)


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    assert launcher.stdout is not None
    output = launcher.stdout.read()  # left open for Hosts.close
    return launcher.wait(), output


def assert_empty(hosts: SshHosts, *numbers: int) -> None:
    for number in numbers:
        until(lambda n=number: not hosts.peers(n), f"the end of what ran on h{number}")


def test_four_hosts_learn_in_one_group(make_ssh_hosts: MakeSshHosts, tmp_path: Path) -> None:
    hosts = make_ssh_hosts(4)
    launcher = hosts.launch(
        *("--hosts", "h1:1,h2:1,h3:1,h4:1", "-m", "examples.torch.impala"),
        *("--env-id", "CartPole-v1", "--total-steps", "4000", "--log-interval", "1"),
        *("--save-dir", str(tmp_path / "run"), "--torch-threads", "1"),
    )
    status, output = finish(launcher)
    assert status == 0, output
    assert re.search(r"listens on .*tcp://10\.99\.0\.2:\d+", output), "on the launcher's host"
    assert (tmp_path / "run" / "learning_curve.csv").exists()
    assert_empty(hosts, 1, 2, 3, 4)


def test_peers_find_their_place_and_the_token_comes_over_the_pipe(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(2)
    text = """
import os, pathlib, time
from moolink.launch import place
mine = place()
token = pathlib.Path(os.environ["MOOLINK_TOKEN_FILE"])
print(mine.role, mine.index, mine.count, mine.name, mine.broker, os.getcwd(), flush=True)
print("mode", oct(token.stat().st_mode & 0o777), token.parent.name[:12], flush=True)
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        assert token.read_bytes().strip() not in (process / "cmdline").read_bytes()
    except OSError:
        pass
"""
    launcher = hosts.launch("--hosts", "h1:1,h2:2", "--broker-host", "h2", script(tmp_path, text))
    status, output = finish(launcher)
    assert status == 0, output
    assert re.search(r"listens on .*tcp://10\.99\.2\.2:\d+", output), "on h2"
    for index in range(3):
        assert re.search(
            rf"\[{index}\] peer {index} 3 peer-{index} 10\.99\.2\.2:\d+ {re.escape(os.getcwd())}\n",
            output,
        )
        assert f"[{index}] mode 0o600 moolink-run-" in output


def test_roles_have_hosts_and_names(make_ssh_hosts: MakeSshHosts, tmp_path: Path) -> None:
    hosts = make_ssh_hosts(2)
    text = "import os; print(os.environ['SSH_CONNECTION'].split()[2], os.environ.get('SAID'))"
    job = tmp_path / "job.toml"
    job.write_text(
        f'[[role]]\nname = "learner"\ncommand = ["{script(tmp_path, text)}"]\nhosts = ["h2"]\n'
        f'[[role]]\nname = "actor"\ncommand = ["{script(tmp_path, text)}"]\ncount = 2\n'
        'env = {SAID = "a b"}\n'
    )
    status, output = finish(hosts.launch("--hosts", "h1,h2", str(job)))
    assert status == 0, output
    for line in ("[learner 0] 10.99.2.2 None", "[actor 0] 10.99.1.2 a b", "[actor 1] 10.99.2.2 a"):
        assert line in output


def test_the_exit_status_is_the_failed_peers_and_its_error_is_last(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(2)
    text = """
import os, sys, time
if os.environ["MOOLINK_PEER_INDEX"] == "1":
    print("out of bread", file=sys.stderr)
    sys.exit(7)
time.sleep(600)
"""
    status, output = finish(hosts.launch("--hosts", "h1:1,h2:1", script(tmp_path, text)))
    assert status == 7, output
    assert output.splitlines()[-1] == "[1] out of bread"
    assert re.search(r"peer 1 \(pid \d+ on h2\) exited with status 7 and ended the job", output)
    assert_empty(hosts, 1, 2)


def test_a_failed_peer_is_restarted_on_its_host(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(1)
    text = "import os, sys; print('run'); sys.exit(int(os.environ['MOOLINK_RESTARTED']) == 0)"
    launcher = hosts.launch("--hosts", "h1", "--restart", "1", script(tmp_path, text))
    status, output = finish(launcher)
    assert status == 0, output
    assert output.count("[0] run") == 2
    assert "exited with status 1; restarting it" in output


def test_ctrl_c_ends_every_process_on_every_host(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(2)
    launcher = hosts.launch("--hosts", "h1:1,h2:1", script(tmp_path, STAYS), str(tmp_path))
    read_until(launcher, r"\[0\] here", r"\[1\] here")
    launcher.send_signal(signal.SIGINT)
    status, output = finish(launcher)
    assert status == 128 + signal.SIGINT, output
    assert "ended by SIGINT" in output
    assert_empty(hosts, 1, 2)


def test_no_process_survives_the_launchers_sigkill(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(2)
    launcher = hosts.launch("--hosts", "h1:1,h2:1", script(tmp_path, STAYS), str(tmp_path))
    read_until(launcher, r"\[0\] here", r"\[1\] here")
    launcher.kill()
    assert_empty(hosts, 1, 2)


def power_cut(hosts: SshHosts) -> None:
    hosts.kill(2)


def cut_link(hosts: SshHosts) -> None:
    hosts.hosts.cut(2)
    assert_empty(hosts, 2)  # its agent hears nothing and ends them


def kill_agent(hosts: SshHosts) -> None:
    agents = [
        pid for pid in hosts.peers(2) if b"moolink.launch.agent" in command_line(pid)
    ]  # the shell that started it has been replaced by it
    for pid in agents:
        kill(pid)
    assert_empty(hosts, 2)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("lose", [power_cut, cut_link, kill_agent])
def test_what_ran_on_a_lost_host_comes_back_with_it(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path, lose: Callable[[SshHosts], None]
) -> None:
    hosts = make_ssh_hosts(2)
    launcher = hosts.launch(
        *("--hosts", "h1:1,h2:1", "--restart", "1", "--lost-after", "4"),
        *(script(tmp_path, STAYS), str(tmp_path)),
    )
    read_until(launcher, r"\[0\] here 0", r"\[1\] here 0")
    others = hosts.peers(1)
    lose(hosts)
    read_until(launcher, r"peer 1 \(pid \d+ on h2\) is lost with its host: .*; restarting it when")
    if lose is power_cut:
        hosts.boot(2)
    hosts.hosts.mend(2)
    read_until(launcher, r"\[1\] here 1")
    assert hosts.peers(1) == others, "nothing happened to them"
    (tmp_path / "end").touch()
    status, output = finish(launcher)
    assert status == 0, output
    assert "[0] done" in output
    assert "[1] done" in output
    assert_empty(hosts, 1, 2)


def test_a_lost_host_ends_a_job_whose_role_has_no_restarts_and_not_that_of_an_elastic_one(
    make_ssh_hosts: MakeSshHosts, tmp_path: Path
) -> None:
    hosts = make_ssh_hosts(2)
    command = f'command = ["{script(tmp_path, STAYS)}", "{tmp_path}"]'
    learner = f'[[role]]\nname = "learner"\n{command}\nhosts = ["h1"]\n'
    actor = f'[[role]]\nname = "actor"\n{command}\nhosts = ["h2"]\n'
    job = tmp_path / "job.toml"

    job.write_text(learner + actor)
    launcher = hosts.launch(str(job))
    read_until(launcher, r"\[learner 0\] here", r"\[actor 0\] here")
    kill_agent(hosts)
    status, output = finish(launcher)
    assert status == 1, output
    assert re.search(r"actor 0 \(pid \d+ on h2\) is lost with its host: .* ended the job", output)
    assert_empty(hosts, 1, 2)

    job.write_text(learner + actor + "elastic = true\n")
    launcher = hosts.launch(str(job))
    read_until(launcher, r"\[learner 0\] here", r"\[actor 0\] here")
    kill_agent(hosts)
    read_until(launcher, r"it is started again when the host is back", r"\[actor 0\] here 1")
    (tmp_path / "end").touch()
    status, output = finish(launcher)
    assert status == 0, output


def test_all_that_peers_write_arrives(make_ssh_hosts: MakeSshHosts, tmp_path: Path) -> None:
    hosts = make_ssh_hosts(1)
    text = "for number in range(40_000):\n    print(number, 'x' * 200)"
    status, output = finish(hosts.launch("--hosts", "h1", script(tmp_path, text)))
    assert status == 0
    numbers = [int(line.split()[1]) for line in output.splitlines() if line.startswith("[0]")]
    assert numbers == list(range(40_000))


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (["--hosts", "h1,nowhere"], "user_key", r"host nowhere cannot .*check the host's name"),
        (["--hosts", "h1"], "other_key", r"host h1 cannot .*Permission denied.*authorized_keys"),
        (["--hosts", "h1", "--python", "/no/python"], "user_key", r"host h1 cannot .*--python"),
        (["--hosts", "h1", "--ssh", "no-ssh"], "user_key", r"host h1 .*install an SSH client"),
        (["--hosts", "h1", "--directory", "/nowhere"], "user_key", r"host h1 .*--directory"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_with_the_remedy(
    make_ssh_hosts: MakeSshHosts,
    tmp_path: Path,
    options: list[str],
    key: str,
    words: str,
) -> None:
    hosts = make_ssh_hosts(1)
    status, output = finish(hosts.launch(*options, script(tmp_path, STAYS), key=key))
    assert status == 1
    assert re.search(words, output), output
    assert_empty(hosts, 1)
