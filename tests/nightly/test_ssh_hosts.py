"""Training on four hosts that are reached by SSH, one of which loses its power in between.

`tests/launch/test_ssh.py` has short twins.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import sshd
from tests.network import hosts


@pytest.fixture
def four_hosts(tmp_path: Path) -> Iterator[sshd.SshHosts]:
    if reason := sshd.why_not() or hosts.why_not():
        pytest.skip(reason)
    with hosts.Hosts(5) as namespaces:
        servers = sshd.SshHosts(namespaces, 4, tmp_path)
        yield servers
        servers.close()


@pytest.mark.timeout(1200)
def test_a_host_loses_its_power_while_four_learn_and_comes_back(
    four_hosts: sshd.SshHosts, tmp_path: Path
) -> None:
    launcher = four_hosts.launch(
        *("--hosts", "h1:1,h2:1,h3:1,h4:1", "--restart", "1", "--lost-after", "5"),
        *("-m", "examples.torch.impala", "--env-id", "CartPole-v1", "--total-steps", "200000"),
        *("--torch-threads", "1", "--log-interval", "1", "--save-dir", str(tmp_path / "run")),
    )
    assert launcher.stdout is not None
    happened, lines = [], []
    for line in launcher.stdout:
        lines.append(line)
        if " of 4 peers" in line and not happened:
            happened.append("all four learned")
            four_hosts.kill(3)
        elif re.search(r" of [123] peers", line) and happened == ["all four learned"]:
            happened.append("the others went on")  # not each of them is in every second's rounds
        elif "is lost with its host" in line:
            happened.append("it was missed")
            four_hosts.boot(3)
            four_hosts.hosts.mend(3)
        elif "host h3 is back" in line:
            happened.append("it was back")
        elif " of 4 peers" in line and happened[-1] == "it was back":
            happened.append("all four learned again")
    output = "".join(lines)
    assert launcher.wait() == 0, output
    assert happened == [
        "all four learned",
        "the others went on",
        "it was missed",
        "it was back",
        "all four learned again",
    ], output
    with (tmp_path / "run" / "learning_curve.csv").open() as file:
        returns = [float(row["mean_return"]) for row in csv.DictReader(file) if row["mean_return"]]
    assert max(returns) > 400
