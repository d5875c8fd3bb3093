"""Values of every kind for property tests, and what makes two of them the same."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from moolink.data.values import register


@register
@dataclasses.dataclass
class Config:
    name: Any
    layers: Any = None


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = 0


@register
class Point(NamedTuple):
    x: Any
    y: Any


@register
class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


@register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


# --- equality


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def canonical(value: Any) -> Any:
    """A form in which two values are equal exactly when they are of the same types and bits."""
    kind = type(value)
    if kind is float:
        return kind, bits(value)
    if kind is complex:
        return kind, bits(value.real), bits(value.imag)
    if isinstance(value, np.ndarray):
        # Not astype, which leaves dates without a unit as they are.
        native = value if value.dtype.isnative else value.byteswap()
        return kind, str(value.dtype.newbyteorder("=")), value.shape, native.tobytes()
    if isinstance(value, (np.str_, np.bytes_)):
        return kind, value[:]
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return canonical_tensor(value)
    if isinstance(value, (enum.Enum, datetime.date, datetime.time, datetime.tzinfo)):
        return kind, repr(value), getattr(value, "fold", 0)
    if kind is decimal.Decimal:
        return kind, repr(value)
    if kind is slice:
        return kind, canonical(value.start), canonical(value.stop), canonical(value.step)
    return canonical_container(value)


def canonical_container(value: Any) -> Any:
    kind = type(value)
    if dataclasses.is_dataclass(value):
        return kind, [canonical(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        return kind, [(canonical(k), canonical(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted((canonical(item) for item in value), key=repr)
    if isinstance(value, collections.deque):
        return kind, value.maxlen, [canonical(item) for item in value]
    if isinstance(value, (list, tuple)):
        return kind, [canonical(item) for item in value]
    return kind, value


def canonical_tensor(tensor: Any) -> Any:
    import torch

    read = tensor.detach().resolve_conj().resolve_neg()
    plain = read.clone(memory_format=torch.contiguous_format).reshape(-1)
    content = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return type(tensor), str(tensor.dtype), tuple(tensor.shape), content


# --- arrays

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ONLY_NUMPY = ["M8", "M8[D]", "M8[ns]", "m8[25us]", "m8[as]", "U1", "U7", "S1", "S5"]
EXTENSIONS = [
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "float8_e8m0fnu",
]
DTYPES = [
    *(np.dtype(text) for text in NUMBERS + ONLY_NUMPY),
    *(np.dtype(text).newbyteorder(">") for text in NUMBERS + ONLY_NUMPY),
    *(np.dtype(getattr(ml_dtypes, name)) for name in EXTENSIONS),
]


def random_array(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Any bits that an element may have: every misplaced byte shows."""
    count = int(np.prod(shape))
    generator = np.random.default_rng(seed)
    if dtype.kind == "U":
        points = generator.integers(0, 0x110000, count * (dtype.itemsize // 4))
        memory = points.astype(np.dtype("u4").newbyteorder(dtype.byteorder)).tobytes()
    elif dtype.kind == "b":
        memory = generator.integers(0, 2, count, np.uint8).tobytes()
    else:
        memory = generator.bytes(count * dtype.itemsize)
    return np.frombuffer(bytearray(memory), dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn, dtypes: list[np.dtype[Any]] = DTYPES) -> np.ndarray[Any, Any]:
    """Arrays as numpy can lay them out: sliced, reversed, transposed, broadcast, unaligned, a
    structure's field, read-only; also empty ones, ones without dimensions, and large ones."""
    dtype = draw(st.sampled_from(dtypes))
    small = st.lists(st.integers(0, 6), max_size=4).map(tuple)
    shape = draw(small | st.sampled_from([(5000,), (70, 90), (3, 1, 2000)]))
    array = random_array(dtype, shape, draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        array = odd_memory(array)
    if draw(st.booleans()):
        slices = [
            slice(draw(st.integers(0, 3)), None, draw(st.sampled_from([1, 2, 3, -1, -2])))
            for _ in shape
        ]
        array = array[(*slices, ...)].transpose(draw(st.permutations(range(array.ndim))))
    if draw(st.integers(0, 3)) == 0 and array.ndim < 5:
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    elif draw(st.booleans()):
        array.flags.writeable = False
    return array


def odd_memory(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same elements as a field of packed structures: neither aligned nor next to another."""
    table = np.zeros(array.shape, [("before", "u1"), ("it", array.dtype), ("after", "S2")])
    table["it"] = array
    return table["it"]


@st.composite
def numpy_scalars(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype.isnative]))
    if dtype.kind == "U":
        return np.str_(draw(st.text(st.characters(), max_size=5)))
    if dtype.kind == "S":
        return np.bytes_(draw(st.binary(max_size=5)))
    return random_array(dtype, (1,), draw(st.integers(0, 2**32)))[0]


# --- trees

any_floats = st.floats() | st.binary(min_size=8, max_size=8).map(
    lambda memory: struct.unpack("<d", memory)[0]  # every payload of a NaN
)
zones = st.none() | st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
)
plain_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**2000), max_value=2**2000)
    | any_floats
    | st.builds(complex, any_floats, any_floats)
    | st.text(st.characters())  # includes lone surrogates
    | st.binary()
)
library_leaves = (
    st.sampled_from([Colour.RED, Colour.GREEN, Level.HIGH, Access.READ, Access(0), Access(3)])
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.dates()
    | st.timedeltas()
    | st.datetimes(timezones=zones)
    | st.times(timezones=zones)
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
)
hashable_leaves = plain_leaves | library_leaves | numpy_scalars()
hashables = st.recursive(
    hashable_leaves,
    lambda inner: (
        st.tuples(inner, inner)
        | st.frozensets(inner, max_size=3)
        | st.builds(Frozen, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=6,
)
other_leaves = (
    st.binary().map(bytearray)
    | st.builds(slice, st.integers(), st.none(), st.integers())
    | st.decimals(allow_nan=True)
    | arrays()
)
values = st.recursive(
    hashables | other_leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(hashables, inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.builds(Config, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=20,
)
