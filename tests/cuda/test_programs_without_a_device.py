"""The handler of moolink.jax.all_reduce for CUDA devices, with the fake driver."""

from __future__ import annotations

from tests.cuda.fake_driver import no_device, run_with_fake_driver

__all__ = ["no_device"]

TWO_PROGRAMS = """
    from concurrent.futures import ThreadPoolExecutor
    from tests.cuda.frames import DeviceMemory, Program
    from tests.waiting import formed

    broker = moolink.Broker(first=True)
    address = broker.listen("127.0.0.1:0")[0]
    groups = []
    for name in ("a", "b"):
        rpc = moolink.Rpc(name, timeout=20)
        rpc.connect(address)
        groups.append(moolink.Group(rpc, "group"))
    formed(groups)
    memory = DeviceMemory(1)

    def in_both(does):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(does, groups, range(2)))
    """


def test_a_program_reduces_what_its_stream_has_queued_before_it() -> None:
    run_with_fake_driver(
        TWO_PROGRAMS,
        """
        def step(group, rank):
            floats = np.arange(300_000, dtype=np.float32) + rank
            integers = np.full(7, rank + 1, np.int64)
            operands = [(array, memory.queue(array)) for array in (floats, integers, floats[:0])]
            results = [memory.allocate(max(array.nbytes, 1)) for array, _ in operands]
            epoch = memory.queue(np.array([group.epoch() & 0xFFFFFFFF], np.uint32))
            chain = memory.queue(np.ones(1, np.float32))
            arrays = [(array.dtype.name, array.size, at, to)
                      for (array, at), to in zip(operands, results, strict=True)]
            Program(1).all_reduce(group, arrays, epoch, chain)
            assert memory.read(chain, np.ones(1, np.float32)) == 0
            return [memory.read(to, array) for (array, _), to in zip(operands, results)]

        before = _core.cuda_info()
        for _ in range(3):
            for floats, integers, nothing in in_both(step):
                assert (floats == 2 * np.arange(300_000) + 1).all()
                assert (integers == 3).all() and nothing.size == 0
        after = _core.cuda_info()
        moved = 3 * 2 * (4 * 300_000 + 8 * 7 + 4)  # with the epoch, and back with the chain
        assert after["bytes_to_host"] - before["bytes_to_host"] == moved
        assert after["bytes_to_device"] - before["bytes_to_device"] == moved
        assert after["copies_to_host"] - before["copies_to_host"] == 6
        """,
    )


def test_what_a_program_on_a_device_reports() -> None:
    run_with_fake_driver(
        TWO_PROGRAMS,
        """
        def refused(program, group, epoch):
            at = memory.queue(np.ones(4, np.float32))
            chain = memory.queue(np.ones(1, np.float32))
            try:
                program.all_reduce(group, [("float32", 4, at, at)],
                                   memory.queue(np.array([epoch], np.uint32)), chain)
            except RuntimeError as error:
                return str(error)
            raise AssertionError("it passed")

        epoch = groups[0].epoch()
        assert "GroupChanged" in refused(Program(1), groups[0], epoch + 5)
        assert "cuda:7" in refused(Program(7), groups[0], epoch)
        older = Program(1)
        older.forget_devices()
        assert "use a newer one" in refused(older, groups[0], epoch)
        """,
    )
