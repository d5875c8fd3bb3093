"""Several hosts on one machine: network namespaces, each with a link to a router of their own.

Nothing is named in, or left behind on, the machine itself: a namespace lives as long as a process
that waits for the end of its input, and that ends with the process that made it, however that
dies. Interfaces are named inside of the namespaces only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_READY = "ready"
# What an interface may send at once, and how long its queue may get: a switch's, roughly.
_BURST = "128kb"
_QUEUE = "20ms"
# Ports of listeners whose connections set_flow_rate() can tell apart: an aligned range.
LISTENER_PORTS = range(4416, 4480)
_FLOWS = 256


class Namespace:
    """A network namespace with a loopback interface that is up."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"ip link set lo up && echo {_READY}; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != _READY:
            raise OSError(f"unshare --net: {self._holder.communicate()[1].strip()}")
        self.pid = self._holder.pid

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs ``arguments`` in this namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *arguments]

    def run(self, *arguments: str) -> str:
        """Runs a command to its end; returns what it printed."""
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Ends the namespace; its interfaces go with it once no process is left in it."""
        self._holder.communicate()


class Hosts:
    """Hosts that reach one another through one router.

    Args:
        count: how many hosts.
        rate: bits a second of each link, in each direction, as ``tc`` writes it (``"1gbit"``);
            ``None`` leaves them as fast as they are.

    Raises:
        OSError: this machine does not let this process make network namespaces.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._namespaces: list[Namespace] = []
        try:
            self._router = self._new_namespace()
            self._router.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            self._hosts = [self._new_namespace() for _ in range(count)]
            for number in range(count):
                self._join(number)
            if rate is not None:
                self.set_rate(rate)
        except BaseException:
            self.close()
            raise

    def _new_namespace(self) -> Namespace:
        self._namespaces.append(Namespace())
        return self._namespaces[-1]

    def _join(self, number: int) -> None:
        host, router = self._hosts[number], self._router
        port = f"port{number}"
        router.run(
            *("ip", "link", "add", port, "type", "veth"),
            *("peer", "name", "uplink", "netns", str(host.pid)),
        )
        router.run("ip", "address", "add", f"10.99.{number}.1/24", "dev", port)
        router.run("ip", "link", "set", port, "up")
        host.run("ip", "address", "add", f"{self.address(number)}/24", "dev", "uplink")
        host.run("ip", "link", "set", "uplink", "up")
        host.run("ip", "route", "add", "default", "via", f"10.99.{number}.1")

    def set_rate(self, rate: str) -> None:
        """Limits every link to so many bits a second in each direction."""
        shape = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE)
        for number, host in enumerate(self._hosts):
            host.run("tc", "qdisc", "replace", "dev", "uplink", *shape)
            self._router.run("tc", "qdisc", "replace", "dev", f"port{number}", *shape)

    def set_flow_rate(self, rate: str) -> None:
        """Limits each connection to so many bits a second in each direction, as clouds do.

        The lowest byte of the dialler's port selects the limit; the listener's port is in
        ``LISTENER_PORTS``. So two of four connections share a limit in 2 % of all cases.
        """
        first, mask = LISTENER_PORTS.start, 0xFFFF & -len(LISTENER_PORTS)
        limit = f"htb rate {rate} burst {_BURST}"
        rule = "filter add dev uplink parent 1: protocol ip prio 1"
        tcp = f"{rule} u32 ht 800:: match ip protocol 6 0xff"
        lines = [
            "qdisc replace dev uplink root handle 1: htb",
            f"{rule} handle 2: u32 divisor {_FLOWS}",
        ]
        for flow in range(_FLOWS):
            lines += [
                f"class add dev uplink parent 1: classid 1:{flow + 1:x} {limit}",
                f"{rule} u32 ht 2:{flow:x}: match u32 0 0 flowid 1:{flow + 1:x}",
            ]
        lines += [
            f"{tcp} match ip sport {first} {mask:#x} hashkey mask 0x000000ff at 20 link 2:",
            f"{tcp} hashkey mask 0x00ff0000 at 20 link 2:",
        ]
        text = "\n".join(lines)
        for host in self._hosts:
            host.run("sh", "-c", f"echo '{text}' | tc -batch -")

    def connections(self, number: int) -> int:
        """Returns the number of tcp connections from a host to others."""
        return len(self._hosts[number].run("ss", "-Htn", "state", "established").splitlines())

    def address(self, number: int) -> str:
        """The host's address, without a port; every port of it is free."""
        return f"10.99.{number}.2"

    def holder(self, number: int) -> int:
        """The process that holds the host's namespace."""
        return self._hosts[number].pid

    def cut(self, number: int) -> None:
        """Takes the host's link down at the router: nothing arrives, nobody is told."""
        self._router.run("ip", "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Takes the host's link up again."""
        self._router.run("ip", "link", "set", f"port{number}", "up")

    def bytes_received(self, number: int) -> int:
        """How many bytes have come over the host's link, headers included."""
        return self._bytes(number, "rx")

    def bytes_sent(self, number: int) -> int:
        """The bytes that the host has sent over its link, headers included."""
        return self._bytes(number, "tx")

    def _bytes(self, number: int, direction: str) -> int:
        shown = json.loads(
            self._hosts[number].run("ip", "-json", "-stats", "link", "show", "uplink")
        )
        return int(shown[0]["stats64"][direction]["bytes"])

    def command(self, number: int, arguments: Sequence[str]) -> list[str]:
        """Returns the command that runs ``arguments`` on a host."""
        return self._hosts[number].command(arguments)

    def start(self, number: int, module: str, *arguments: str, **options: Any) -> Any:
        """Starts ``python -m module`` on a host; it is killed by :meth:`close`.

        Args:
            number: the host's.
            options: of :class:`subprocess.Popen`.
        """
        return self.start_python(number, "-m", module, *arguments, **options)

    def start_python(self, number: int, *arguments: str, **options: Any) -> Any:
        """Starts Python with these arguments, as :meth:`start`."""
        environment: Mapping[str, str] = {**os.environ, **options.pop("env", {})}
        process = subprocess.Popen(
            self.command(number, [sys.executable, *arguments]),
            cwd=ROOT,
            env=environment,
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kills every process that was started on the hosts and removes them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        for namespace in self._namespaces:
            namespace.close()
        self._processes, self._namespaces = [], []

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def why_not() -> str | None:
    """Returns why there can be no hosts here, or ``None`` if there can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    try:
        with Hosts(2, rate="1gbit"):
            return None
    except OSError as error:
        return f"network namespaces are not allowed here: {error}"
