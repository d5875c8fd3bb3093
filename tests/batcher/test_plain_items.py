"""Items that are copied at once, and those that only look like them."""

import collections
import contextlib
import sys
import threading

import numpy as np
import pytest
import torch

import moolink

Pair = collections.namedtuple("Pair", ["left", "right"])


def batch_of(items):
    batcher = moolink.Batcher(len(items))
    for item in items:
        batcher.stack(item)
    return batcher.get()


def negated_view():
    """A view that negates what its memory holds."""
    return torch.arange(6.0).to(torch.complex64).mul(1j).conj().imag


TORCH = {
    "as it is": lambda: torch.arange(6.0),
    "with gaps": lambda: torch.arange(12.0)[::2],
    "part of a graph": lambda: torch.arange(6.0, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(6.0)),
    "negated": negated_view,
    "from an offset": lambda: torch.arange(-3.0, 6.0)[3:],
}


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("first", ["as it is", "part of a graph"])
def test_every_kind_of_torch_tensor_has_the_values_that_it_shows(first, kind):
    items = [TORCH[first](), TORCH[kind](), TORCH["as it is"]()]
    expected = torch.stack([item.detach().clone() for item in items])
    batch = batch_of(items)
    assert torch.equal(batch, expected)
    assert not batch.requires_grad


@pytest.mark.parametrize(
    "odd",
    [
        np.arange(12.0)[::2],
        np.arange(6.0)[::-1],
        np.asfortranarray(np.arange(6.0)),
        np.arange(6.0).astype(">f8"),
    ],
)
def test_numpy_arrays_of_other_order_and_type_are_converted(odd):
    plain = np.arange(6.0)
    try:
        batch = batch_of([plain, odd, plain])
    except ValueError:
        assert odd.dtype != plain.dtype  # told apart by dtype, as everywhere
    else:
        np.testing.assert_array_equal(batch, np.stack([plain, np.asarray(odd), plain]))


def test_nests_are_told_apart_by_type_and_keys():
    def item(value):
        return {"a": Pair(np.float32(value), [np.full(2, value)]), "b": (np.full((0, 3), value),)}

    batcher = moolink.Batcher(3)
    batcher.stack(item(1.0))
    batcher.stack({key: item(2.0)[key] for key in ("b", "a")})  # in another order
    with pytest.raises(ValueError, match="missing keys"):
        batcher.stack({"a": item(0.0)["a"], "c": item(0.0)["b"]})
    with pytest.raises(ValueError, match="expected a Pair, got tuple"):
        batcher.stack({"a": tuple(item(0.0)["a"]), "b": item(0.0)["b"]})
    with pytest.raises(ValueError, match=r"a.right\[0\]: expected \(2,\) float64, got \(3,\)"):
        batcher.stack({"a": Pair(np.float32(0.0), [np.zeros(3)]), "b": item(0.0)["b"]})
    batcher.stack(collections.OrderedDict(item(3.0)))
    batch = batcher.get()
    assert type(batch["a"]) is Pair
    np.testing.assert_array_equal(batch["a"].left, np.float32([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(batch["a"].right[0], [[1.0] * 2, [2.0] * 2, [3.0] * 2])
    assert batch["b"][0].shape == (3, 0, 3)


def test_what_references_hold_is_counted():
    first, second = np.array([object()]), np.array([object()])
    batch = batch_of([{"x": first}, {"x": second}])
    owned = second[0]
    del second
    assert batch["x"][1, 0] is owned


def test_large_items_of_several_threads_stay_whole():
    batcher = moolink.Batcher(4)
    shape = (1 << 18,)  # copied without the GIL

    def add(value):
        for _ in range(20):
            batcher.stack({"x": np.full(shape, value, np.uint8), "y": np.int64(value)})

    threads = [threading.Thread(target=add, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        batch = batcher.get(60)
        assert (batch["x"] == batch["y"][:, None]).all()
    for thread in threads:
        thread.join()


def test_an_item_that_another_thread_changes_is_whole_or_refused():
    batcher = moolink.Batcher(4)
    item = {"x": [torch.zeros(3) for _ in range(20)]}
    batcher.stack(item)
    done = threading.Event()

    def change():
        while not done.is_set():
            item["x"][:] = []
            item["x"][:] = [torch.ones(3) for _ in range(20)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(5000):
            with contextlib.suppress(ValueError, IndexError):
                batcher.stack(item)
    finally:
        done.set()
        changer.join()
        sys.setswitchinterval(interval)
    while not batcher.empty():
        batch = batcher.get()
        assert all(((leaf == 0) | (leaf == 1)).all() for leaf in batch["x"])


def test_a_batch_keeps_its_memory_while_the_next_one_is_filled():
    batcher = moolink.Batcher(2)
    for value in range(6):
        batcher.stack(np.full(1 << 16, value, np.uint8))
    batches = [batcher.get() for _ in range(3)]
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


def test_a_closed_batcher_takes_no_plain_item():
    batcher = moolink.Batcher(3)
    batcher.stack(np.zeros(2))
    batcher.close()
    with pytest.raises(moolink.Closed):
        batcher.stack(np.zeros(2))
