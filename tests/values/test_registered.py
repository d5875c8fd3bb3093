"""Registered types: dataclasses, namedtuples, enums, converters, and the standard library's."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import subprocess
import sys
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest

from moolink import _core
from moolink.data.values import register
from moolink.errors import WireError
from tests.waiting import PROCESS_LIMIT


def round_trip(value: Any) -> Any:
    return _core.decode(*_core.encode(value))


@register
@dataclasses.dataclass
class Config:
    name: str
    rate: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=list)


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: Any = None


@register
@dataclasses.dataclass
class Validated:
    value: int
    ran: list[str] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.ran.append("post_init")


@register
class Point(NamedTuple):
    x: int
    y: Any


@register
class Colour(enum.Enum):
    RED = 1
    GREEN = "g"
    CRIMSON = 1  # noqa: PIE796 - an alias on purpose


@register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register
class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@pytest.mark.parametrize(
    "value",
    [
        Config("a", 0.5, [1, 2]),
        Frozen(1, (2, None)),
        Frozen(Frozen(1, 2), [Frozen(3)]),
        Point(1, [2]),
        Level.HIGH,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        {Colour.RED: [Colour.GREEN, Colour.RED]},
        [Config("a"), Config("b"), Point(1, 2), Point(3, 4)],
    ],
)
def test_round_trip(value: Any) -> None:
    again = round_trip(value)
    assert type(again) is type(value)
    assert again == value


def test_members_are_the_very_objects() -> None:
    assert round_trip(Colour.CRIMSON) is Colour.RED
    assert round_trip(Level.LOW) is Level.LOW


def test_no_code_of_the_type_runs_on_receipt() -> None:
    assert round_trip(Validated(1)).ran == ["post_init"]  # the sender's, not one more


def test_converters() -> None:
    class Celsius:
        def __init__(self, degrees: float) -> None:
            self.degrees = degrees

    register(
        Celsius,
        name="tests:Celsius",
        to_state=lambda value: {"degrees": value.degrees},
        from_state=lambda state: Celsius(**state),
    )
    again = round_trip([Celsius(21.5)])[0]
    assert type(again) is Celsius
    assert again.degrees == 21.5


def test_a_converter_that_raises_at_the_receiver_is_a_wire_error() -> None:
    class Moody:
        pass

    def refuse(_: object) -> Moody:
        raise KeyError("not today")

    register(Moody, name="tests:Moody", to_state=lambda _: None, from_state=refuse)
    with pytest.raises(WireError, match="not today"):
        round_trip(Moody())


STANDARD_LIBRARY = [
    collections.OrderedDict([("z", 1), ("a", [2])]),
    collections.deque([1, 2, 3], maxlen=3),
    collections.deque(),
    range(3, 30, 4),
    slice(None, 5, -1),
    fractions.Fraction(1, 3),
    decimal.Decimal("0.10"),
    uuid.UUID(int=5),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=datetime.UTC, fold=1),
    datetime.datetime(2024, 2, 29),
    datetime.time(1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    datetime.timedelta(days=-1, microseconds=3),
    datetime.timezone(datetime.timedelta(hours=-5), "EST"),
    np.dtype(np.float32),
    np.dtype(">i8"),
    np.dtype("M8[ns]"),
]


@pytest.mark.parametrize("value", STANDARD_LIBRARY, ids=lambda value: repr(value)[:40])
def test_standard_library(value: Any) -> None:
    again = round_trip(value)
    assert type(again) is type(value)
    assert again == value
    if isinstance(value, collections.deque):
        assert again.maxlen == value.maxlen
    if isinstance(value, datetime.timezone):
        assert again.tzname(None) == value.tzname(None)
    if isinstance(value, datetime.datetime):
        assert (again.fold, again.tzinfo) == (value.fold, value.tzinfo)


def test_frameworks_descriptions() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")):
        again = round_trip(value)
        assert type(again) is type(value)
        assert again == value


def test_unregistered_types_are_refused_at_the_sender() -> None:
    @dataclasses.dataclass
    class Local:
        x: int = 0

    with pytest.raises(TypeError, match=r"Local cannot be sent: call moolink\.register"):
        _core.encode(Local())


def test_a_subclass_of_a_registered_type_is_another_type() -> None:
    @dataclasses.dataclass
    class More(Config):
        extra: int = 0

    with pytest.raises(TypeError, match="More"):
        _core.encode(More("a"))


def test_a_type_that_only_the_sender_registered() -> None:
    """Encoded by another process, which knows a type that this one does not."""
    script = (
        "import dataclasses, sys\n"
        "from moolink import _core\n"
        "from moolink.data.values import register\n"
        "@register\n"
        "@dataclasses.dataclass\n"
        "class OnlyThere:\n"
        "    x: int = 0\n"
        "sys.stdout.buffer.write(_core.encode(OnlyThere())[0])\n"
    )
    body = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=PROCESS_LIMIT
    )
    with pytest.raises(WireError, match=r"__main__:OnlyThere, which is not registered here"):
        _core.decode(body.stdout, [])


def test_versions_of_a_type_do_not_mix() -> None:
    @dataclasses.dataclass
    class Old:
        x: int = 0

    @dataclasses.dataclass
    class New:
        x: int = 0
        y: int = 0

    register(Old, name="tests:Versioned")
    body, parts = _core.encode(Old())
    register(New, name="tests:Versioned")
    with pytest.raises(WireError, match="differs between the peers"):
        _core.decode(body, parts)


@pytest.mark.parametrize("bits", [1, 17])
def test_flags_of_ever_new_values_are_refused(bits: int) -> None:
    """Every Python keeps each value of known bits, and some keep those of other bits too."""

    def define() -> type[enum.IntFlag]:
        return enum.IntFlag("Flags", {f"B{i}": 1 << i for i in range(bits)})

    sent, received = define(), define()
    register(sent, name="tests:Flags")
    known, parts = _core.encode(sent(5))
    values = [sent(value) for value in range(70_000)]
    many = _core.encode(values)
    register(received, name="tests:Flags")
    assert _core.decode(known, parts) == received(5)
    if len(sent._value2member_map_) < len(values):
        assert bits == 1
        assert _core.decode(*many) == values
        assert len(received._value2member_map_) == 2, "only the known ones: nothing to bound"
        return
    with pytest.raises(WireError, match="65536 different values of the flags tests:Flags"):
        _core.decode(*many)
    assert len(received._value2member_map_) <= 65536
    assert _core.decode(known, parts) == received(5)


def test_a_class_defined_again_replaces_the_older_one() -> None:
    def define() -> type[Any]:
        @register
        @dataclasses.dataclass
        class Cell:
            x: int = 0

        return Cell

    first, second = define(), define()
    assert type(round_trip(second())) is second
    assert type(round_trip(first())) is second


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="to_state= and from_state="):
        register(object)

    @dataclasses.dataclass
    class Keeps(dict):  # type: ignore[type-arg]
        x: int = 0

    with pytest.raises(TypeError, match="no plain dataclass"):
        register(Keeps)
    with pytest.raises(TypeError, match="go together"):
        register(Config, to_state=str)  # type: ignore[call-overload]


def test_structured_numpy_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        _core.encode(np.dtype([("a", "i4")]))


def test_a_subclass_of_an_array_can_be_registered() -> None:
    class Labelled(np.ndarray[Any, Any]):
        label = ""

    def from_state(state: tuple[str, np.ndarray[Any, Any]]) -> Labelled:
        array = state[1].view(Labelled)
        array.label = state[0]
        return array

    register(
        Labelled,
        name="tests:Labelled",
        to_state=lambda value: (value.label, value.view(np.ndarray)),
        from_state=from_state,
    )
    array = np.arange(100).view(Labelled)
    array.label = "rewards"
    again = round_trip(array)
    assert type(again) is Labelled
    assert again.label == "rewards"
    assert again.tolist() == array.tolist()
