"""What moolink hands out as DLPack: both generations of capsules, and what consumers may ask."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from moolink import _core

get_name = ctypes.pythonapi.PyCapsule_GetName
get_name.restype = ctypes.c_char_p
get_name.argtypes = [ctypes.py_object]
get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.restype = ctypes.c_void_p
get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def received(size: int = 100, dtype: str = "f4") -> tuple[Any, np.ndarray[Any, Any]]:
    """The owner of a received array's memory, and the array."""
    array = _core.decode(*_core.encode(np.arange(size).astype(dtype)))
    return array.base, array


def name_of(capsule: Any) -> bytes:
    return bytes(get_name(capsule))


def words(capsule: Any, count: int) -> list[int]:
    """The first 64-bit words of what a versioned capsule holds."""
    pointer = get_pointer(capsule, b"dltensor_versioned")
    return list((ctypes.c_uint64 * count).from_address(pointer))


def version_and_flags(capsule: Any) -> tuple[int, int, int]:
    version, _, _, flags = words(capsule, 4)
    return version & 0xFFFFFFFF, version >> 32, flags


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
        ((2, 0), b"dltensor_versioned"),
    ],
)
def test_the_newest_version_that_the_consumer_knows(asked: Any, given: bytes) -> None:
    owner, _ = received()
    assert name_of(owner.__dlpack__(max_version=asked)) == given


def test_the_version_is_not_above_what_was_asked() -> None:
    owner, _ = received()
    assert version_and_flags(owner.__dlpack__(max_version=(1, 0))) == (1, 0, 0)
    assert version_and_flags(owner.__dlpack__(max_version=(1, 1))) == (1, 1, 0)
    assert version_and_flags(owner.__dlpack__(max_version=(1, 99)))[0] == 1


def test_a_copy_when_asked() -> None:
    owner, array = received()
    capsule = owner.__dlpack__(max_version=(1, 3), copy=True)
    assert version_and_flags(capsule)[2] == 2  # IS_COPIED

    class Copied:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            return owner.__dlpack__(**{**options, "copy": True})

    copy = np.from_dlpack(Copied())
    copy[:] = -1
    assert array.tolist() == list(range(100))
    shared = np.from_dlpack(owner)
    assert np.shares_memory(shared, array)
    assert np.from_dlpack(owner, copy=False).ctypes.data == array.ctypes.data


def test_streams_and_devices() -> None:
    owner, _ = received()
    assert owner.__dlpack_device__() == (1, 0)
    for stream in (None, -1):
        owner.__dlpack__(stream=stream, max_version=(1, 0))
    with pytest.raises(BufferError, match="no streams"):
        owner.__dlpack__(stream=2, max_version=(1, 0))
    owner.__dlpack__(dl_device=(1, 0), max_version=(1, 0))
    with pytest.raises(BufferError, match="cuda:0"):
        owner.__dlpack__(dl_device=(2, 0), max_version=(1, 0))


def test_memory_outlives_the_array_and_capsules_may_be_dropped() -> None:
    owner, array = received(1000)
    owner.__dlpack__()  # never consumed
    owner.__dlpack__(max_version=(1, 0))
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(owner)
    del owner, array
    gc.collect()
    assert tensor.tolist() == [float(i) for i in range(1000)]


def test_tvm_takes_it() -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    owner, array = received()
    tensor = tvm_ffi.from_dlpack(owner)
    assert np.from_dlpack(tensor).ctypes.data == array.ctypes.data
