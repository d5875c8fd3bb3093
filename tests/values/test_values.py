"""Round trips of Python's own values: what comes back is equal and of exactly the same types."""

from __future__ import annotations

import math
from typing import Any

import pytest

import moolink
from moolink import _core
from tests.values.strategies import canonical


def round_trip(value: Any, **options: Any) -> Any:
    return _core.decode(*_core.encode(value), **options)


@pytest.mark.parametrize(
    "value",
    [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, -1, 0, 255, 256, -(2**127), 2**4096],
)
def test_integers_at_the_edges(value: int) -> None:
    assert canonical(round_trip(value)) == canonical(value)


def test_special_floats_keep_their_bits() -> None:
    for value in (-0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324):
        assert canonical(round_trip(value)) == canonical(value)


def test_order_of_a_dict_is_kept() -> None:
    value = {"z": 1, "a": 2, "m": 3}
    assert list(round_trip(value)) == ["z", "a", "m"]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_up_to_the_limit() -> None:
    assert round_trip(nested(200)) == nested(200)
    body, parts = _core.encode(nested(30), max_depth=30)
    assert _core.decode(body, parts, max_depth=30) == nested(30)


def test_too_deep_raises_at_the_sender_and_names_the_depth() -> None:
    with pytest.raises(ValueError, match="deeper than 200 levels"):
        _core.encode(nested(201))
    with pytest.raises(ValueError, match="deeper than 30 levels"):
        _core.encode({"a": nested(30)}, max_depth=30)


def test_cycles_raise_at_the_sender() -> None:
    loop: list[Any] = []
    loop.append((loop, {"again": loop}))
    with pytest.raises(ValueError, match="contains itself"):
        _core.encode(loop)
    table: dict[str, Any] = {}
    table["self"] = table
    with pytest.raises(ValueError, match="contains itself"):
        _core.encode(table)


def test_a_value_can_be_sent_after_one_that_failed() -> None:
    for _ in range(300):
        with pytest.raises(ValueError, match="deeper"):
            _core.encode(nested(201))
    assert round_trip(nested(200)) == nested(200)


def test_a_list_that_changes_while_it_is_sent() -> None:
    changing: list[Any] = []

    class Grows:
        def __dlpack_device__(self) -> tuple[int, int]:
            changing.append(0)
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            import numpy as np

            return np.zeros(3).__dlpack__()

    changing.append(Grows())
    with pytest.raises(ValueError, match="changed while it was being sent"):
        _core.encode(changing)


class Unknown:
    pass


class MyInt(int):
    pass


@pytest.mark.parametrize(
    "value", [object(), Unknown(), MyInt(3), lambda: 0, Unknown, memoryview(b"")]
)
def test_other_types_are_refused_with_what_to_do(value: Any) -> None:
    with pytest.raises(TypeError, match=r"moolink\.register"):
        _core.encode([value])


def test_pickle_only_when_both_sides_allow_it() -> None:
    from moolink.errors import WireError

    value = {"key": MyInt(3)}
    body, parts = _core.encode(value, allow_pickle=True)
    again = _core.decode(body, parts, allow_pickle=True)
    assert canonical(again) == canonical(value)
    with pytest.raises(WireError, match="allow_pickle"):
        _core.decode(body, parts)


def test_an_unknown_choice_of_arrays_is_refused() -> None:
    body, parts = _core.encode(1)
    with pytest.raises(ValueError, match="tensorflow"):
        _core.decode(body, parts, arrays="tensorflow")


def test_a_set_that_changes_while_it_is_sent() -> None:
    changing: set[Any] = set()

    class Moves:
        pass

    def replace(_: Moves) -> int:
        changing.discard("old")
        changing.add("new" * len(changing))
        return 0

    moolink.register(Moves, name="tests:Moves", to_state=replace, from_state=lambda _: Moves())
    changing.update([Moves() for _ in range(20)], ["old"])
    with pytest.raises((ValueError, RuntimeError), match="changed"):
        _core.encode(changing)
