"""XLA's call frames, made by hand: a program that calls moolink's handler on a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moolink import _core
from moolink.data.trees import layout_text

DTYPES = {"float32": 11, "int64": 5, "uint32": 8}  # numbers of XLA's PrimitiveType
EXECUTE = 3  # XLA_FFI_ExecutionStage
TEXT = 4  # XLA_FFI_AttrType
BUFFER = 1  # XLA_FFI_ArgType

Address = int


class Base(ctypes.Structure):
    """The first fields of every structure."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]

    def __init__(self, *values: Any) -> None:
        super().__init__(ctypes.sizeof(self), None, *values)


class ErrorCreate(Base):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class StreamGet(Base):
    _fields_ = [("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


class OrdinalGet(Base):
    _fields_ = [("context", ctypes.c_void_p), ("ordinal", ctypes.c_int32)]


class Version(Base):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Api(Base):
    _fields_ = [
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("error_create", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorCreate))),
        ("before_stream", ctypes.c_void_p * 3),
        ("stream_get", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(StreamGet))),
        ("before_device", ctypes.c_void_p * 12),
        ("ordinal_get", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(OrdinalGet))),
    ]


class Buffer(Base):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]


class Text(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t)]


class Values(Base):
    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Attributes(Base):
    _fields_ = [
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.c_void_p)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Frame(Base):
    _fields_ = [
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", Values),
        ("results", Values),
        ("attributes", Attributes),
    ]


class Program:
    """Calls the handler as a compiled program does; raises what it reports."""

    def __init__(self, device: int, stream: int | None = None) -> None:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        address = get_pointer(_core.xla_all_reduce_on_cuda(), None)
        assert address is not None
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self._handler: Callable[[int], int | None] = call(address)
        self._messages: list[str] = []

        def error_create(error: Any) -> int:
            self._messages.append(error.contents.message.decode())
            return 1

        def stream_get(out: Any) -> None:
            out.contents.stream = stream

        def ordinal_get(out: Any) -> None:
            out.contents.ordinal = device

        kinds = {name: kind for name, kind, *_ in Api._fields_}
        self._api = Api(
            Version(0, 3),
            None,
            kinds["error_create"](error_create),
            (ctypes.c_void_p * 3)(),
            kinds["stream_get"](stream_get),
            (ctypes.c_void_p * 12)(),
            kinds["ordinal_get"](ordinal_get),
        )

    def forget_devices(self) -> None:
        """Imitates an older XLA, whose table ends before the call for the device's ordinal."""
        self._api.struct_size = Api.ordinal_get.offset

    def all_reduce(
        self,
        group: Any,
        arrays: Sequence[tuple[str, int, Address, Address]],
        epoch: Address,
        chain: Address,
    ) -> None:
        """Reduces arrays: dtype, elements, operand, result. The token's parts have an element."""
        keep: list[Any] = []

        def made(value: Any) -> Any:
            keep.append(value)
            return value

        def buffer(dtype: str, count: int, at: Address) -> Buffer:
            return made(Buffer(DTYPES[dtype], at, 1, made((ctypes.c_int64 * 1)(count))))

        def pointers(values: Sequence[Any]) -> Any:
            return made((ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)))

        def buffers(values: list[Buffer]) -> Values:
            kinds = made((ctypes.c_int * len(values))(*[BUFFER] * len(values)))
            return Values(len(values), kinds, pointers(values))

        operands = [buffer(dtype, count, at) for dtype, count, at, _ in arrays]
        results = [buffer(dtype, count, at) for dtype, count, _, at in arrays]
        layout = layout_text(
            (f"data[{i}]", dtype, (count,)) for i, (dtype, count, *_) in enumerate(arrays)
        )
        given = {
            "group": group._core.program_key(),
            "layout": layout,
            "name": "x",
            "on_change": "raise",
            "op": "sum",
        }
        texts = [made(Text(text.encode(), len(text))) for text in given.values()]
        names = [made(Text(name.encode(), len(name))) for name in given]
        kinds = made((ctypes.c_int * len(given))(*[TEXT] * len(given)))
        frame = Frame(
            ctypes.addressof(self._api),
            None,
            EXECUTE,
            buffers([*operands, buffer("uint32", 1, epoch), buffer("float32", 1, chain)]),
            buffers([*results, buffer("float32", 1, chain)]),
            Attributes(len(given), kinds, pointers(names), pointers(texts)),
        )
        if self._handler(ctypes.addressof(frame)) is not None:
            raise RuntimeError(self._messages[-1])


class DeviceMemory:
    """Memory of the driver's device, in the order of its legacy stream."""

    def __init__(self, device: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._queued: list[Any] = []  # copied from later
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._driver.cuDeviceGet(ctypes.byref(number), device)
        self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number)

    def _within_context(self, does: Callable[[], None]) -> None:
        self._driver.cuCtxPushCurrent_v2(self._context)
        does()
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate(self, count: int) -> Address:
        address = ctypes.c_uint64()
        self._within_context(
            lambda: self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(count))
        )
        return address.value

    def _copy(self, to: Address, source: Address, count: int) -> None:
        self._within_context(
            lambda: self._driver.cuMemcpyAsync(
                ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(count), None
            )
        )

    def queue(self, array: npt.NDArray[Any]) -> Address:
        """Memory into which the array is copied by work that is only queued."""
        address = self.allocate(array.nbytes)
        self._queued.append(array)
        self._copy(address, array.ctypes.data, array.nbytes)
        return address

    def read(self, address: Address, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The elements there, once all queued work is done."""
        array = np.empty_like(like)
        self._copy(array.ctypes.data, address, array.nbytes)
        self._within_context(lambda: self._driver.cuStreamSynchronize(None))
        return array
