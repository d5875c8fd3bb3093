"""Collectives and the accumulator with tensors on a CUDA device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moolink
from tests.accumulator.loops import connect, reduce_round
from tests.cuda.conftest import both

Make = Callable[..., Any]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
def test_all_reduce_of_a_tensor(
    torch: Any, two: list[moolink.Group], dtype: str, size: int
) -> None:
    data = [torch.arange(size, device="cuda").remainder(50).to(getattr(torch, dtype))] * 2
    results = both(two, lambda group, rank: group.all_reduce("x", data[rank]))
    for result in results:
        assert result.device == data[0].device
        assert torch.equal(result, data[0] * 2)


@pytest.mark.parametrize("size", [10, 300_000])
def test_results_are_written_where_they_are_asked_for(
    torch: Any, two: list[moolink.Group], size: int
) -> None:
    data = [torch.full((size,), float(rank + 1), device="cuda") for rank in range(2)]
    out = [torch.zeros(size, device="cuda") for _ in range(2)]
    results = both(two, lambda group, rank: group.all_reduce("x", data[rank], out=out[rank]))
    for result, place in zip(results, out, strict=True):
        assert result is place
        assert (place == 3).all()
    addresses = [tensor.data_ptr() for tensor in data]
    both(two, lambda group, rank: group.all_reduce("y", data[rank], inplace=True))
    assert [tensor.data_ptr() for tensor in data] == addresses
    assert all((tensor == 3).all() for tensor in data)
    strided = [torch.ones(20, 30, device="cuda")[:, ::2] for _ in range(2)]
    both(two, lambda group, rank: group.all_reduce("z", strided[rank], inplace=True))
    assert all((tensor == 2).all() for tensor in strided)


def test_other_operations_and_trees(torch: Any, two: list[moolink.Group]) -> None:
    def tree(rank: int) -> dict[str, Any]:
        return {
            "device": torch.full((3, 4), float(rank), device="cuda"),
            "host": torch.full((5,), float(rank)),
            "array": np.full(6, rank, np.int64),
        }

    sums = both(two, lambda group, rank: group.all_reduce("sum", tree(rank)))
    for result in sums:
        assert result["device"].is_cuda
        assert result["host"].is_cpu
        assert all((result[name] == 1).all() for name in ("device", "host"))
        assert (result["array"] == 1).all()
    sent = both(two, lambda group, rank: group.broadcast("b", tree(rank), root=1))
    assert all(result["device"].is_cuda and (result["device"] == 1).all() for result in sent)
    gathered = both(two, lambda group, rank: group.all_gather("g", tree(rank)["device"]))
    for result in gathered:
        assert result.is_cuda
        assert [float(part.mean()) for part in result] == [0.0, 1.0]


def test_pending_work_comes_first(torch: Any, two: list[moolink.Group]) -> None:
    streams = [torch.cuda.Stream() for _ in two]

    def start(group: moolink.Group, rank: int) -> Any:
        with torch.cuda.stream(streams[rank]):
            tensor = torch.zeros(200_000, device="cuda")
            torch.cuda._sleep(200_000_000)
            tensor.fill_(rank + 1)
            return group.all_reduce("x", tensor)

    assert all((result == 3).all() for result in both(two, start))


def test_two_processes_share_the_device(torch: Any, broker_address: str) -> None:
    program = Path(__file__).with_name("member.py")
    members = [
        subprocess.Popen([sys.executable, str(program), name, broker_address])
        for name in ("one", "two")
    ]
    try:
        assert [member.wait(90) for member in members] == [0, 0]
    finally:
        for member in members:
            member.kill()
            member.wait()


@pytest.fixture
def make(broker_address: str) -> Iterator[Make]:
    """Returns a function that makes a peer with an accumulator."""
    with contextlib.ExitStack() as stack:

        def make_(name: str, group: str, parameters: list[Any]) -> Any:
            rpc = stack.enter_context(moolink.Rpc(name, timeout=20))
            rpc.connect(broker_address)
            member = stack.enter_context(moolink.Group(rpc, group))
            return stack.enter_context(moolink.Accumulator("model", parameters, group=member))

        yield make_


def model(torch: Any, device: str, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [((64, 33), torch.float32), ((1000,), torch.float32), ((5, 7), torch.bfloat16)]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape, dtype in shapes
    ]


def test_rounds_are_those_of_the_cpu(torch: Any, make: Make) -> None:
    peers: dict[str, list[Any]] = {}
    models: dict[str, list[list[Any]]] = {}
    for device in ("cpu", "cuda"):
        models[device] = [model(torch, device, seed) for seed in (0, 1)]
        peers[device] = [
            make(f"{device} {i}", device, parameters) for i, parameters in enumerate(models[device])
        ]
        for peer in peers[device]:
            peer.set_virtual_batch_size(4)
        connect(peers[device])
        # The newcomer has the leader's parameters.
        first, second = models[device]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for turn in range(5):
        for device in ("cpu", "cuda"):
            for i, parameters in enumerate(models[device]):
                generator = torch.Generator().manual_seed(10 * turn + i)
                for p in parameters:
                    gradient = torch.randn(p.shape, generator=generator)
                    p.grad = gradient.to(device, p.dtype)
            given = [(parameters, 2) for parameters in models[device]]
            reduce_round(peers[device], given)
        for on_cpu, on_cuda in zip(models["cpu"], models["cuda"], strict=True):
            for p, q in zip(on_cpu, on_cuda, strict=True):
                assert q.grad.is_cuda
                assert q.grad.dtype == q.dtype
                assert torch.equal(p.grad, q.grad.cpu())
        for device in ("cpu", "cuda"):
            for parameters, peer in zip(models[device], peers[device], strict=True):
                with torch.no_grad():
                    for p in parameters:
                        p.sub_(p.grad)
                peer.zero_gradients()
                assert all((p.grad == 0).all() for p in parameters)
