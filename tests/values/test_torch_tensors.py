"""Torch's tensors: dtypes numpy lacks, layouts, views that are not their memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moolink import _core
from tests.property import examples
from tests.values.conftest import Echo
from tests.values.strategies import canonical, random_array

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def round_trip(value: Any, **options: Any) -> Any:
    return _core.decode(*_core.encode(value), **options)


def same_bytes(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3,), (40, 12), (0,), (0, 3)])
def test_every_dtype(dtype: Any, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = torch.arange(size) % (2 if dtype == torch.bool else 251)
    tensor = memory.to(torch.uint8).view(dtype).reshape(shape)
    again = round_trip(tensor)
    assert type(again) is torch.Tensor
    assert again.dtype == dtype
    assert again.shape == tensor.shape
    assert again.is_contiguous()
    assert same_bytes(again, tensor)


@pytest.mark.parametrize(
    "dtype",
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str),
    ids=str,
)
@pytest.mark.filterwarnings("ignore")  # torch's own about dtypes that it is giving up
def test_every_dtype_that_torch_has(dtype: Any) -> None:
    memory = torch.arange(48, dtype=torch.uint8)
    try:
        tensor = memory.view(dtype)
    except RuntimeError:
        if dtype in DTYPES:
            raise
        tensor = torch.empty(3, dtype=torch.uint8).to(torch.float32)
        tensor = torch.quantize_per_tensor(tensor, 0.1, 0, dtype)
    if dtype in DTYPES:
        assert canonical(round_trip(tensor)) == canonical(tensor)
    else:
        with pytest.raises(TypeError, match=re.escape(str(dtype))):
            _core.encode(tensor)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(
        st.lists(st.integers(0, 6), max_size=4) | st.sampled_from([[5000], [70, 90], [3, 1, 2000]])
    )
    one = torch.empty(0, dtype=dtype).element_size()
    memory = random_array(np.dtype("u1"), (int(np.prod(shape)) * one,), draw(st.integers(0, 2**32)))
    if dtype == torch.bool:
        memory %= 2
    # An empty tensor has no bytes that could be viewed.
    tensor = torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    if draw(st.booleans()) and shape:
        steps = [slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))) for _ in shape]
        tensor = tensor[tuple(steps)].permute(draw(st.permutations(range(len(shape)))))
    if draw(st.integers(0, 3)) == 0:
        tensor = tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
    if dtype.is_complex:
        tensor = draw(st.sampled_from([tensor, tensor.conj(), tensor.conj().imag]))
    return tensor


@examples(100)
@given(tensor=tensors())
def test_tensors(echo: Echo, tensor: Any) -> None:
    before = canonical(tensor)
    first, second = echo(tensor), echo(tensor)
    for received in (first, second):
        assert canonical(received) == before
        assert received.is_contiguous()
        assert received.numel() == 0 or received.data_ptr() % 64 == 0
    if first.numel():
        first.reshape(-1).view(torch.uint8).zero_()
    assert canonical(second) == before
    assert canonical(tensor) == before


def test_scalars() -> None:
    again = round_trip(torch.tensor(3.5))
    assert again.shape == ()
    assert again.item() == 3.5


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[3],
        lambda t: t[:, 0],
        lambda t: t.expand(4, *t.shape),
        lambda t: t.unfold(0, 3, 1),
        lambda t: t.reshape(1, 1, 6, 7).to(memory_format=torch.channels_last),
        lambda t: t.as_strided((3, 3), (0, 1), 2),
    ],
)
def test_every_layout(view: Any) -> None:
    tensor = view(torch.arange(42.0).reshape(6, 7))
    again = round_trip(tensor)
    assert again.is_contiguous()
    assert torch.equal(again, tensor)


def test_gradients_are_detached_and_parameters_become_tensors() -> None:
    parameter = torch.nn.Parameter(torch.arange(100.0))
    for value in (parameter, parameter * 2):
        again = round_trip(value)
        assert type(again) is torch.Tensor
        assert not again.requires_grad
        assert torch.equal(again, value.detach())


def test_conjugated_and_negated_views_arrive_as_they_read() -> None:
    tensor = torch.complex(torch.arange(30.0), torch.arange(30.0) + 1)
    for value in (tensor.conj(), tensor.conj().imag, torch._neg_view(tensor)):
        assert value.is_conj() or value.is_neg()
        assert torch.equal(round_trip(value), value.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.empty(3, device="meta"), "on meta"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
        (lambda: torch.empty(3, dtype=torch.int4), "int4"),
    ],
    ids=["sparse", "meta", "quantized", "complex32", "int4"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own about such tensors
def test_what_cannot_be_read_is_refused_by_name(make: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        _core.encode(make())


def freed() -> Any:
    tensor = torch.ones(5000)
    tensor.untyped_storage().resize_(0)  # as sharded training frees parameters
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        freed,
        lambda: torch._efficientzerotensor((500,)),
        lambda: torch._to_functional_tensor(torch.ones(500)),
    ],
    ids=["freed", "zeros", "functional"],
)
def test_tensors_without_memory_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="has no memory"):
        _core.encode(make())
    assert round_trip(freed()[:0]).shape == (0,)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: nested tensors are a prototype
def test_tensors_of_transforms_are_refused() -> None:
    def refused(tensor: Any) -> None:
        with pytest.raises(TypeError, match=r"torch\.func"):
            _core.encode(tensor)

    def send(tensor: Any) -> Any:
        refused(tensor)
        return tensor.sum()

    torch.func.vmap(send)(torch.zeros(300, 3))
    torch.func.grad(send)(torch.zeros(300))
    refused(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(300)]))


def test_subclasses_arrive_as_plain_tensors() -> None:
    class Labelled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the subclass' own functions are not needed")

    tensor = torch.arange(3.0)
    again = round_trip(tensor.as_subclass(Labelled))
    assert type(again) is torch.Tensor
    assert torch.equal(again, tensor)


def test_received_tensors_are_private_writable_and_aligned() -> None:
    tensor = torch.zeros(1000)
    body, parts = _core.encode([tensor, tensor])
    first, second = _core.decode(body, parts)
    assert first.data_ptr() % 64 == 0
    first.fill_(1)
    assert not second.any()
    assert not tensor.any()


def test_the_receiver_may_choose_the_framework() -> None:
    tensor = torch.arange(100, dtype=torch.int16)
    array = round_trip(tensor, arrays="numpy")
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int16
    again = round_trip(np.arange(100.0), arrays="torch")
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, torch.arange(100, dtype=torch.float64))


def test_state_dicts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    state = model.state_dict()
    again = round_trip(state)
    assert type(again) is type(state)
    assert list(again) == list(state)
    for name in state:
        assert torch.equal(again[name], state[name])
    model.load_state_dict(again)


def test_parameters_are_read_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    view = _core.as_array(parameter)
    assert view.ctypes.data == parameter.data_ptr()
    assert view.shape == (4, 6)
    assert view.strides == (24, 4)
    assert _core.as_array(parameter.t()).strides == (4, 24)
