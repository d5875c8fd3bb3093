"""Training on four hosts that are reached by SSH, one of which loses its power in between.

`tests/launch/test_ssh_job.py` has short twins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import four_learners, sshd
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
    folder, lost = tmp_path / "run", []
    launcher = four_hosts.launch(
        *("--hosts", "h1:1,h2:1,h3:1,h4:1", "--restart", "1", "--lost-after", "5"),
        *(*four_learners.COMMAND, "--save-dir", str(folder)),
    )

    def lose(index: int) -> None:
        lost.append(index + 1)
        four_hosts.kill(index + 1)

    def bring_back() -> None:
        four_hosts.boot(lost[0])
        four_hosts.hosts.mend(lost[0])

    four_learners.learn(launcher, folder, lose, bring_back)
