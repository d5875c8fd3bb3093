"""Hostile messages: a WireError or a value, nothing else, whatever the bytes."""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moolink import _core
from moolink.errors import WireError
from moolink.values import register


@register
@dataclasses.dataclass
class Settings:
    name: str
    layers: list[int]


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int


@register
class Pair(NamedTuple):
    x: int
    y: int


@register
class Fruit(enum.Enum):
    RED = 1


@register
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


def decode(body: bytes, parts: list[bytes]) -> Any:
    try:
        return _core.decode(body, parts)
    except WireError as e:
        return e


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=100), max_size=2))
def test_random_bodies(body: bytes, parts: list[bytes]) -> None:
    decode(body, parts)


# A value with a little of everything that the decoder can build.
EVERYTHING = [
    *(None, True, 2**200, -5, 1.5, 2j, "text", b"bytes", bytearray(b"array")),
    *((1, 2), {3}, frozenset([4]), {"key": [5], 6: ()}, range(3)),
    *(Settings("name", layers=[1]), Frozen(1), Pair(2, 3), Fruit.RED, Access.READ | Access.WRITE),
    *(np.float32(1), np.datetime64("2024-01-01", "ns"), np.zeros(3), np.zeros((5, 40))),
    *(np.zeros(3, "M8[s]"), np.zeros(40, "U3")),
]


def test_mutated_bodies() -> None:
    body, parts = _core.encode(EVERYTHING)
    generator = random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(20_000):
        mutant = bytearray(body)
        for _ in range(generator.randint(1, 3)):
            at = generator.randrange(len(mutant))
            kind = generator.randrange(4)
            if kind == 0:
                mutant[at] ^= 1 << generator.randrange(8)
            elif kind == 1:
                mutant[at] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.randrange(256)])
            elif kind == 2 and len(mutant) > 1:
                del mutant[at : at + generator.randint(1, 8)]
            else:
                mutant[at:at] = mutant[at : at + generator.randint(1, 8)]
        outcomes[isinstance(decode(bytes(mutant), parts), WireError)] += 1
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
    body, _ = _core.encode(Fruit.RED)
    with pytest.raises(WireError, match="could not be built"):
        _core.decode(body.replace(b"RED", b"BAD"), [])
