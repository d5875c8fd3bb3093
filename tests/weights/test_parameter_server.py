"""ParameterServer and ParameterClient: pushes in order, versions, staleness."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.weights import ParameterClient, ParameterServer

LONG = 60.0


def descend(parameters: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    for name, gradient in gradients.items():
        parameters[name] -= gradient
    return parameters


class Job:
    def __init__(self) -> None:
        self.peers = [moolink.Rpc("server")]
        self.address = self.peers[0].listen("127.0.0.1:0")[0]
        self.things: list[Any] = []

    def serve(self, tree: Any, update: Any = descend, **options: Any) -> ParameterServer:
        self.things.append(ParameterServer(self.peers[0], "w", tree, update, **options))
        server: ParameterServer = self.things[-1]
        return server

    def client(self, name: str, **options: Any) -> ParameterClient:
        peer = moolink.Rpc(name)
        peer.connect(self.address)
        self.peers.append(peer)
        self.things.append(ParameterClient(peer, "w", "server", **options))
        client: ParameterClient = self.things[-1]
        return client

    def close(self) -> None:
        for thing in (*reversed(self.things), *reversed(self.peers)):
            thing.close()


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.close()


def test_every_push_of_several_clients_counts_once(job: Job) -> None:
    server = job.serve({"w": np.zeros(4), "b": np.zeros(())})
    clients = [job.client(f"client-{i}") for i in range(3)]
    pushes = 40

    def work(client: ParameterClient) -> None:
        version = 0
        for _ in range(pushes):
            weights = client.pull(version, LONG)
            made = client.push({"w": np.ones(4), "b": np.float64(0.5)}, weights.version)
            assert made is not None
            version = made

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.version == 3 * pushes
    for client in clients:
        weights = client.pull(3 * pushes, LONG)
        assert weights.version == 3 * pushes
        assert weights.tree["w"].tolist() == [-3.0 * pushes] * 4
        assert float(weights.tree["b"]) == -1.5 * pushes


def test_a_push_that_is_too_stale_is_dropped_and_told(job: Job) -> None:
    server = job.serve({"w": np.zeros(2)}, max_staleness=1)
    client = job.client("client")
    push = {"w": np.ones(2)}
    assert client.push(push, 0) == 1
    assert client.push(push, 0) == 2  # one version behind
    assert client.push(push, 0) is None
    assert client.push(push, 2) == 3
    stats = server.stats()
    assert (stats["applied"], stats["dropped"]) == (3, 1)
    assert client.pull(3, LONG).tree["w"].tolist() == [-3.0, -3.0]


def test_only_some_versions_are_published_where_asked(job: Job) -> None:
    server = job.serve({"w": np.zeros(2)}, publish_every=3)
    client = job.client("client")
    for version in range(4):
        client.push({"w": np.ones(2)}, version)
    assert client.pull(1, LONG).version == 3
    assert server.parameters().version == 4


def test_an_update_that_raises_is_the_client_s_error_and_ends_updates(job: Job) -> None:
    server = job.serve({"w": np.zeros(2)})
    client = job.client("client")
    with pytest.raises(moolink.RemoteError, match="KeyError"):
        client.push({"unknown": np.ones(2)}, 0)
    with pytest.raises(moolink.RemoteError, match="the update to version 1 failed: KeyError"):
        client.push({"w": np.ones(2)}, 0)
    assert server.version == 0


def test_wrong_pushes_and_arguments_are_refused(job: Job) -> None:
    job.serve({"w": np.zeros(2)})
    client = job.client("client")
    with pytest.raises(moolink.RemoteError, match="version 5 was never made: the newest is 0"):
        client.push({"w": np.ones(2)}, 5)
    with pytest.raises(moolink.RemoteError, match="version must be an integer"):
        client.push({"w": np.ones(2)}, "0")  # type: ignore[arg-type]
    assert client.push({"w": np.ones(2)}, 0) == 1
    with pytest.raises(ValueError, match="publish_every must be at least 1"):
        job.serve({"w": np.zeros(2)}, publish_every=0)
    with pytest.raises(ValueError, match="max_staleness must be at least 0"):
        job.serve({"w": np.zeros(2)}, max_staleness=-1)


def test_a_closed_server_is_an_error_of_push(job: Job) -> None:
    server = job.serve({"w": np.zeros(2)})
    client = job.client("client")
    client.push({"w": np.ones(2)}, 0)
    client.pull(1, LONG)
    server.close()
    with pytest.raises(moolink.NoSuchFunction):
        client.push({"w": np.ones(2)}, 1)
    assert client.pull(1, LONG).version == 1
