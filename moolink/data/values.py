"""Which types travel: Python's own always, others when they are registered at both peers.

Without registration a value may be made of ``None``, ``bool``, ``int``, ``float``, ``complex``,
``str``, ``bytes``, ``bytearray``, ``list``, ``tuple``, ``set``, ``frozenset``, ``dict``, numpy
scalars, and arrays of numpy, torch, JAX or anything with ``__dlpack__``; of the standard library
``OrderedDict``, ``deque``, ``range``, ``slice``, ``Fraction``, ``Decimal``, ``UUID`` and the types
of ``datetime``; of the frameworks ``torch.Size``, ``torch.dtype``, ``torch.device`` and
``numpy.dtype`` (of numbers).

Exact types come back; of numpy's several names for one element type (``longlong``) the one that
says its size. A receiver builds only the types that it has registered: it imports no module
and looks up no code because of a peer's message.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import sys
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, overload

from moolink import _core

__all__ = ["register"]

T = TypeVar("T")
Registered = TypeVar("Registered", bound=type[Any])


@overload
def register(cls: Registered, /, *, name: str | None = None) -> Registered: ...


@overload
def register(
    cls: type[T],
    /,
    *,
    name: str | None = None,
    to_state: Callable[[T], object],
    from_state: Callable[[Any], T],
) -> type[T]: ...


def register(
    cls: type[Any],
    /,
    *,
    name: str | None = None,
    to_state: Callable[[Any], object] | None = None,
    from_state: Callable[[Any], Any] | None = None,
) -> type[Any]:
    """Let values of a type travel; at both peers, under one name. Usable as a decorator.

    Dataclasses and namedtuples travel field by field, and are built without running code of theirs
    (no ``__init__``, no ``__post_init__``); enums by the name of the member, flags by their number.
    Any other type needs ``to_state``, which turns a value into one that travels already, and
    ``from_state``, which turns that back.

    Args:
        cls: the type; its subclasses are other types and registered on their own.
        name: its name at both peers; default ``module:qualified name``. Peers whose scripts define
            the type in different modules (one of them ``__main__``) must give it a name.
        to_state: for types of another kind, or to replace the default.
        from_state: the inverse of ``to_state``.

    Returns:
        The type itself.

    Raises:
        TypeError: the type is of no kind that travels and no converters were given.
    """
    if (to_state is None) != (from_state is None):
        raise TypeError("to_state and from_state go together: give both or none")
    form, fields = ("converted", []) if to_state is not None else _form_of(cls)
    full_name = name or f"{cls.__module__}:{cls.__qualname__}"
    _core.register_type(cls, full_name, form, fields, to_state, from_state)
    return cls


def _form_of(cls: type[Any]) -> tuple[str, list[str]]:
    """How a type travels by itself, and its fields."""
    if issubclass(cls, enum.Flag):
        return "flags", []
    if issubclass(cls, enum.Enum):
        return "enum", []
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return "namedtuple", list(cls._fields)
    # Another __new__ may keep data outside the fields (the items of a dict, an error's arguments).
    if dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__:
        return "dataclass", [field.name for field in dataclasses.fields(cls)]
    raise TypeError(
        f"{cls.__module__}.{cls.__qualname__} is no plain dataclass, namedtuple or enum: "
        "register it with to_state= and from_state="
    )


def _register_standard_library() -> None:
    register(
        collections.OrderedDict,
        to_state=lambda value: tuple(value.items()),
        from_state=lambda state: collections.OrderedDict(_pair(item) for item in _tuple(state)),
    )
    register(
        collections.deque,
        to_state=lambda value: (tuple(value), value.maxlen),
        from_state=_deque_from_state,
    )
    register(
        range,
        to_state=lambda value: (value.start, value.stop, value.step),
        from_state=lambda state: range(*_require_short(*_tuple(state, 3))),
    )
    register(
        slice,
        to_state=lambda value: (value.start, value.stop, value.step),
        from_state=lambda state: slice(*_tuple(state, 3)),
    )
    register(
        fractions.Fraction,
        to_state=lambda value: (value.numerator, value.denominator),
        from_state=_fraction_from_state,
    )
    for cls, from_text in (
        (decimal.Decimal, decimal.Decimal),
        (uuid.UUID, uuid.UUID),
        (datetime.date, datetime.date.fromisoformat),
    ):
        register(cls, to_state=str, from_state=_from_text(from_text))
    register(
        datetime.timedelta,
        to_state=lambda value: (value.days, value.seconds, value.microseconds),
        from_state=lambda state: datetime.timedelta(*_tuple(state, 3)),
    )
    register(
        datetime.timezone,
        to_state=_timezone_state,
        from_state=lambda state: datetime.timezone(*_tuple(state)),
    )
    register(datetime.datetime, to_state=_datetime_state, from_state=_datetime_from_state)
    register(datetime.time, to_state=_time_state, from_state=_time_from_state)


# A peer may send any value as a state. Unpacking a `range(10**18)` or reading "1e999999999" as a
# fraction would keep this process busy for hours: a state that to_state would not write is refused.


def _tuple(state: object, size: int | None = None) -> tuple[Any, ...]:
    if type(state) is not tuple or (size is not None and len(state) != size):
        raise ValueError("the state is of another form than this type's")
    return state


# Dividing takes the square of their length; 10 MB would keep the interpreter for hours.
_LONGEST_INTEGER = 1 << 16  # bits


def _require_short(*numbers: Any) -> tuple[Any, ...]:
    if any(type(n) is int and n.bit_length() > _LONGEST_INTEGER for n in numbers):
        raise ValueError("the integers are too long to be divided")
    return numbers


def _pair(item: object) -> tuple[Any, Any]:
    key, value = _tuple(item, 2)
    return key, value


def _from_text(make: Callable[[str], T]) -> Callable[[Any], T]:
    def from_state(state: object) -> T:
        if type(state) is not str:
            raise ValueError("the state is of another form than this type's")
        return make(state)

    return from_state


def _deque_from_state(state: object) -> collections.deque[Any]:
    items, maxlen = _tuple(state, 2)
    return collections.deque(_tuple(items), maxlen)


def _fraction_from_state(state: object) -> fractions.Fraction:
    numerator, denominator = _tuple(state, 2)
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError("the terms of a fraction are integers")
    _require_short(numerator, denominator)
    return fractions.Fraction(numerator, denominator)


def _timezone_state(value: datetime.timezone) -> object:
    offset, name = value.utcoffset(None), value.tzname(None)
    return (offset,) if name == datetime.timezone(offset).tzname(None) else (offset, name)


def _datetime_state(value: datetime.datetime) -> object:
    return (
        *(value.year, value.month, value.day, value.hour, value.minute, value.second),
        *(value.microsecond, value.tzinfo, value.fold),
    )


def _datetime_from_state(state: object) -> datetime.datetime:
    *fields, fold = _tuple(state, 9)
    return datetime.datetime(*fields, fold=fold)


def _time_state(value: datetime.time) -> object:
    return (value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold)


def _time_from_state(state: object) -> datetime.time:
    *fields, fold = _tuple(state, 6)
    return datetime.time(*fields, fold=fold)


def _register_torch(torch: Any) -> None:
    register(
        torch.Size,
        name="torch:Size",
        to_state=tuple,
        from_state=lambda state: torch.Size(_tuple(state)),
    )
    register(torch.device, name="torch:device", to_state=str, from_state=_from_text(torch.device))
    # Looked up here and not in torch, which imports a module when it is asked for its name.
    dtypes = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

    def dtype_from_text(name: str) -> object:
        if name not in dtypes:
            raise ValueError(f"torch has no dtype {name!r} here")
        return dtypes[name]

    register(torch.dtype, name="torch:dtype", to_state=str, from_state=_from_text(dtype_from_text))


def _register_numpy_dtypes(numpy: Any) -> None:
    def dtype_from_state(text: str) -> object:
        dtype = numpy.dtype(text)
        if dtype.kind not in "biufcMmSU":
            raise ValueError(f"{text!r} is no dtype of numbers, dates or strings")
        return dtype

    def dtype_state(dtype: Any) -> str:
        if dtype.kind not in "biufcMmSU":
            raise TypeError(f"the numpy dtype {dtype} cannot be sent: only dtypes of numbers can")
        return str(dtype.str)

    # Each kind of dtype is a class of its own: numpy.dtypes.Float32DType and so on.
    for name in numpy.dtypes.__all__:
        register(
            getattr(numpy.dtypes, name),
            name=f"numpy:{name}",
            to_state=dtype_state,
            from_state=_from_text(dtype_from_state),
        )


# Functions that register a module's types, once it is imported and one of its types is met.
_FRAMEWORKS: dict[str, Callable[[Any], None]] = {
    "torch": _register_torch,
    "numpy": _register_numpy_dtypes,
}


def _register_late(what: type[Any] | str) -> bool:
    """Register a framework's types when one is met for the first time; whether it did."""
    module = what.partition(":")[0] if isinstance(what, str) else what.__module__
    framework = module.partition(".")[0]
    if framework not in _FRAMEWORKS or framework not in sys.modules:
        return False
    _FRAMEWORKS.pop(framework)(sys.modules[framework])
    return True


_register_standard_library()
_core.set_late_registration(_register_late)
