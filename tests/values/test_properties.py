"""Whatever travels comes back exact, through the codec and between peers over every path."""

from __future__ import annotations

import re
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moolink
from moolink import _core
from tests.property import examples
from tests.values.conftest import Echo, through_codec
from tests.values.strategies import (
    DTYPES,
    EXTENSIONS,
    arrays,
    canonical,
    random_array,
    values,
)


@examples(120)
@given(value=values)
def test_trees(echo: Echo, value: Any) -> None:
    before = canonical(value)
    assert canonical(echo(value)) == before
    assert canonical(value) == before


@examples(150)
@given(array=arrays())
def test_arrays(echo: Echo, array: np.ndarray[Any, Any]) -> None:
    before = canonical(array)
    first, second = echo(array), echo(array)
    for received in (first, second):
        assert canonical(received) == before
        assert received.dtype.isnative
        assert received.flags.writeable
        assert received.flags.c_contiguous
        assert received.ctypes.data % 64 == 0
    # Each is its receiver's own: writing one changes neither the other nor the sender's.
    first.reshape(-1).view(np.uint8)[...] = 0
    assert canonical(second) == before
    assert canonical(array) == before


@examples(40)
@given(st.lists(arrays(), min_size=2, max_size=5))
def test_arrays_of_one_message_do_not_share_memory(
    echo: Echo, several: list[np.ndarray[Any, Any]]
) -> None:
    received = echo([*several, *several])
    for i, array in enumerate(received):
        for other in received[:i]:
            assert not np.shares_memory(array, other)


# --- every dtype there is


def refusal_names(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(name)):
        _core.encode(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_as_array_and_as_scalar(echo: Echo, dtype: np.dtype[Any]) -> None:
    for shape in [(), (1,), (17,), (0,), (3, 0), (300,)]:
        array = random_array(dtype, shape, 1)
        assert canonical(echo(array)) == canonical(array)
    scalar = random_array(dtype, (1,), 2)[0]
    assert canonical(echo(scalar)) == canonical(scalar)


@pytest.mark.parametrize("code", np.typecodes["All"])
def test_every_type_code_of_numpy(code: str) -> None:
    array = np.zeros(3, code)
    # Both names of an 8-byte integer arrive as the same dtype; extended precision is no type of
    # its own on all machines.
    if code in "gGOV":
        return refusal_names(array, str(array.dtype))
    again = through_codec(array)
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()
    assert through_codec(array[0]) == array[0]
    return None


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ml_dtypes.__all__
        if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
    ],
)
def test_every_dtype_of_ml_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    array = np.zeros(5, dtype)
    if name in EXTENSIONS:
        assert canonical(through_codec(array)) == canonical(array)
    else:
        refusal_names(array, name)
        refusal_names(array[0], name)


@pytest.mark.parametrize(
    "dtype",
    ["i4,f8", [("a", "U3"), ("b", "f4", (2,))], "V8", "V0", "U0", "S0", [], "O", "T"],
    ids=str,
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_elements_that_do_not_travel_are_named(dtype: Any, count: int) -> None:
    array = np.ndarray((count,), np.dtype(dtype))
    refusal_names(array, str(array.dtype))


# --- pickle: only when both sides allow it


class Unregistered:
    built: list[int] = []

    def __init__(self, x: int) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return build, (self.x,)


def build(x: int) -> Unregistered:
    Unregistered.built.append(x)
    return Unregistered(x)


@pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"]], ids=["tcp", "shm"])
@pytest.mark.parametrize("client_allows", [False, True])
@pytest.mark.parametrize("server_allows", [False, True])
def test_pickle_in_all_combinations(
    transports: list[str], client_allows: bool, server_allows: bool
) -> None:
    Unregistered.built.clear()
    ran = threading.Event()

    def take(value: Any) -> int:
        ran.set()
        return int(value.x)

    with (
        moolink.Rpc("s", transports=transports, timeout=20, allow_pickle=server_allows) as server,
        moolink.Rpc("c", transports=transports, timeout=20, allow_pickle=client_allows) as client,
    ):
        client.connect(server.listen("127.0.0.1:0")[0])
        server.define("take", take)
        server.define("give", lambda: Unregistered(5))
        if client_allows and server_allows:
            assert client.sync("s", "take", Unregistered(4)) == 4
            assert client.sync("s", "give").x == 5
            assert Unregistered.built == [4, 5]
            return
        expected = moolink.WireError if client_allows else TypeError
        with pytest.raises(expected, match="allow_pickle"):
            client.sync("s", "take", Unregistered(4))
        wrong = moolink.WireError if server_allows else moolink.RemoteError
        with pytest.raises(wrong, match="allow_pickle"):
            client.sync("s", "give")
        assert not ran.is_set()
        assert Unregistered.built == []
        # Neither end is worse for it.
        server.define("add", lambda a, b: a + b)
        assert client.sync("s", "add", 1, 2) == 3


def test_a_peer_that_calls_itself_agrees_with_itself() -> None:
    Unregistered.built.clear()
    for allowed in (False, True):
        with moolink.Rpc("alone", timeout=20, allow_pickle=allowed) as rpc:
            rpc.define("take", lambda value: value.x)
            if allowed:
                assert rpc.sync("alone", "take", Unregistered(1)) == 1
            else:
                with pytest.raises(TypeError, match="allow_pickle"):
                    rpc.sync("alone", "take", Unregistered(1))
    assert Unregistered.built == [1]
