"""InferenceServer and InferenceClient: batches, recurrent states, weights, servers that die."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import moolink
from moolink import InferenceClient, InferenceServer
from moolink.inference import InferenceBatch
from moolink.inference.names import INFER
from moolink.inference.states import States
from tests import processes, waiting


class Net:
    """Peers that know each other through a hub."""

    def __init__(self) -> None:
        self.hub = moolink.Rpc("hub")
        self.address = self.hub.listen("127.0.0.1:0")[0]
        self.peers = [self.hub]

    def peer(self, name: str) -> moolink.Rpc:
        peer = moolink.Rpc(name)
        peer.listen("127.0.0.1:0")
        peer.connect(self.address)
        self.peers.append(peer)
        return peer


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    for peer in reversed(net.peers):
        peer.close()


def double(batch: InferenceBatch) -> npt.NDArray[Any]:
    return 2 * batch.inputs


def counting(batch: InferenceBatch) -> tuple[Any, Any]:
    """Outputs how many steps an episode has, which the state counts."""
    steps = batch.state["steps"] + 1
    return steps, {"steps": steps}


def test_the_time_limit_holds_although_a_peer_answers_that_it_serves_nothing(net: Net) -> None:
    client = InferenceClient(net.peer("actor"), "policy", "hub")
    with pytest.raises(moolink.TimeoutError, match="no function"):
        client.infer(np.ones(1), timeout=0.3)
    assert client.moves == 0


def test_each_client_gets_the_outputs_of_its_own_rows(net: Net) -> None:
    sizes = []

    def model(batch: InferenceBatch) -> npt.NDArray[Any]:
        sizes.append((len(batch.inputs), batch.rows))
        return double(batch)

    with InferenceServer(net.peer("server"), "policy", model, buckets=(1, 4, 16)) as server:
        clients = [InferenceClient(net.peer(f"actor{i}"), "policy", "server") for i in range(4)]
        for step in range(5):
            given = [np.full((1 + i % 2, 3), 10 * step + i) for i in range(4)]
            requests = [c.request(x) for c, x in zip(clients, given, strict=True)]
            for request, x in zip(requests, given, strict=True):
                np.testing.assert_array_equal(request.result(20), 2 * x)
        stats = server.stats()
        assert stats["rows"] == 5 * 6
        assert stats["requests"] == 5 * 4
        assert {rows for rows, _ in sizes} <= {1, 4, 16}
        assert sum(rows - used for rows, used in sizes) == stats["padding"]


def test_requests_that_come_while_a_batch_runs_are_one_batch(net: Net) -> None:
    running, go = threading.Event(), threading.Event()
    rows = []

    def model(batch: InferenceBatch) -> npt.NDArray[Any]:
        rows.append(batch.rows)
        running.set()
        assert go.wait(20)
        return double(batch)

    with InferenceServer(net.peer("server"), "policy", model) as server:
        clients = [InferenceClient(net.peer(f"actor{i}"), "policy", "server") for i in range(5)]
        requests = [clients[0].request(np.ones(1))]
        assert running.wait(20)
        requests += [client.request(np.ones(1)) for client in clients[1:]]
        queue = server._rpc._served[INFER.format("policy")]._batches.queue
        waiting.until(lambda: len(queue._items) == 4, "the four other requests")
        go.set()
        for request in requests:
            request.result(20)
    assert rows == [1, 4]


def test_states_are_kept_by_client_and_row_and_reset(net: Net) -> None:
    state = {"steps": np.zeros((), np.int64)}
    with InferenceServer(net.peer("server"), "policy", counting, state=state) as server:
        clients = [InferenceClient(net.peer(f"actor{i}"), "policy", "server") for i in range(2)]
        for step in range(1, 4):
            for client in clients:
                assert client.infer(np.ones((2, 1)), timeout=20).tolist() == [step, step]
        first = [True, False]
        assert clients[0].infer(np.ones((2, 1)), first, timeout=20).tolist() == [1, 4]
        assert clients[1].infer(np.ones((2, 1)), timeout=20).tolist() == [4, 4]
        assert server.stats()["states"] == 4
        clients[0].close()
        waiting.until(lambda: server.stats()["states"] == 2, "the end of a client")
        assert clients[0].infer(np.ones((2, 1)), timeout=20).tolist() == [1, 1]


def test_the_states_used_least_recently_make_room() -> None:
    states = States({"h": np.zeros(2, np.float32)}, most=3)
    slots = states.slots([("a", 0), ("b", 0), ("c", 0), None])
    states.scatter(slots, {"h": np.array([[1, 1], [2, 2], [3, 3], [9, 9]], np.float32)})
    states.slots([("a", 0)])
    states.slots([("d", 0)])  # takes the place of b
    slots = states.slots([("a", 0), ("c", 0), ("d", 0)])
    np.testing.assert_array_equal(states.gather(slots)["h"][:, 0], [1, 3, 0])
    with pytest.raises(ValueError, match="does not fit into 3 states"):
        states.slots([(name, 0) for name in "abcd"])


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_states_of_every_framework_grow(framework: str) -> None:
    import jax
    import torch

    make: Any = {"numpy": np.zeros, "torch": torch.zeros, "jax": jax.numpy.zeros}[framework]
    states = States([make(2), make((1, 3))], most=500)
    for count in (10, 100, 300):
        actors: list[tuple[str, int] | None] = [("a", i) for i in range(count)]
        slots = states.slots(actors)
        old = states.gather(slots)
        states.scatter(slots, [old[0] + 1, old[1] + 2])
    state = states.gather(states.slots([("a", 0), ("a", 50), ("a", 299)]))
    assert np.asarray(state[0])[:, 0].tolist() == [3, 2, 1]
    assert np.asarray(state[1]).shape == (3, 1, 3)
    assert np.asarray(state[1])[0, 0, 0] == 6


def test_new_weights_are_used_from_the_next_batch_on(net: Net) -> None:
    with (
        moolink.Publisher(net.peer("learner"), "w") as publisher,
        moolink.Subscriber(net.peer("server"), "w", "learner") as subscriber,
    ):

        def model(batch: InferenceBatch) -> npt.NDArray[Any]:
            return batch.inputs * batch.weights["scale"]

        with InferenceServer(net.peers[-1], "policy", model, weights=subscriber):
            client = InferenceClient(net.peer("actor"), "policy", "server")
            request = client.request(np.ones(1))  # waits for the first weights
            publisher.publish({"scale": 3})
            assert request.result(20).tolist() == [3]
            publisher.publish({"scale": 5})
            subscriber.wait(1, 20)
            assert client.infer(np.ones(1), timeout=20).tolist() == [5]
            assert client.version == 1


def test_torch_models_get_tensors(net: Net) -> None:
    import torch

    def model(batch: InferenceBatch) -> dict[str, Any]:
        assert isinstance(batch.inputs["obs"], torch.Tensor)
        return {"action": batch.inputs["obs"].argmax(1)}

    with InferenceServer(net.peer("server"), "policy", model):
        client = InferenceClient(net.peer("actor"), "policy", "server")
        assert client.infer({"obs": torch.eye(3)}, timeout=20)["action"].tolist() == [0, 1, 2]


def test_a_model_that_raises_is_its_clients_error_and_serves_on(net: Net) -> None:
    def model(batch: InferenceBatch) -> npt.NDArray[Any]:
        if batch.inputs[0] < 0:
            raise ArithmeticError("negative")
        return double(batch)

    with InferenceServer(net.peer("server"), "policy", model):
        client = InferenceClient(net.peer("actor"), "policy", "server")
        with pytest.raises(moolink.RemoteError, match="negative"):
            client.infer(-np.ones(1), timeout=20)
        assert client.infer(np.ones(1), timeout=20).tolist() == [2]


def test_clients_go_to_the_server_with_the_fewest_rows(net: Net) -> None:
    names = ["server0", "server1"]
    servers = [InferenceServer(net.peer(name), "policy", double) for name in names]
    clients = [InferenceClient(net.peer(f"actor{i}"), "policy", names) for i in range(3)]
    clients[0].infer(np.ones(5), timeout=20)
    clients[1].infer(np.ones(2), timeout=20)
    clients[2].infer(np.ones(2), timeout=20)
    assert clients[0].server != clients[1].server == clients[2].server
    assert sorted(server.stats()["rows"] for server in servers) == [4, 5]
    for server in servers:
        server.close()


def test_a_request_of_a_killed_server_is_sent_to_another(net: Net) -> None:
    with processes.killed_at_the_end() as started:
        for i in range(2):
            arguments = ("-m", "tests.inference.serving", net.address, f"server{i}")
            started.append(processes.start_python(*arguments))
        names = {p["name"] for p in net.hub.peers()}
        waiting.until(
            lambda: {"server0", "server1"} <= {p["name"] for p in net.hub.peers()}, f"{names}"
        )
        client = InferenceClient(net.peer("actor"), "policy", ["server0", "server1"])
        assert client.infer(np.ones(1), timeout=20).tolist() == [1]
        assert client.infer(np.ones(1), timeout=20).tolist() == [2]
        victim = int(str(client.server)[-1])
        request = client.request(np.full(1, 0.5))  # the server sleeps for half a second
        started[victim].kill()
        assert request.result(20).tolist() == [1]  # the next server's state begins anew
        assert client.moves == 1
        assert client.server == f"server{1 - victim}"


def test_a_server_that_was_closed_is_left_and_found_again(net: Net) -> None:
    peer = net.peer("server")
    server = InferenceServer(peer, "policy", double)
    client = InferenceClient(net.peer("actor"), "policy", "server")
    client.infer(np.ones(1), timeout=20)
    server.close()
    with pytest.raises(moolink.TimeoutError, match="no server of 'policy' has answered"):
        client.infer(np.ones(1), timeout=0.2)
    with InferenceServer(peer, "policy", double):
        assert client.infer(np.ones(1), timeout=20).tolist() == [2]


def test_bad_arguments_are_refused(net: Net) -> None:
    peer = net.peer("server")
    with InferenceServer(peer, "policy", double):
        with pytest.raises(ValueError, match=r"this peer has an inference server of .* already"):
            InferenceServer(peer, "policy", double)
        client = InferenceClient(peer, "policy", "server")
        with pytest.raises(ValueError, match="same number of rows"):
            client.infer({"a": np.ones(2), "b": np.ones(3)})
        request = client.request(np.ones(1))
        with pytest.raises(ValueError, match="one request under way"):
            client.request(np.ones(1))
        request.result(20)
        with pytest.raises(ValueError, match="was taken"):
            request.result()
    with pytest.raises(ValueError, match="at least one server"):
        InferenceClient(peer, "policy", [])
    with pytest.raises(ValueError, match="max_actors must be at least 1"):
        InferenceServer(peer, "other", double, max_actors=0)


def test_a_server_without_weights_can_be_closed(net: Net) -> None:
    with moolink.Subscriber(net.peer("server"), "w", "nobody") as subscriber:
        server = InferenceServer(net.peers[-1], "policy", double, weights=subscriber)
        request = InferenceClient(net.peer("actor"), "policy", "server").request(np.ones(1))
        waiting.until(
            lambda: sum(p["calls_running"] for p in server._rpc.peers()) == 1, "the request"
        )
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(waiting.TIMEOUT)
        assert not closing.is_alive()
        with InferenceServer(net.peers[-2], "policy", double):
            assert request.result(20).tolist() == [2]


def test_a_request_waits_for_weights_longer_than_a_call_may_take(net: Net) -> None:
    publisher = moolink.Publisher(net.hub, "w")
    with moolink.Subscriber(net.peer("server"), "w", "hub") as subscriber:
        actor = net.peer("actor")
        actor.set_timeout(0.05)
        client = InferenceClient(actor, "policy", "server")
        with InferenceServer(net.peers[1], "policy", double, weights=subscriber):
            request = client.request(np.ones(1))
            with pytest.raises(moolink.TimeoutError):
                actor.sync("nobody", "nothing")  # the time limit has passed for the request, too
            publisher.publish({"w": np.zeros(1)})
            assert request.result(20).tolist() == [2]
            assert client.moves == 0
    publisher.close()


def test_a_server_that_is_not_there_makes_way_for_one_that_comes(net: Net) -> None:
    actor = net.peer("actor")
    actor.set_timeout(0.05)
    request = InferenceClient(actor, "policy", ["absent", "server"]).request(np.ones(1))
    with InferenceServer(net.peer("server"), "policy", double):
        assert request.result(20).tolist() == [2]


def test_a_server_tells_its_load_while_the_model_runs(net: Net) -> None:
    running, go = threading.Event(), threading.Event()

    def model(batch: InferenceBatch) -> npt.NDArray[Any]:
        running.set()
        assert go.wait(20)
        return double(batch)

    with InferenceServer(net.peer("server"), "policy", model) as server:
        actor = net.peer("actor")
        request = InferenceClient(actor, "policy", "server").request(np.ones(1))
        assert running.wait(20)
        load = actor.async_("server", "moolink.inference/policy/load")
        try:
            assert load.result(10) == 0
            assert server.stats()["batches"] == 0
        finally:
            go.set()
        request.result(20)


def test_the_actors_of_a_batch_do_not_make_room_for_each_other() -> None:
    states = States(np.zeros(1), most=3)
    states.scatter(states.slots([("a", 0), ("b", 0), ("c", 0)]), np.array([[1.0], [2], [3]]))
    slots = states.slots([("d", 0), ("a", 0)])  # d takes the place of b
    assert states.gather(slots)[:, 0].tolist() == [0, 1]


def test_clients_that_are_gone_are_not_counted(net: Net) -> None:
    with InferenceServer(net.peer("server"), "policy", double) as server:
        for name in ("gone", "there"):
            InferenceClient(net.peer(name), "policy", "server").infer(np.ones(2), timeout=20)
        assert server.stats()["clients"] == 2
        net.peers[-2].close()
        waiting.until(lambda: server.stats()["clients"] == 1, "the end of a client")


def test_attempts_at_a_server_that_is_away_are_no_moves(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    peer = net.peer("server")
    client = InferenceClient(net.peer("actor"), "policy", "server")
    request = client.request(np.ones(1))
    waiting.until_timeout_says("has no function", lambda: request.result(0.1))
    assert client.moves == 0
    assert not caplog.records
    with InferenceServer(peer, "policy", double):
        client.infer(np.ones(1), timeout=20)
    waiting.until_timeout_says("has no function", lambda: client.infer(np.ones(1), timeout=0.1))
    assert client.moves == 1
    assert len(caplog.records) == 1


def test_a_request_that_is_dropped_makes_way(net: Net) -> None:
    with InferenceServer(net.peer("server"), "policy", double):
        client = InferenceClient(net.peer("actor"), "policy", "server")
        request = client.request(np.ones(1))
        del request
        assert client.infer(np.ones(1), timeout=20).tolist() == [2]


def test_what_a_program_mistakes_is_named(net: Net) -> None:
    def forgetful(batch: InferenceBatch) -> npt.NDArray[Any]:
        return double(batch)

    peer = net.peer("server")
    with InferenceServer(peer, "policy", forgetful, state={"steps": 0}):
        client = InferenceClient(net.peer("actor"), "policy", "server")
        with pytest.raises(ValueError, match=r"first has shape \(3,\), and there are 2 rows"):
            client.infer(np.ones(2), first=[True] * 3)
        with pytest.raises(moolink.RemoteError, match="must return a pair"):
            client.infer(np.ones(3), timeout=20)
    with pytest.raises(TypeError, match="state: a str is no array"):
        InferenceServer(peer, "policy", double, state="text")
    with pytest.raises(TypeError, match="model must be callable"):
        InferenceServer(peer, "policy", None)  # type: ignore[arg-type]
