"""Arrays of frameworks that moolink has never heard of, wherever arrays are taken."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import _core
from moolink.data.frameworks import as_numpy
from tests.interop.conftest import together
from tests.waiting import until

tvm_ffi = pytest.importorskip("tvm_ffi")


def tensor(array: np.ndarray[Any, Any]) -> Any:
    return tvm_ffi.from_dlpack(array)


@pytest.fixture
def peers() -> Iterator[tuple[moolink.Rpc, moolink.Rpc]]:
    with moolink.Rpc("server", timeout=20) as server, moolink.Rpc("client", timeout=20) as client:
        client.connect(server.listen("127.0.0.1:0")[0])
        yield client, server


def test_calls(peers: tuple[moolink.Rpc, moolink.Rpc]) -> None:
    client, server = peers
    server.define("echo", lambda value: value)
    for array in (np.arange(5, dtype=np.int16), np.arange(50_000.0).reshape(100, 500)):
        again = client.sync("server", "echo", {"x": tensor(array)})["x"]
        assert again.dtype == array.dtype
        assert np.array_equal(again, array)


def test_collectives(groups: tuple[moolink.Group, moolink.Group]) -> None:
    a, b = groups
    for size in (7, 100_000):
        array = np.arange(size, dtype=np.float32)
        x, y = together(
            lambda array=array: a.all_reduce("x", tensor(array)).result(),
            lambda array=array: b.all_reduce("x", array).result(),
        )
        assert np.array_equal(x, array * 2)
        assert np.array_equal(x, y)
        x, y = together(
            lambda array=array: a.all_reduce("x", {"k": tensor(array)}).result(),
            lambda array=array: b.all_reduce("x", {"k": array}).result(),
        )
        assert np.array_equal(x["k"], array * 2)
        assert np.array_equal(y["k"], array * 2)


def test_batches() -> None:
    batcher = moolink.Batcher(3)
    for row in np.arange(12.0).reshape(3, 4):
        batcher.stack({"x": tensor(np.ascontiguousarray(row))})
    assert np.array_equal(batcher.get()["x"], np.arange(12.0).reshape(3, 4))


def test_actions() -> None:
    actions = np.arange(4)
    assert np.array_equal(as_numpy(tensor(actions)), actions)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "bfloat16"])
def test_dtypes_arrive(dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    memory = np.arange(64, dtype=np.uint8) % 2
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    value = memory.view(kind)
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")
        given = tensor(torch.from_numpy(memory).view(torch.bfloat16))
    else:
        given = tensor(value)
    again = _core.decode(*_core.encode(given))
    assert again.dtype == kind
    assert again.tobytes() == value.tobytes()


def test_as_array_shares_memory_whatever_the_strides() -> None:
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    for view in (
        array,
        array[::2, 1:],
        array.T,
        array[::-1, ::-3],
        array[:0],
        array[2:3, 3].reshape(()),
    ):
        shared = _core.as_array(Exchanged(view))
        assert shared.shape == view.shape
        assert np.array_equal(shared, view)
        if view.size:
            assert np.shares_memory(shared, array)
    with pytest.raises(TypeError, match="expected a tensor"):
        _core.as_array([1, 2])


class Exchanged:
    """A tensor whose type offers DLPack's C functions and nothing else."""

    taken = 0  # of tensors that were handed out and not freed

    def __init__(self, array: np.ndarray[Any, Any], *, read_only: bool = False) -> None:
        self.array = array
        self.read_only = read_only
        self.type: tuple[int, int, int] | None = None
        self.device = (1, 0)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [
    ("version", ctypes.c_uint32 * 2),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", Deleter),
    ("flags", ctypes.c_uint64),
    ("tensor", Tensor),
]
FromObject = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.POINTER(Managed))
)
kept: dict[int, Any] = {}


def free(managed: Any) -> None:
    del kept[ctypes.addressof(managed.contents)]
    Exchanged.taken -= 1


def from_object(value: Exchanged, out: Any) -> int:
    array = value.array
    dims = ctypes.c_int64 * array.ndim
    shape = dims(*array.shape)
    strides = dims(*(stride // array.itemsize for stride in array.strides))
    code = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}[array.dtype.kind]
    managed = Managed((1, 3), None, deleter, int(value.read_only))
    managed.tensor.data = array.ctypes.data
    managed.tensor.device[:] = value.device
    managed.tensor.ndim = array.ndim
    managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = value.type or (
        code,
        array.itemsize * 8,
        1,
    )
    managed.tensor.shape, managed.tensor.strides = shape, strides
    kept[ctypes.addressof(managed)] = (managed, array, shape, strides)
    Exchanged.taken += 1
    out[0] = ctypes.pointer(managed)
    return 0


deleter = Deleter(free)
from_object_function = FromObject(from_object)


class Api(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_from_object", FromObject),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


api = Api((1, 3), None, None, from_object_function)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api_name = ctypes.create_string_buffer(b"dlpack_exchange_api")
Exchanged.__dlpack_c_exchange_api__ = new_capsule(  # type: ignore[attr-defined]
    ctypes.addressof(api), api_name, None
)


def test_the_c_exchange_api_is_enough() -> None:
    array = np.arange(3000, dtype=np.complex64).reshape(50, 60)
    for view in (array, array[::7, ::-1]):
        again = _core.decode(*_core.encode(Exchanged(view)))
        assert np.array_equal(again, view)
    assert Exchanged.taken == 0, "each export is freed"


def test_a_read_only_export_is_honoured() -> None:
    array = np.arange(10.0)
    protected = _core.as_array(Exchanged(array, read_only=True))
    assert not protected.flags.writeable
    assert protected.ctypes.data == array.ctypes.data
    del protected
    shared = _core.as_array(Exchanged(array))
    assert shared.flags.writeable
    shared[3] = -1
    assert array[3] == -1
    del shared
    until(lambda: Exchanged.taken == 0, "the export to be freed")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ((0, 4, 1), "int4"),
        ((1, 2, 1), "uint2"),
        ((17, 4, 2), "float4_e2m1fn x2"),
        ((2, 32, 4), "float32 x4"),
        ((15, 6, 1), "float6_e2m3fn"),
        ((99, 8, 1), "code 99"),
    ],
)
def test_elements_that_do_not_travel_are_refused_by_name(
    kind: tuple[int, int, int], name: str
) -> None:
    value = Exchanged(np.zeros(8, np.uint8))
    value.type = kind
    with pytest.raises(TypeError, match=rf"Exchanged of .*{name}.* on cpu"):
        _core.encode(value)
    assert Exchanged.taken == 0


def test_other_devices_are_refused_by_name() -> None:
    value = Exchanged(np.zeros(8, np.uint8))
    value.device = (9, 1)
    with pytest.raises(TypeError, match=r"Exchanged on .*9:1"):
        _core.encode(value)
    assert Exchanged.taken == 0
