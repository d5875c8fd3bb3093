"""Hostile messages: a WireError or a value, nothing else, whatever the bytes."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import random
import sys
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moolink import _core
from moolink.errors import WireError
from tests.mutation import bent
from tests.property import examples
from tests.values.strategies import (
    Access,
    Colour,
    Config,
    Frozen,
    Point,
    canonical,
    hashables,
    values,
)


def decode(body: bytes, parts: list[bytes], **options: Any) -> Any:
    try:
        value = _core.decode(body, parts, **options)
    except WireError as e:
        return e
    canonical(value)  # looks at all that was built
    return value


@examples(500)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=100), max_size=2))
def test_random_bodies(body: bytes, parts: list[bytes]) -> None:
    decode(body, parts)


# A value with a little of everything that the decoder can build.
EVERYTHING = [
    *(None, True, 2**200, -5, 1.5, 2j, "text", b"bytes", bytearray(b"array")),
    *((1, 2), {3}, frozenset([4]), {"key": [5], 6: ()}, range(3)),
    *(Config("name", layers=[1]), Frozen(1), Point(2, 3), Colour.RED, Access.READ | Access.WRITE),
    *(np.float32(1), np.datetime64("2024-01-01", "ns"), np.zeros(3), np.zeros((5, 40))),
    *(np.zeros(3, "M8[s]"), np.zeros(40, "U3")),
]


def test_mutated_bodies() -> None:
    body, parts = _core.encode(EVERYTHING)
    generator = random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(20_000):
        outcomes[isinstance(decode(bent(body, generator), parts), WireError)] += 1
    # Most mutants are malformed; some are another value.
    assert outcomes[True] > outcomes[False] > 0


def test_every_truncation() -> None:
    body, parts = _core.encode(EVERYTHING)
    for size in range(len(body)):
        with pytest.raises(WireError):
            _core.decode(body[:size], parts)


def test_unhashable_keys() -> None:
    list_as_member, _ = _core.encode([[]])
    # {[]} cannot be written by a sender: turn the outer list's tag into a set's.
    as_set = bytes([_core.encode(set())[0][0]]) + list_as_member[1:]
    with pytest.raises(WireError, match="unhashable"):
        _core.decode(as_set, [])


def test_an_unknown_member_of_an_enum() -> None:
    body, _ = _core.encode(Colour.RED)
    with pytest.raises(WireError, match="could not be built"):
        _core.decode(body.replace(b"RED", b"BAD"), [])


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),  # where
        st.sampled_from(["flip", "set", "delete", "repeat", "end"]),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def edited(memory: bytes, changes: list[tuple[float, str, int]]) -> bytes:
    mutant = bytearray(memory)
    for where, kind, number in changes:
        at = int(where * len(mutant))
        if kind == "end" or not mutant:
            mutant.append(number)
        elif kind == "flip":
            mutant[at] ^= 1 << number % 8
        elif kind == "set":
            mutant[at] = number
        elif kind == "delete":
            del mutant[at : at + 1 + number % 8]
        else:
            mutant[at:at] = mutant[at : at + 1 + number % 8]
    return bytes(mutant)


@examples(200)
@given(values, edits, st.sampled_from(["same", "numpy", "torch"]))
def test_mutations_of_any_value(
    value: Any, changes: list[tuple[float, str, int]], arrays: str
) -> None:
    if arrays == "torch":
        pytest.importorskip("torch")
    body, parts = _core.encode(value)
    decode(edited(body, changes), parts, arrays=arrays)
    decode(body, [*(edited(part, changes) for part in parts[:1]), *parts[1:]], arrays=arrays)
    decode(body, parts[1:], arrays=arrays)


# A value of each converted type, and the state that ends its message: any other may be put there.
CONVERTED = [
    (collections.OrderedDict(), ()),
    (collections.deque(), ((), None)),
    (range(7), (0, 7, 1)),
    (slice(7), (None, 7, None)),
    (fractions.Fraction(1, 3), (1, 3)),
    (decimal.Decimal(7), "7"),
    (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    (datetime.date(2024, 1, 1), "2024-01-01"),
    (datetime.datetime(2024, 1, 1), (2024, 1, 1, 0, 0, 0, 0, None, 0)),
    (datetime.time(1), (1, 0, 0, 0, None, 0)),
    (datetime.timedelta(1), (1, 0, 0)),
    (datetime.UTC, (datetime.timedelta(0),)),
    (Access.READ, 1),
    (np.dtype("f4"), "<f4"),
]


def with_state(converted: tuple[Any, Any], state: Any) -> tuple[bytes, list[bytes]]:
    """The message of a value of the same type with another state."""
    value, own = converted
    body, _ = _core.encode(value)
    tail, _ = _core.encode(own)
    assert body.endswith(tail)
    other, parts = _core.encode(state)
    return body[: -len(tail)] + other, parts


@pytest.mark.parametrize("converted", CONVERTED, ids=lambda pair: type(pair[0]).__name__)
def test_the_state_of_a_type_is_put_in_its_place(converted: tuple[Any, Any]) -> None:
    assert _core.decode(*with_state(converted, converted[1])) == converted[0]


ENDLESS = range(10**18)


def repr_unless_long(value: Any) -> str | None:
    """Python writes no integers of more than some thousand digits."""
    items = value if isinstance(value, tuple) else (value,)
    is_long = any(isinstance(item, int) and item.bit_length() > 1000 for item in items)
    return None if is_long else repr(value)


@pytest.mark.parametrize(
    ("converted", "state"),
    [
        (collections.OrderedDict(), ENDLESS),
        (collections.OrderedDict(), ((1, 2), ENDLESS)),
        (collections.deque(), (ENDLESS, None)),
        (collections.deque(), ENDLESS),
        (slice(7), ENDLESS),
        (datetime.timedelta(1), ENDLESS),
        (fractions.Fraction(1, 3), ("1e999999999", 1)),
        (fractions.Fraction(1, 3), (decimal.Decimal("1e999999999"), None)),
        (decimal.Decimal(7), (0, ENDLESS, 0)),
        (fractions.Fraction(1, 3), (1 << 10**6, (1 << 10**6) - 1)),
        (range(7), (0, 1 << 10**6, (1 << 10**5) - 1)),
    ],
    ids=repr_unless_long,
)
def test_states_that_would_never_end_are_refused(converted: Any, state: Any) -> None:
    pair = next(pair for pair in CONVERTED if type(pair[0]) is type(converted))
    with pytest.raises(WireError, match="could not be built"):
        _core.decode(*with_state(pair, state))


@examples(200)
@given(
    st.sampled_from(CONVERTED),
    values | st.tuples(hashables) | st.tuples(values, values) | st.tuples(values, values, values),
)
def test_states_of_any_value(converted: tuple[Any, Any], state: Any) -> None:
    decode(*with_state(converted, state))


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_many_keys_of_one_hash_are_refused(kind: Any) -> None:
    """Each is compared with all before it: hours without anybody else, for some megabytes."""
    number = sys.hash_info.modulus
    colliding = [k * number for k in range(1, 1001)]
    assert len({hash(key) for key in colliding}) == 1
    body, parts = _core.encode(kind(colliding[:64]))
    assert decode(body, parts) == kind(colliding[:64])
    body, parts = _core.encode(kind(colliding))
    with pytest.raises(WireError, match="have one hash"):
        _core.decode(body, parts)


def test_sizes_and_modules_of_torch_are_not_taken_from_a_peer() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(WireError, match="could not be built"):
        _core.decode(*with_state((torch.Size(), ()), ENDLESS))
    with pytest.raises(WireError, match="no dtype '_inductor'"):
        _core.decode(*with_state((torch.float32, "torch.float32"), "_inductor"))
