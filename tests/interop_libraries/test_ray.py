"""moolink as a tensor transport between Ray's actors."""

import os
import signal

import pytest

pytest.importorskip("ray", reason="needs ray: make test-interop")

import ray
import torch

import moolink.ray
from tests.waiting import until

moolink.ray.register()


@ray.remote(enable_tensor_transport=True)
class Source:
    @ray.method(tensor_transport="MOOLINK")
    def tensors(self, n):
        half = torch.arange(n, dtype=torch.bfloat16)
        return {"x": torch.arange(n, dtype=torch.float32), "pair": [half, torch.full((2, 3), n)]}

    @ray.method(tensor_transport="MOOLINK")
    def columns(self):
        return torch.arange(12).reshape(3, 4).t()

    def kept(self):
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return len(get_tensor_transport_manager("MOOLINK")._objects)

    def process(self):
        return os.getpid()


@ray.remote(enable_tensor_transport=True)
class Sink:
    def ends(self, tree):
        half, full = tree["pair"]
        assert half.dtype == torch.bfloat16
        return tree["x"][-1].item(), half[1].item(), full.tolist()

    def rows(self, columns):
        return columns.t().tolist()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()


def test_actors_hand_tensors_on():
    source, sinks = Source.remote(), [Sink.remote(), Sink.remote()]
    for n in (5, 100_000):
        tree = source.tensors.remote(n)
        expected = (n - 1, 1, [[n] * 3] * 2)
        assert ray.get([sink.ends.remote(tree) for sink in sinks]) == [expected] * 2
    assert (
        ray.get(sinks[0].rows.remote(source.columns.remote()))
        == torch.arange(12).reshape(3, 4).tolist()
    )


def test_the_driver_gets_tensors():
    source = Source.remote()
    assert ray.get(source.tensors.remote(3))["x"].tolist() == [0, 1, 2]


def test_freed_objects_are_not_kept():
    source, sink = Source.remote(), Sink.remote()
    tree = source.tensors.remote(10)
    ray.get(sink.ends.remote(tree))
    assert ray.get(source.kept.remote()) == 1
    del tree
    until(lambda: ray.get(source.kept.remote()) == 0, "Ray to free the object")


def test_a_source_that_dies_is_an_error_and_not_a_hang():
    source, sink = Source.remote(), Sink.remote()
    tree = source.tensors.remote(10)
    ray.wait([tree])
    os.kill(ray.get(source.process.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(sink.ends.remote(tree), timeout=60)
    other = Source.remote()
    assert ray.get(sink.ends.remote(other.tensors.remote(2)))[0] == 1


def test_a_source_that_cannot_be_reached_is_given_up(monkeypatch):
    monkeypatch.setattr(moolink.ray.transport, "_FIND", 0.1)
    place = moolink.ray.Place([], "cpu", peer="gone", address="127.0.0.1:1")
    with pytest.raises(moolink.TimeoutError, match=r"object x .* 127\.0\.0\.1:1 within 0\.1 s"):
        moolink.ray.TensorTransport().recv_multiple_tensors("x", place, None)
    assert "'moolink.ray.fetch' at 'gone'" not in moolink.dump()
