"""A broker with a dashboard, and members."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import moolink
from moolink import tokens
from moolink.dashboard.server import Dashboard
from tests import waiting


class Served:
    """A broker and its dashboard on loopback, and peers in its groups."""

    def __init__(self, token: tokens.Key | None = None) -> None:
        self.token = token
        self.broker = moolink.Broker(first=True, token=token)
        self.address = self.broker.listen("127.0.0.1:0")[0]
        self.dashboard = Dashboard(self.broker, "127.0.0.1:0", None)
        self.url = f"http://{self.dashboard.address}"
        self.peers: list[moolink.Rpc] = []
        self.groups: list[moolink.Group] = []

    def join(self, name: str, group: str = "g") -> moolink.Group:
        """With the group's key, if the job has a token."""
        rpc = moolink.Rpc(name, token=self.token.of_group(group) if self.token else None)
        rpc.connect(self.address)
        self.peers.append(rpc)
        self.groups.append(moolink.Group(rpc, group))
        return self.groups[-1]

    def job(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(get(f"{self.url}/api/v1/job")[1])
        return told

    def states(self) -> dict[str, str]:
        return {member["name"]: member["state"] for member in self.job()["members"]}

    def wait_for(self, states: dict[str, str]) -> None:
        waiting.until(lambda: self.states() == states, f"the states {states}", 0.1)

    def close(self) -> None:
        self.dashboard.close()
        for thing in (*self.groups, *self.peers, self.broker):
            thing.close()


class NotLocal:
    """A dashboard that asks for a key, as one on all interfaces does."""

    def __init__(self) -> None:
        self.broker = moolink.Broker(first=True)
        self.broker.listen("127.0.0.1:0")
        self.key = tokens.new().dashboard()
        self.dashboard = Dashboard(self.broker, "0.0.0.0:0", self.key)
        self.url = f"http://127.0.0.1:{self.dashboard.address.rpartition(':')[2]}"


def get(url: str, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=waiting.TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
