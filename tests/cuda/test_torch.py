"""torch tensors on a CUDA device through RPC: what arrives, in which order, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest

import moolink
from moolink import _core
from tests.waiting import until

Pair = tuple[moolink.Rpc, moolink.Rpc]

DTYPES = [
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64",
    "complex64 complex128 float8_e4m3fn float8_e5m2",
]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (8, 8), (1000, 33), (300_000,), (2048, 2049)]
LONG = 200_000_000  # cycles of torch.cuda._sleep: a tenth of a second


def bits(tensor: Any) -> bytes:
    """The elements of a torch tensor in host order."""
    import torch

    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(torch: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor on the device with arbitrary elements."""
    count = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", " ".join(DTYPES).split())
def test_every_dtype_arrives_on_the_host(torch: Any, pair: Pair, dtype: str) -> None:
    client, server = pair
    kept: list[Any] = []
    server.define("echo", lambda value: kept.append(value) or value)
    for shape in [(5,), (3000, 7)]:
        sent = random_bits(torch, shape, getattr(torch, dtype))
        result = client.sync("server", "echo", sent)
        for received in (kept.pop(), result):
            assert isinstance(received, torch.Tensor)
            assert received.device.type == "cpu"
            assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
            assert bits(received) == bits(sent)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(torch: Any, pair: Pair, shape: tuple[int, ...]) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    sent = random_bits(torch, shape, torch.float32)
    received = client.sync("server", "echo", sent)
    assert received.shape == sent.shape
    assert bits(received) == bits(sent)


def test_views_arrive_as_their_elements(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    whole = random_bits(torch, (200, 300), torch.int32)
    z = torch.randn(50, 60, dtype=torch.complex64, device="cuda")
    views = [whole[::2], whole.T, whole[:, 3:5], whole[7], whole.flip(0), z.conj(), z.conj().imag]
    views += [torch.arange(3, device="cuda").expand(1000, 3), whole[::50, ::100]]
    for view in views:
        received = client.sync("server", "echo", view)
        assert bits(received) == bits(view.resolve_conj().resolve_neg())
    trained = torch.randn(1000, device="cuda", requires_grad=True)
    for sent in (trained, torch.nn.Parameter(trained)):
        assert bits(client.sync("server", "echo", sent)) == bits(trained.detach())


@pytest.mark.parametrize("size", [3, 1000, 5_000_000])
@pytest.mark.parametrize("side_stream", [False, True])
def test_pending_work_comes_first_and_later_work_does_not_matter(
    torch: Any, pair: Pair, size: int, side_stream: bool
) -> None:
    client, server = pair
    server.define("ends", lambda value: (value[0].item(), value[-1].item(), value.float().mean()))
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(size, dtype=torch.int32, device="cuda")
        torch.cuda._sleep(LONG)
        tensor.fill_(7)
        future = client.async_("server", "ends", tensor)
        tensor.fill_(9)
        assert future.result() == (7, 7, 7)


def test_results_come_after_the_handlers_work(torch: Any, pair: Pair) -> None:
    client, server = pair

    def slow(value: int) -> Any:
        tensor = torch.zeros(100_000, device="cuda")
        torch.cuda._sleep(LONG)
        return tensor.fill_(value)

    server.define("slow", slow)
    for value in range(3):
        assert (client.sync("server", "slow", value) == value).all()


def test_a_tree_of_many_tensors(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    tree = {f"layer {i}": [torch.full((i,), i, device="cuda"), np.full(i, i)] for i in range(300)}
    received = client.sync("server", "echo", tree)
    for name, (tensor, array) in tree.items():
        assert bits(received[name][0]) == bits(tensor)
        assert (received[name][1] == array).all()


def connected(client: moolink.Rpc, server: moolink.Rpc) -> None:
    client.connect(server.listen("127.0.0.1:0")[0])


@pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"]])
def test_tensors_arrive_on_the_device_that_was_asked_for(torch: Any, transports: list[str]) -> None:
    server = moolink.Rpc("server", device="cuda:0", transports=transports, timeout=20)
    client = moolink.Rpc("client", device="same", transports=transports, timeout=20)
    with server, client:
        connected(client, server)
        kept: list[Any] = []
        server.define("echo", lambda value: kept.append(value) or value)
        for shape in SHAPES:
            for device in ("cuda", "cpu"):
                sent = random_bits(torch, shape, torch.float32).to(device)
                result = client.sync("server", "echo", sent)
                for received in (kept.pop(), result):
                    assert received.device == torch.device("cuda:0")
                    assert received.shape == sent.shape
                    assert bits(received) == bits(sent)
        array = client.sync("server", "echo", np.arange(100))
        assert isinstance(array, np.ndarray)
        server.define("host", lambda: torch.ones(1000))
        assert client.sync("server", "host").is_cpu


def test_what_arrives_is_complete_for_every_stream(torch: Any) -> None:
    with (
        moolink.Rpc("server", device="cuda:0", timeout=20) as server,
        moolink.Rpc("client", device="same", timeout=20) as client,
    ):
        connected(client, server)
        server.define("echo", lambda value: value)
        other = torch.cuda.Stream()
        for value in range(20):
            sent = torch.full((1_000_000,), value, dtype=torch.int32, device="cuda")
            received = client.sync("server", "echo", sent)
            with torch.cuda.stream(other):
                total = (received != value).sum()
            assert total.item() == 0


def test_memory_of_what_arrived_is_not_used_again_while_the_device_reads_it(torch: Any) -> None:
    with (
        moolink.Rpc("server", timeout=20) as server,
        moolink.Rpc("client", device="cuda:0", timeout=20) as client,
    ):
        connected(client, server)
        server.define("full", lambda value: torch.full((500_000,), value, dtype=torch.int32))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda._sleep(LONG)
        for value in range(60):
            received = client.sync("server", "full", value)
            wrong += (received != value).sum()  # queued behind what the device sleeps over
            del received
        assert wrong.item() == 0


def test_receiving_does_not_wait_for_the_users_queue(torch: Any) -> None:
    with (
        moolink.Rpc("server", timeout=20) as server,
        moolink.Rpc("client", device="cuda:0", timeout=20) as client,
    ):
        connected(client, server)
        server.define("ones", lambda: torch.ones(500_000))
        client.sync("server", "ones")
        queued = torch.cuda.Event()
        torch.cuda._sleep(20 * LONG)
        queued.record()
        client.sync("server", "ones")
        assert not queued.query()
        torch.cuda.synchronize()


def test_a_tensor_on_a_device_can_be_lent_and_is_copied(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("sum", lambda value: int(value.sum()))
    tensor = torch.ones(100_000, dtype=torch.int32, device="cuda")
    future = client.async_("server", "sum", moolink.lend(tensor))
    assert future.result() == 100_000
    assert future.released.wait(10)


def test_errors_say_which_device(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda value: value)
    with moolink.Rpc("other", device="cuda:77", timeout=20) as other:
        connected(other, server)
        with pytest.raises(moolink.Error, match=r"77|device ordinal"):
            other.sync("server", "echo", torch.ones(3))
    with pytest.raises(ValueError, match="cuda:N"):
        moolink.Rpc(device="cuda:x")
    with pytest.raises(TypeError, match="meta"):
        client.sync("server", "echo", torch.ones(3, device="meta"))


def test_what_was_copied_is_counted(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("size", lambda value: value.numel())
    before = _core.cuda_info()
    client.sync("server", "size", torch.ones(1000, device="cuda"))
    after = _core.cuda_info()
    assert after["used"]
    assert after["bytes_to_host"] - before["bytes_to_host"] == 4000
    assert after["copies_to_host"] - before["copies_to_host"] == 1


def test_a_batch_is_made_on_the_device(torch: Any, pair: Pair) -> None:
    client, server = pair
    server.define("double", lambda x: x * 2, batch_size=4, device="cuda")
    futures = [
        client.async_("server", "double", torch.full((10,), i, device="cuda")) for i in range(4)
    ]
    for i, future in enumerate(futures):
        assert (future.result() == 2 * i).all()


def test_ten_thousand_messages_leave_nothing_behind(torch: Any) -> None:
    with (
        moolink.Rpc("server", device="cuda:0", timeout=20) as server,
        moolink.Rpc("client", device="same", timeout=20) as client,
    ):
        connected(client, server)
        server.define("echo", lambda value: value)
        small = torch.arange(10, device="cuda")
        large = torch.arange(30_000, device="cuda")

        def exchange(messages: int) -> tuple[int, int]:
            for i in range(messages):
                client.sync("server", "echo", large if i % 10 == 0 else small)
            torch.cuda.synchronize()
            return psutil.Process().memory_info().rss, torch.cuda.memory_reserved()

        before = torch.cuda.memory_allocated()
        resident, reserved = exchange(2000)
        resident_later, reserved_later = exchange(10_000)
        assert reserved_later - reserved <= 8 << 20
        assert resident_later - resident < 16 << 20
        # The handler's last arguments are dropped soon after its reply.
        until(lambda: torch.cuda.memory_allocated() <= before, "memory to be free again")
