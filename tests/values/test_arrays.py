"""Arrays: every dtype and layout arrives right, in memory of its own, or is refused by name."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from moolink import _core
from moolink.errors import Error, WireError
from tests.waiting import PROCESS_LIMIT

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ONLY_NUMPY = ["M8[ns]", "M8[D]", "m8[25us]", "M8", "U3", "S5"]


def round_trip(value: Any, **options: Any) -> Any:
    return _core.decode(*_core.encode(value), **options)


def example(dtype: str, shape: tuple[int, ...] = (5, 7)) -> np.ndarray[Any, Any]:
    """Every byte pattern may occur in memory, so any misplaced byte shows."""
    size = int(np.prod(shape))
    if dtype[-1] in "35" and dtype[0] in "US":
        return np.array(
            [f"{i}é"[:3] if dtype[0] == "U" else f"{i}".encode() for i in range(size)], dtype
        ).reshape(shape)
    return (np.arange(size) % 251).astype(dtype).reshape(shape)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return (
        type(a) is type(b)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.tobytes() == b.tobytes()
    )


@pytest.mark.parametrize("dtype", NUMBERS + ONLY_NUMPY)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (0, 3), (40, 11), (2, 1, 3)])
def test_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    array = example(dtype, shape)
    assert same(round_trip(array), array)


@pytest.mark.parametrize("dtype", [">i2", ">f4", ">c16", ">M8[ns]", ">M8", ">U3"])
def test_big_endian_arrives_native(dtype: str) -> None:
    array = example(dtype[1:])
    big = array.byteswap().view(dtype)  # astype leaves dates without a unit as they are
    assert same(round_trip(big), array)
    assert same(round_trip(big[::-1, 1]), array[::-1, 1].copy())


def test_a_view_ships_its_elements_not_its_span() -> None:
    large = np.zeros((1000, 1000))
    _, parts = _core.encode(large[:, ::100])
    assert [len(part) for part in parts] == [1000 * 10 * 8]
    _, parts = _core.encode(np.broadcast_to(np.zeros(1000), (3, 1000)))
    assert [len(part) for part in parts] == [3 * 1000 * 8]


def test_a_field_of_a_structured_array() -> None:
    table = np.zeros(50, dtype=[("a", "i4"), ("b", "f8")])
    table["b"] = np.arange(50)
    assert same(round_trip(table["b"]), np.arange(50, dtype="f8"))


def test_received_arrays_are_private_writable_and_aligned() -> None:
    array = np.arange(1000.0)
    body, parts = _core.encode([array, array, array[:3]])
    first, second, small = _core.decode(body, parts)
    for received in (first, second, small):
        assert received.flags.writeable
        assert received.flags.c_contiguous
        assert received.ctypes.data % 64 == 0
    first[:] = -1
    small[:] = -2
    assert second.tolist() == array.tolist()
    assert _core.decode(body, parts)[0].tolist() == array.tolist()


def test_read_only_arrays_arrive_writable() -> None:
    array = np.arange(100)
    array.flags.writeable = False
    assert round_trip(array).flags.writeable


def test_the_bytes_are_those_at_the_time_of_the_call() -> None:
    array = np.zeros(1000)
    message = _core.encode(array)
    array[:] = 1
    assert not _core.decode(*message).any()


def test_a_received_array_keeps_and_frees_its_memory() -> None:
    received = round_trip(np.arange(1000))
    view = received[10:20]
    memory = weakref.ref(received)
    del received
    gc.collect()
    assert view.tolist() == list(range(10, 20))
    del view
    gc.collect()
    assert memory() is None


SCALARS = [
    *(np.dtype(dtype).type(1) for dtype in NUMBERS),
    np.datetime64("2024-02-29", "D"),
    np.datetime64("NaT"),
    np.timedelta64(5, "us"),
    np.str_("text"),
    np.bytes_(b"bytes"),
    np.float64("nan"),
    *(np.str_(""), np.str_("a\0b\0"), np.str_("\ud800"), np.bytes_(b""), np.bytes_(b"a\0\0")),
]


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_numpy_scalars(value: Any) -> None:
    again = round_trip(value)
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert again.tobytes() == value.tobytes()
    assert str(again) == str(value)


class Metres(np.float64):
    pass


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(3, "i4,f4"),
        np.zeros(3, "V8"),
        np.zeros(3, np.longdouble),
        np.void(b"ab"),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        Metres(3),
    ],
    ids=["object", "structured", "void", "longdouble", "void scalar", "masked", "record", "scalar"],
)
def test_what_would_lose_meaning_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        _core.encode(value)


@pytest.mark.parametrize("dtype", ["V0", "U0", "S0", []], ids=str)
def test_elements_without_bytes_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        _core.encode(np.ndarray((3,), dtype))
    with pytest.raises(TypeError, match="cannot be sent"):
        _core.encode(np.zeros(3, [("empty", dtype), ("b", "i4")])["empty"])


def test_characters_that_there_are_not_are_refused_by_the_receiver() -> None:
    invalid = np.full(50, 0x110000, "u4").view("U10")
    with pytest.raises(WireError, match="no character"):
        round_trip(invalid)
    with pytest.raises(WireError, match="no character"):
        round_trip(invalid[:1])


class Exporter:
    """An array of no framework that moolink knows."""

    def __init__(self, array: np.ndarray[Any, Any], versioned: bool) -> None:
        self.array = array
        self.versioned = versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_anything_with_dlpack_arrives_as_numpy(versioned: bool) -> None:
    array = example("f4", (30, 30))[::2, ::-1]
    assert same(round_trip(Exporter(array, versioned)), np.ascontiguousarray(array))


def test_exporters_on_other_devices_are_refused_by_name() -> None:
    class Elsewhere(Exporter):
        device = (10, 1)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.device

    with pytest.raises(TypeError, match="rocm:1"):
        _core.encode(Elsewhere(np.zeros(3), True))
    Elsewhere.device = (2, 99)
    with pytest.raises(Error, match="Elsewhere on cuda:99"):
        _core.encode(Elsewhere(np.zeros(3), True))


def test_exporters_that_return_no_capsule_are_refused() -> None:
    class Broken(Exporter):
        def __dlpack__(self, **_: Any) -> Any:
            return 5

    with pytest.raises(TypeError, match="did not return a DLPack capsule"):
        _core.encode(Broken(np.zeros(3), True))


def test_views_of_exporters_and_buffers() -> None:
    array = np.zeros((3, 4), np.int16)[:, ::2]
    view = _core.as_array(Exporter(array, True))
    assert view.dtype == np.int16
    assert view.shape == (3, 2)
    assert view.strides == (8, 4)
    assert view.flags.writeable
    assert view.ctypes.data == array.ctypes.data
    assert not _core.as_array(b"abc").flags.writeable
    with pytest.raises(TypeError, match="expected a tensor"):
        _core.as_array([1, 2])
    block = np.zeros(64, np.uint8)
    with pytest.raises(TypeError, match="of numbers"):
        _core.fill_block(block, [np.zeros(3, "U3")], [0])


def test_frameworks_the_receiver_has_not_imported() -> None:
    """A torch tensor arrives as numpy where torch is not imported; bfloat16 needs ml_dtypes."""
    torch = pytest.importorskip("torch")
    plain = _core.encode(torch.arange(100.0).reshape(10, 10))
    brain = _core.encode(torch.ones(100, dtype=torch.bfloat16))
    script = (
        "import sys\n"
        "sys.modules['ml_dtypes'] = None\n"  # as if it were not installed
        "from moolink import _core, errors\n"
        f"array = _core.decode({plain[0]!r}, {plain[1]!r})\n"
        "assert 'torch' not in sys.modules\n"
        "assert type(array).__name__ == 'ndarray' and array.flags.writeable\n"
        "assert array.tolist()[9][9] == 99.0\n"
        "try:\n"
        f"    _core.decode({brain[0]!r}, {brain[1]!r})\n"
        "except errors.WireError as e:\n"
        "    assert 'install ml_dtypes' in str(e)\n"
        "else:\n"
        "    raise SystemExit('bfloat16 was accepted')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PROCESS_LIMIT)


def test_a_part_of_another_size_than_the_array_says() -> None:
    body, parts = _core.encode(np.zeros(100))
    with pytest.raises(WireError, match="800 bytes whose part has 799"):
        _core.decode(body, [parts[0][:-1]])


def test_arrays_above_the_limit_are_refused_at_the_sender() -> None:
    array = np.zeros(100)
    assert len(_core.encode([array, array], max_message=1600)[1]) == 2
    with pytest.raises(ValueError, match="exceed the limit"):
        _core.encode([array, array], max_message=1599)
