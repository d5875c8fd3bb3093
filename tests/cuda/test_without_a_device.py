"""Where there is no CUDA device: errors, and copies by a driver that has none either."""

from __future__ import annotations

import pytest

import moolink
from tests.cuda.fake_driver import no_device, run_with_fake_driver

__all__ = ["no_device"]

# A type with DLPack's C exchange API, whose stream fills its memory when it is waited for.
EXCHANGED = """
    from tests.interop import test_producers as producers

    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()

    def queue_copy(to, array):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 101)
        driver.cuCtxPushCurrent_v2(context)
        driver.cuMemcpyAsync(ctypes.c_uint64(to.ctypes.data), ctypes.c_uint64(array.ctypes.data),
                             ctypes.c_size_t(array.nbytes), None)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    def current_stream(device_type, device, out):
        asked.append((device_type, device))
        out[0] = None
        return 0

    asked = []
    producers.api.stream = ctypes.cast(current_stream, ctypes.c_void_p)

    def exchanged(array):
        value = producers.Exchanged(array)
        value.device = (2, 1)
        return value
    """


# A process that receives on the fake driver's devices, and what both sides have copied.
RECEIVER = """
    import os, signal, subprocess, sys
    from tests.waiting import until

    def start(device="same"):
        process = subprocess.Popen([sys.executable, "-m", "tests.cuda.receiver", device],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return process, process.stdout.readline().split()

    def sent_by_device(peer, array):
        \"\"\"Sends the array until it goes from device to device.\"\"\"
        def does():
            before = _core.cuda_info()["bytes_within_device"]
            assert np.array_equal(client.sync(peer, "echo", DeviceArray(array)), array)
            return _core.cuda_info()["bytes_within_device"] > before
        until(does, "a loan of device memory")

    receiver, addresses = start()
    for address in addresses:
        client.connect(address)
    array = np.random.rand(1_500_000)
    """


def test_the_lack_of_a_driver_is_said_early() -> None:
    with pytest.raises(moolink.Error, match=r"libcuda\.so\.1"):
        moolink.Rpc(device="cuda:0")
    with moolink.Rpc(device="same") as rpc:
        assert rpc.get_name()
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:5000", "cuda:1x", ""):
        with pytest.raises(ValueError, match="cuda:N"):
            moolink.Rpc(device=wrong)


def test_arrays_of_a_device_arrive_at_the_host() -> None:
    run_with_fake_driver(
        """
        arrays = [np.arange(n, dtype=dtype) for n in (0, 1, 5, 1000, 300_000, 5_000_000)
                  for dtype in (np.float32, np.int64)]
        whole = np.arange(60_000, dtype=np.int32).reshape(200, 300)
        arrays += [np.array(3.5), whole[::2], whole.T, whole[:, ::-1], whole[3:50, 7:9]]
        for array in arrays:
            for device in ((2, 0), (2, 1), (3, 0), (13, 1)):
                sent = DeviceArray(array, device)
                received = client.sync("server", "echo", sent)
                assert isinstance(received, np.ndarray)
                assert received.dtype == array.dtype and received.shape == array.shape
                assert (received == array).all()
                assert isinstance(sent.streams[-1], int) and sent.streams[-1] > 2
        """
    )


def test_a_message_waits_once_for_its_device() -> None:
    run_with_fake_driver(
        """
        tree = [DeviceArray(np.full(100, i), (2, 0)) for i in range(200)]
        before = _core.cuda_info()
        received = client.sync("server", "echo", tree)
        after = _core.cuda_info()
        assert all((array == i).all() for i, array in enumerate(received))
        assert after["copies_to_host"] - before["copies_to_host"] == 1
        assert after["bytes_to_host"] - before["bytes_to_host"] == 200 * 800
        assert len({array.streams[0] for array in tree}) == 1
        """
    )


def test_what_cannot_be_read_is_refused_by_name() -> None:
    run_with_fake_driver(
        """
        for device, word in (((2, 7), "cuda:7"), ((10, 0), "rocm:0"), ((7, 0), "dlpack device 7")):
            try:
                client.sync("server", "echo", DeviceArray(np.ones(100), device))
            except (TypeError, moolink.Error) as error:
                assert word in str(error), str(error)
            else:
                raise AssertionError(device)
        gaps = np.lib.stride_tricks.as_strided(np.zeros(1_000_000), (10,), (800_000,))
        try:
            client.sync("server", "echo", DeviceArray(gaps))
        except ValueError as error:
            assert "contiguous" in str(error)
        else:
            raise AssertionError("gaps")
        """
    )


def test_many_threads_send_from_devices() -> None:
    run_with_fake_driver(
        """
        def send(number):
            for size in (10, 5000, 400_000):
                array = np.full(size, number)
                received = client.sync("server", "echo", DeviceArray(array, (2, number % 2)))
                assert (received == number).all()
            done.append(number)

        done = []
        threads = [threading.Thread(target=send, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 8
        """
    )


def test_a_forked_child_is_told_that_it_cannot_use_the_device() -> None:
    run_with_fake_driver(
        """
        import os
        client.sync("server", "echo", DeviceArray(np.ones(1000)))
        child = os.fork()
        if child == 0:
            try:
                moolink.Rpc("child").async_("nobody", "f", DeviceArray(np.ones(1000)))
            except moolink.Error as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_tensors_are_put_on_the_device_that_was_asked_for() -> None:
    pytest.importorskip("torch")
    run_with_fake_driver(
        """
        import torch
        from moolink.data import device_arrays

        def empty(shape, dtype, device):  # in place of torch's, which has no CUDA here
            devices.append(device)
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            return tensor, tensor.data_ptr(), None

        devices = []
        device_arrays.empty_of_torch = empty
        with moolink.Rpc("there", device="cuda:1", timeout=20) as there:
            there.connect(server.addresses()[0])
            for shape in ((), (0, 2), (5,), (300, 400), (2_000_000,)):
                sent = torch.randn(shape)
                received = there.sync("server", "echo", sent)
                assert devices.pop() == 1 and not devices
                assert received.shape == sent.shape and torch.equal(received, sent)
            assert isinstance(there.sync("server", "echo", np.ones(3)), np.ndarray)
            lent = there.sync("server", "echo", torch.ones(100))
            assert devices.pop() == 1
            server.define("lend", lambda: moolink.lend(sent))
            assert torch.equal(there.sync("server", "lend"), sent)
        """
    )


def test_arrays_of_a_device_are_seen_as_copies_by_numpy() -> None:
    run_with_fake_driver(
        """
        from moolink.data.frameworks import as_numpy

        whole = np.arange(60_000, dtype=np.float32).reshape(200, 300)
        for array in (whole, whole[::2, 5:], whole[:0], np.array(2.5)):
            sent = DeviceArray(array)
            seen = _core.as_array(sent)
            assert np.array_equal(seen, array) and seen.dtype == array.dtype
            assert seen.ctypes.data != array.ctypes.data and not seen.flags.writeable
            assert np.array_equal(as_numpy(sent), array)
        batcher = moolink.Batcher(2)
        for row in whole[:2]:
            batcher.stack({"x": DeviceArray(row)})
        assert np.array_equal(batcher.get()["x"], whole[:2])
        """
    )


def test_what_must_be_in_host_memory_names_dtype_and_device() -> None:
    run_with_fake_driver(
        """
        try:
            _core.copy_to_device(DeviceArray(np.ones(3, np.float32)), 0, 0)
        except TypeError as error:
            assert "DeviceArray of float32 on cuda:1" in str(error), str(error)
        else:
            raise AssertionError
        layouts = _core.TensorLayouts([((3,), "float32")])
        for device in ((2, 1), (2, 7), (10, 0)):  # there, not there, not CUDA's
            assert not layouts.fit([DeviceArray(np.ones(3, np.float32), device)])
        """
    )


def test_producers_with_the_exchange_api_are_read_after_their_stream() -> None:
    pytest.importorskip("tvm_ffi")
    run_with_fake_driver(
        EXCHANGED,
        """
        before = _core.cuda_info()["copies_to_host"]
        for array in (np.arange(5.0), np.arange(300_000.0).reshape(300, 1000)):
            for step in (1, 2):
                memory = np.zeros_like(array)
                queue_copy(memory, array)
                assert not memory.any()
                received = client.sync("server", "echo", exchanged(memory[..., ::step]))
                assert np.array_equal(received, array[..., ::step])
        assert asked == [(2, 1)] * 4
        assert _core.cuda_info()["copies_to_host"] == before + 4
        assert client.stats()["copies"]["gaps"] == 2
        """,
    )


def test_collectives_take_arrays_of_a_device(broker_address: str) -> None:
    run_with_fake_driver(
        f"""
        from tests.waiting import until

        client.connect({broker_address!r})
        group = moolink.Group(client, "group")
        until(lambda: group.update() or group.members() == ["client"], "one member")
        for size in (7, 100_000):
            array = np.arange(size, dtype=np.float32)
            given = DeviceArray(array)
            assert np.array_equal(group.all_reduce("x", given).result(20), array)
            x, y = group.all_reduce("tree", [given, array]).result(20)
            assert np.array_equal(x, array) and np.array_equal(y, array)
            out = np.zeros_like(array)
            assert group.all_reduce("out", given, out=out).result(20) is out
            assert np.array_equal(out, array)
            try:
                group.all_reduce("in place", given, inplace=True)
            except ValueError as error:
                assert "cannot be written" in str(error), str(error)
            else:
                raise AssertionError
        try:
            group.all_reduce("absent", DeviceArray(array, (2, 7)))
        except moolink.Error as error:
            assert "cuda:7" in str(error), str(error)
        else:
            raise AssertionError
        """
    )


def test_gradients_on_devices_are_waited_for_once_a_section(broker_address: str) -> None:
    pytest.importorskip("torch")
    run_with_fake_driver(
        f"""
        from types import SimpleNamespace
        import torch
        from moolink.torch import Accumulator, accumulator
        from tests.accumulator.loops import connect, reduce_round

        class Gradient(DeviceArray):  # in place of torch's, which has no CUDA here
            is_cuda = True
            @property
            def nbytes(self):
                return self.array.nbytes
            def detach(self):
                return self
            def to(self, dtype):
                return self

        def gather(batch_size, clear):
            own, peer._parameters = peer._parameters, given
            try:
                return Accumulator._gather(peer, batch_size, clear)
            finally:
                peer._parameters = own

        shapes = [(3,), (100, 70), (2,), (50_000,), (5,)]
        dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, torch.float32]
        parameters = [torch.ones(shape, dtype=dtype, requires_grad=True)
                      for shape, dtype in zip(shapes, dtypes)]
        values = [np.random.rand(*p.shape).astype(str(p.dtype)[6:]) for p in parameters]
        given = [SimpleNamespace(grad=Gradient(value)) for value in values]
        given[0].grad = torch.from_numpy(values[0].copy())
        given[4].grad = None
        cleared = []
        accumulator.zero_all = lambda tensors: cleared.extend(tensors)
        client.connect({broker_address!r})
        peer = Accumulator("model", parameters, group=moolink.Group(client, "group"))
        connect([peer])
        peer._gather = gather
        peer._usual_gradients = SimpleNamespace(fit=lambda tensors: False)
        before = _core.cuda_info()["copies_to_host"]
        reduce_round([peer], [([], 4)])
        assert _core.cuda_info()["copies_to_host"] == before + 2
        for parameter, value in zip(parameters[:4], values):
            assert np.allclose(parameter.grad.numpy(), value)
        assert not parameters[4].grad.any()
        assert set(map(id, cleared[:3])) == set(map(id, (given[i].grad for i in (1, 2, 3))))
        """
    )


def test_host_arrays_are_copied_to_and_from_devices_directly() -> None:
    run_with_fake_driver(
        """
        given = [np.arange(n, dtype=np.float32) for n in (3, 0, 70_000)]
        places = [np.empty_like(array) for array in given]
        _core.copy_to_host([DeviceArray(array) for array in given], places)
        assert all((a == b).all() for a, b in zip(given, places))
        place = np.zeros(70_000, np.float32)
        _core.copy_to_device(given[2], place.ctypes.data, 1)
        assert (place == given[2]).all()
        for wrong in (np.empty(4, np.float32), np.empty((3, 2), np.float32)[:, 0]):
            try:
                _core.copy_to_host([DeviceArray(given[0])], [wrong])
            except ValueError:
                pass
            else:
                raise AssertionError(wrong)
        """
    )


def test_arrays_go_from_device_to_device_within_the_host() -> None:
    pytest.importorskip("torch")
    run_with_fake_driver(
        RECEIVER,
        """
        sent_by_device("receiver", array)
        before, there = _core.cuda_info(), client.sync("receiver", "cuda_info")
        for i in range(5):
            seen = client.sync("receiver", "write", DeviceArray(array + i))
            assert (seen == array + i + 1).all()
        after, then = _core.cuda_info(), client.sync("receiver", "cuda_info")
        assert after["bytes_to_host"] == before["bytes_to_host"]
        assert after["bytes_within_device"] == before["bytes_within_device"] + 5 * array.nbytes
        assert then["bytes_within_device"] == there["bytes_within_device"] + 5 * array.nbytes
        assert then["bytes_to_device"] == there["bytes_to_device"]
        # Small ones, those of another device and the host's go as before, and lent ones like any.
        tree = {"small": DeviceArray(array[:100]), "host": array, "gaps": DeviceArray(array[::2]),
                "other": DeviceArray(array, (2, 0)), "lent": moolink.lend(DeviceArray(array))}
        seen = client.sync("receiver", "echo", tree)
        for name, value in seen.items():
            sent = {"small": array[:100], "gaps": array[::2]}.get(name, array)
            assert np.array_equal(value, sent), name
        # To a peer of the same process that wants host memory, where it can write.
        seen = client.sync("host", "write", DeviceArray(array))
        assert (seen == array + 1).all()
        receiver.communicate()
        """,
        ipc=True,
    )


def test_a_peer_that_is_killed_leaves_device_memory_to_the_others() -> None:
    pytest.importorskip("torch")
    run_with_fake_driver(
        RECEIVER,
        """
        for turn in range(3):
            sent_by_device("receiver", array)
            calls = [client.async_("receiver", "echo", DeviceArray(array)) for _ in range(20)]
            calls[0].result()
            receiver.send_signal(signal.SIGKILL)
            receiver.communicate()
            for call in calls:
                try:
                    assert np.array_equal(call.result(), array)
                except moolink.PeerLost:
                    pass
            receiver, addresses = start()
            client.connect(addresses[0])
        receiver.communicate()
        """,
        ipc=True,
    )


def test_without_the_variable_arrays_go_through_the_host() -> None:
    pytest.importorskip("torch")
    run_with_fake_driver(
        RECEIVER,
        """
        for _ in range(5):
            assert np.array_equal(client.sync("receiver", "echo", DeviceArray(array)), array)
        assert _core.cuda_info()["bytes_within_device"] == 0
        receiver.communicate()
        """,
    )
