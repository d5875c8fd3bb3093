import asyncio
import collections
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import moolink
from moolink.data.batcher import Batcher
from tests.waiting import PROCESS_LIMIT, until

LONG = 30.0

Step = collections.namedtuple("Step", ["obs", "extra"])


def frame(value: int) -> np.ndarray:
    return np.full((2, 3), value, np.uint8)


class TestStack:
    def test_stacks_every_leaf_of_a_nest_and_keeps_its_types(self):
        batcher = Batcher(3)
        for i in range(3):
            assert batcher.empty()
            assert batcher.size() == 0
            state = [np.float32(i), (np.array([i, -i]),)]
            batcher.stack({"step": Step(frame(i), {"reward": np.float64(i / 2)}), "state": state})
        assert not batcher.empty()
        assert batcher.size() == 1
        batch = batcher.get()
        assert isinstance(batch["step"], Step)
        np.testing.assert_array_equal(batch["step"].obs, np.stack([frame(i) for i in range(3)]))
        np.testing.assert_array_equal(batch["step"].extra["reward"], [0.0, 0.5, 1.0])
        assert batch["step"].extra["reward"].dtype == np.float64
        assert isinstance(batch["state"], list)
        assert isinstance(batch["state"][1], tuple)
        assert batch["state"][0].dtype == np.float32
        np.testing.assert_array_equal(batch["state"][1][0], [[0, 0], [1, -1], [2, -2]])

    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    @pytest.mark.parametrize("library", [np, torch])
    def test_dim_is_the_new_dimension(self, dim, library):
        make = np.asarray if library is np else torch.from_numpy
        items = [make(np.arange(6, dtype=np.float32).reshape(2, 3) + i) for i in range(4)]
        batcher = Batcher(4, dim=dim)
        for item in items:
            batcher.stack(item)
        batch = batcher.get()
        assert type(batch) is type(items[0])
        np.testing.assert_array_equal(np.asarray(batch), np.asarray(library.stack(items, dim)))

    def test_items_are_captured_when_they_are_added(self):
        batcher, item = Batcher(2), np.zeros(3)
        batcher.stack(item)
        item[:] = 1
        batcher.stack(item)
        item[:] = 2
        np.testing.assert_array_equal(batcher.get(), [[0, 0, 0], [1, 1, 1]])

    def test_strides_are_honoured(self):
        batcher = Batcher(2)
        base = np.arange(24).reshape(4, 6)
        for item in (base.T[::2], base[::-1].T[1::2]):
            batcher.stack(item)
        batch = batcher.get()
        np.testing.assert_array_equal(batch[0], base.T[::2])
        np.testing.assert_array_equal(batch[1], base[::-1].T[1::2])

    def test_plain_values_become_a_list_with_each_items_value(self):
        batcher = Batcher(2)
        batcher.stack({"x": np.zeros(1), "name": "a", "n": 1, "none": None})
        batcher.stack({"x": np.zeros(1), "name": "b", "n": 2, "none": None})
        batch = batcher.get()
        assert (batch["name"], batch["n"], batch["none"]) == (["a", "b"], [1, 2], [None, None])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
    def test_torch_dtypes_survive(self, dtype):
        batcher = Batcher(2)
        for value in (0, 1):
            batcher.stack(torch.full((40_000,), value, dtype=dtype))
        batch = batcher.get()
        assert batch.dtype == dtype
        assert batch.shape == (2, 40_000)
        assert (batch[0] == 0).all()
        assert (batch[1] == 1).all()

    def test_tensors_that_numpy_cannot_see_are_copied_too(self):
        batcher = Batcher(2)
        batcher.stack(torch.ones(2, dtype=torch.complex64, requires_grad=True))
        batcher.stack(torch.tensor([1j, 2j]).conj())
        batch = batcher.get()
        assert not batch.requires_grad
        assert batch.tolist() == [[1, 1], [-1j, -2j]]

    def test_a_batch_is_never_written_again_while_somebody_holds_a_part_of_it(self):
        batcher = Batcher(2)
        held = []
        for i in range(8):
            for _ in range(2):
                batcher.stack({"np": np.full(70_000, i), "torch": torch.full((70_000,), i)})
            batch = batcher.get()
            held.append((batch["np"][1, 5:9], batch["torch"][0, 3:4]))
            del batch
        gc.collect()
        for i, (array, tensor) in enumerate(held):
            assert (array == i).all()
            assert (tensor == i).all()


class TestCat:
    def test_an_item_is_split_over_several_batches(self):
        batcher = Batcher(4)
        batcher.cat({"a": np.arange(3), "b": torch.arange(3) * 10, "peer": "x"})
        assert batcher.empty()
        batcher.cat({"a": np.arange(3, 13), "b": torch.arange(3, 13) * 10, "peer": "y"})
        assert batcher.size() == 3
        for i, peers in enumerate([["x", "x", "x", "y"], ["y"] * 4, ["y"] * 4]):
            batch = batcher.get()
            np.testing.assert_array_equal(batch["a"], np.arange(4 * i, 4 * i + 4))
            assert batch["b"].tolist() == [10 * j for j in range(4 * i, 4 * i + 4)]
            assert batch["peer"] == peers
        assert batcher.empty()

    @pytest.mark.parametrize("dim", [1, -1])
    @pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
    def test_rows_lie_along_dim(self, dim, make):
        whole = np.arange(5 * 6).reshape(5, 6)
        batcher = Batcher(3, dim=dim)
        for start, stop in ((0, 2), (2, 6)):
            batcher.cat(make(np.ascontiguousarray(whole[:, start:stop])))
        np.testing.assert_array_equal(np.asarray(batcher.get()), whole[:, :3])
        np.testing.assert_array_equal(np.asarray(batcher.get()), whole[:, 3:])

    def test_leaves_must_have_equally_many_rows(self):
        with pytest.raises(ValueError, match=r"b: expected 3 rows as in a, got 2"):
            Batcher(4).cat({"a": np.zeros(3), "b": np.zeros(2)})

    def test_an_item_without_an_array_has_no_rows(self):
        with pytest.raises(ValueError, match="no array"):
            Batcher(4).cat({"a": 1})


FIRST = {"obs": {"image": np.zeros((84, 84), np.uint8)}, "state": [np.zeros(2), np.float32(1)]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"obs": {"image": np.zeros((84, 85), np.uint8)}},
            r"obs\.image: expected \(84, 84\) uint8, got \(84, 85\) uint8",
        ),
        (
            {"obs": {"image": np.zeros((84, 84), np.float32)}},
            r"obs\.image: expected \(84, 84\) uint8, got \(84, 84\) float32",
        ),
        ({"obs": {"image": torch.zeros(84, 84)}}, r"obs\.image: expected .*\(numpy\), got"),
        ({"obs": {"pixels": 1}}, r"obs: missing keys \['image'\], unexpected keys \['pixels'\]"),
        ({"obs": {}}, r"obs: missing keys \['image'\]"),
        ({"obs": np.zeros(3)}, r"obs: expected a dict, got ndarray"),
        ({"state": [np.zeros(2)]}, r"state: expected 2 parts, got 1"),
        ({"state": (np.zeros(2), np.float32(1))}, r"state: expected a list, got tuple"),
        ({"state": [np.zeros(2), 1.0]}, r"state\[1\]: expected \(\) float32 \(numpy\), got 1\.0"),
    ],
)
def test_a_mismatch_names_the_leaf_and_adds_nothing(change, message):
    batcher = Batcher(2)
    batcher.stack(FIRST)
    with pytest.raises(ValueError, match=message):
        batcher.stack(FIRST | change)
    assert batcher.empty()
    batcher.stack(FIRST)
    assert batcher.get()["obs"]["image"].shape == (2, 84, 84)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), r"expected \(2, 3\) torch.float32, got"),
        (torch.zeros(3, 2), r"expected \(2, 3\) torch.float32, got \(3, 2\)"),
        (np.zeros((2, 3), np.float32), r"\(torch\), got"),
    ],
)
def test_a_torch_mismatch_is_refused(other, message):
    batcher = Batcher(2)
    batcher.stack(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=message):
        batcher.stack(other)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Batcher(0)
    with pytest.raises(ValueError, match="max_batches"):
        Batcher(1, max_batches=0)
    with pytest.raises(ValueError, match=r"dim 3 is out of range"):
        Batcher(2, dim=3).stack(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="dim 0 is out of range"):
        Batcher(2).cat({"x": np.float32(1)})
    batcher = Batcher(2)
    batcher.stack(np.zeros(1))
    with pytest.raises(ValueError, match="used with stack cannot be used with cat"):
        batcher.cat(np.zeros(1))


class TestWaiting:
    def test_get_times_out_with_what_is_missing(self):
        batcher = Batcher(3)
        batcher.stack(np.zeros(1))
        with pytest.raises(moolink.TimeoutError, match=r"batch of 3 .* holds 1 so far"):
            batcher.get(timeout=0.01)

    def test_a_full_batcher_refuses_or_waits(self):
        batcher = Batcher(2, max_batches=1)
        for i in range(3):
            batcher.stack(np.array(i), block=False)
        with pytest.raises(moolink.QueueFull, match="1 of max_batches=1"):
            batcher.stack(np.array(-1), block=False)
        with pytest.raises(moolink.QueueFull):
            batcher.stack(np.array(-1), timeout=0.01)
        waiting = threading.Thread(target=batcher.stack, args=(np.array(3),))
        waiting.start()
        assert batcher.get().tolist() == [0, 1]
        waiting.join(LONG)
        assert batcher.get(timeout=LONG).tolist() == [2, 3]

    @pytest.mark.parametrize("how", [{"block": False}, {"timeout": 0.01}])
    def test_a_limit_holds_while_another_producer_waits_for_room(self, how):
        batcher = Batcher(1, max_batches=1)
        batcher.stack(np.array(0))
        waiting = threading.Thread(target=batcher.stack, args=(np.array(1),), daemon=True)
        waiting.start()
        until(lambda: batcher._stalled, "a producer that waits")
        with pytest.raises(moolink.QueueFull):
            batcher.stack(np.array(2), **how)
        assert [batcher.get(LONG).tolist() for _ in range(2)] == [[0], [1]]
        waiting.join(LONG)
        batcher.stack(np.array(3), **how)
        assert batcher.get(LONG).tolist() == [3]

    def test_a_refused_cat_adds_nothing(self):
        batcher = Batcher(2, max_batches=2)
        batcher.cat(np.arange(3))
        with pytest.raises(moolink.QueueFull):
            batcher.cat(np.arange(10, 13), block=False)
        with pytest.raises(ValueError, match="finishes 3 batches"):
            batcher.cat(np.arange(5), block=False)
        batcher.get()
        batcher.cat(np.array([3]), block=False)
        assert batcher.get().tolist() == [2, 3]

    def test_a_long_cat_waits_for_room_piece_by_piece(self):
        batcher = Batcher(2, max_batches=1)
        adding = threading.Thread(target=batcher.cat, args=(np.arange(8),))
        adding.start()
        assert [batcher.get(LONG).tolist() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        adding.join(LONG)

    def test_many_threads_add_and_take(self):
        batcher, taken = Batcher(8, max_batches=3), []

        def add(base: int) -> None:
            for i in range(200):
                batcher.stack({"id": np.array(base + i), "twice": np.full(50, 2 * (base + i))})

        def take() -> None:
            for _ in range(50):
                taken.append(batcher.get(LONG))

        threads = [threading.Thread(target=add, args=(1000 * i,)) for i in range(4)]
        threads += [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        seen = np.concatenate([batch["id"] for batch in taken])
        assert sorted(seen) == sorted(1000 * i + j for i in range(4) for j in range(200))
        for batch in taken:
            np.testing.assert_array_equal(
                batch["twice"], np.repeat(2 * batch["id"], 50).reshape(8, 50)
            )

    def test_several_tasks_await(self):
        async def main() -> list:
            batcher = Batcher(1)
            tasks = [asyncio.create_task(_await(batcher)) for _ in range(3)]
            await asyncio.sleep(0)
            thread = threading.Thread(target=lambda: [batcher.stack(np.array(i)) for i in range(3)])
            thread.start()
            return await asyncio.wait_for(asyncio.gather(*tasks), LONG)

        assert sorted(int(batch[0]) for batch in asyncio.run(main())) == [0, 1, 2]

    def test_a_cancelled_awaiter_eats_no_batch(self):
        async def main() -> np.ndarray:
            batcher = Batcher(1)
            cancelled = asyncio.create_task(_await(batcher))
            other = asyncio.create_task(_await(batcher))
            await asyncio.sleep(0)
            batcher.stack(np.array(7))
            cancelled.cancel()
            return await asyncio.wait_for(other, LONG)

        assert asyncio.run(main()).tolist() == [7]

    def test_close_wakes_everybody_and_leaves_finished_batches(self):
        batcher = Batcher(1)
        batcher.stack(np.array(1))
        assert batcher.get().tolist() == [1]
        errors = []

        def wait() -> None:
            try:
                batcher.get()
            except moolink.Closed as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        batcher.close()
        thread.join(LONG)
        assert len(errors) == 1
        with pytest.raises(moolink.Closed):
            batcher.stack(np.array(1))

    def test_get_can_be_interrupted(self):
        timer = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            Batcher(1).get(timeout=LONG)
        timer.join()


async def _await(batcher: Batcher):
    return await batcher


def test_a_handler_that_waits_for_a_batch_lends_its_slot() -> None:
    program = """
import moolink
moolink.set_max_threads(1)
with moolink.Rpc("server") as server, moolink.Rpc("client", timeout=20) as client:
    client.connect(server.listen("127.0.0.1:0")[0])
    batcher = moolink.Batcher(1)
    server.define("take", batcher.get)
    server.define("put", batcher.stack)
    taken = client.async_("server", "take")
    client.sync("server", "put", "item")
    print(taken.result())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert done.stdout == "['item']\n", done.stderr


def test_a_batch_is_private_after_a_fork():
    batcher = Batcher(1)
    batcher.stack(np.zeros(1 << 20, np.uint8))
    batch = batcher.get()
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        batch[:] = 1
        os.write(told, b"written")
        os._exit(0)
    assert os.read(ready, 7) == b"written"
    assert os.waitpid(child, 0)[1] == 0
    os.close(ready)
    os.close(told)
    assert not batch.any()
