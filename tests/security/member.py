"""A member of a group in a process of its own: `member.py NAME GROUP BROKER`, with a request and an
answer a line, as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import moolink


class Member:
    def __init__(self, name: str, group: str, broker: str) -> None:
        self.rpc = moolink.Rpc(name)
        self.rpc.define("whose", lambda: f"{name} of {group}")
        self.rpc.listen("127.0.0.1:0")
        self.rpc.connect(broker)
        self.group = moolink.Group(self.rpc, group)

    def members(self, count: int, seconds: float = 20.0) -> list[str]:
        """Those of the group, once there are so many or after so long."""
        return self._members(self.group, count, seconds)

    def join(self, group: str, seconds: float) -> list[str]:
        """What is seen of another group within that time."""
        other = moolink.Group(self.rpc, group)
        try:
            return self._members(other, 1, seconds)
        finally:
            other.close()

    def _members(self, group: moolink.Group, count: int, seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while len(group.members()) != count and time.monotonic() < deadline:
            group.update()
            time.sleep(0.01)
        return list(group.members())

    def call(self, peer: str, function: str, seconds: float) -> Any:
        self.rpc.set_timeout(seconds)
        return self.rpc.sync(peer, function)

    def connect(self, address: str) -> None:
        self.rpc.connect(address)

    def addresses(self) -> list[str]:
        return self.rpc.addresses()

    def knows(self) -> str:
        """Everything that this process can say of others."""
        peers = [peer["name"] for peer in self.rpc.peers()]
        return "\n".join([*peers, *self.rpc.flight_recorder(), moolink.dump()])


def main() -> None:
    member = Member(*sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(member, request["do"])(*request["with"])}
        except moolink.Error as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
