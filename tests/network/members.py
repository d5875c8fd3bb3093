"""Members of one group on several hosts, told from the test's process what to do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.network.hosts import Hosts

BROKER_PORT = 4431


class RemoteMember:
    """A member in another process, on one of the hosts: see ``member.py``.

    Args:
        module: the module that the process runs. Its arguments are the broker's address, the name
            and ``options``.
    """

    def __init__(
        self,
        hosts: Hosts,
        host: int,
        name: str,
        module: str = "tests.network.member",
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        broker = f"{hosts.address(0)}:{BROKER_PORT}"
        self._process = hosts.start(
            host,
            module,
            broker,
            name,
            *options,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, do: str, **arguments: Any) -> None:
        """Tells the member to do something."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Waits for the answer to the oldest :meth:`begin`."""
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended; what it printed is above"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Tells the member to do something and returns its answer."""
        self.begin(do, **arguments)
        return self.end()


def all_do(members: list[RemoteMember], do: str, /, **arguments: Any) -> list[Any]:
    """Tells all members to do something at the same time; returns their answers."""
    for member in members:
        member.begin(do, **arguments)
    return [member.end() for member in members]


def members_on(
    hosts: Hosts, places: dict[str, int], module: str = "tests.network.member"
) -> list[RemoteMember]:
    """A broker on host 0, members of these names on these hosts; waits until they are a group.

    Args:
        places: the host of each member.
        module: that a member's process runs, with the broker's address and its name.
    """
    hosts.start(0, "moolink.broker", f"{hosts.address(0)}:{BROKER_PORT}", "--first")
    members = [RemoteMember(hosts, host, name, module) for name, host in places.items()]
    all_do(members, "formed", members=list(places))
    return members
