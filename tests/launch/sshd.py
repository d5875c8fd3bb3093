"""Hosts with an SSH server each: network namespaces in which sshd runs with keys of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.network.hosts import Hosts
from tests.processes import kill
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PORT = 2222


def why_not() -> str | None:
    """Returns why there can be no SSH servers here, or ``None`` if there can."""
    missing = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
    if server() is None:
        missing.append("sshd")
    if missing:
        return f"{', '.join(missing)} not found: install openssh-server"
    if os.geteuid() != 0:
        return "sshd with a configuration of the test's own needs root"
    return None


def server() -> str | None:
    """Returns the path of sshd, which must be started by it."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


class SshHosts:
    """Hosts 1, 2, ... with a server; the launcher is on host 0, which has none.

    Args:
        hosts: the namespaces.
        folder: for keys and configurations.
    """

    def __init__(self, hosts: Hosts, count: int, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self._servers: dict[int, subprocess.Popen[str]] = {}
        for name in ("host_key", "user_key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(
            "".join(f"[{hosts.address(n)}]:{PORT} {public}" for n in range(1, count + 1))
        )
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"Port {PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
            "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
            "PermitRootLogin yes\nKbdInteractiveAuthentication no\nLogLevel ERROR\nUseDNS no\n"
        )
        names = "".join(f"Host h{n}\n  HostName {hosts.address(n)}\n" for n in range(1, count + 1))
        for key in ("user_key", "other_key"):
            (folder / f"ssh_config_{key}").write_text(
                f"{names}Host *\n  User root\n  Port {PORT}\n  IdentityFile {folder}/{key}\n"
                f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
            )
        Path("/run/sshd").mkdir(exist_ok=True)  # into which the server locks itself
        for number in range(1, count + 1):
            self.boot(number)

    def launch(self, *arguments: str, key: str = "user_key") -> subprocess.Popen[str]:
        """Starts ``moolink launch`` on host 0, which reaches h1, h2, ...; its output is in a pipe.

        Args:
            key: with which it goes to the hosts; ``other_key`` opens none.
        """
        process: subprocess.Popen[str] = self.hosts.start(
            0,
            "moolink",
            *("launch", "--ssh", f"ssh -F {self.folder}/ssh_config_{key}", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return process

    def boot(self, number: int) -> None:
        """Starts the server of a host, and waits until it listens."""
        program = server()
        assert program is not None
        self._servers[number] = subprocess.Popen(
            self.hosts.command(
                number, [program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        listening = self.hosts.command(number, ["ss", "-Hltn", f"sport = :{PORT}"])
        until(lambda: bool(subprocess.check_output(listening)), "a server that listens")

    def kill(self, number: int) -> None:
        """Ends a host as a power cut does: nobody is told, and no process is left."""
        self.hosts.cut(number)
        self._kill_processes(number)
        self._servers.pop(number).communicate()
        until(lambda: not self.processes(number), "the end of a host's processes")

    def processes(self, number: int) -> list[int]:
        """The processes of a host, but the one that holds its namespace."""
        holder = self.hosts.holder(number)
        namespace = os.readlink(f"/proc/{holder}/ns/net")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            try:
                is_here = os.readlink(folder / "ns/net") == namespace
                is_zombie = (folder / "stat").read_text().rpartition(") ")[2].startswith("Z")
            except OSError:
                continue  # it ended meanwhile
            if is_here and not is_zombie and pid != holder:
                found.append(pid)
        return found

    def peers(self, number: int) -> list[int]:
        """The processes of a host that are neither its server's nor of a connection to it."""
        return [pid for pid in self.processes(number) if not _is_server(pid)]

    def close(self) -> None:
        """Kills the servers; the connections end with them."""
        for number, process in self._servers.items():
            self._kill_processes(number)
            process.communicate()

    def _kill_processes(self, number: int) -> None:
        for pid in self.processes(number):
            kill(pid)


def _is_server(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    except OSError:
        return False


MakeSshHosts = Callable[[int], SshHosts]
