"""Calls of an inference server with arguments that no client sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moolink
from moolink.inference import names
from tests.hostile import HUGE, refused, values
from tests.property import examples

LONG = 20.0
X = np.ones((2, 3), np.float32)
ROW = np.arange(2)
NOT_FIRST = np.zeros(2, bool)


def model(batch: moolink.inference.InferenceBatch) -> tuple[Any, Any]:
    steps = batch.state + 1
    return batch.inputs.sum(1) * 0 + steps, steps


class Served:
    """A server whose model counts steps, a client, and a peer that makes wrong calls."""

    def __init__(self) -> None:
        self.server_rpc, self.rpc = moolink.Rpc("server"), moolink.Rpc("caller")
        self.rpc.connect(self.server_rpc.listen("127.0.0.1:0")[0])
        self.server = moolink.InferenceServer(
            self.server_rpc,
            "policy",
            model,
            buckets=(1, 2, 4),
            state=np.zeros((), np.float32),
            max_actors=16,
        )
        self.client = moolink.InferenceClient(self.rpc, "policy", "server")
        self.steps = 0
        self.works()

    def works(self) -> None:
        self.steps += 1
        assert self.client.infer(X, timeout=LONG).tolist() == [self.steps] * 2

    def state(self) -> Any:
        stats = self.server.stats()
        return stats["clients"], stats["states"], self.rpc.sync("server", LOAD)

    def close(self) -> None:
        for thing in (self.client, self.server, self.rpc, self.server_rpc):
            thing.close()


LOAD = names.LOAD.format("policy")
INFER = names.INFER.format("policy")
END = names.END.format("policy")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("client must be a str, got 7", (X, 7, ROW, NOT_FIRST)),
    ("client must be a str, got None", (X, None, ROW, NOT_FIRST)),
    ("client must be a str", (X, ["caller/1"], ROW, NOT_FIRST)),
    ("client must be a str", (X, ROW, ROW, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", ROW - 1, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", ROW + 3, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", ROW + HUGE, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", ROW * 1.0, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", ROW[:, None], NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", 0, NOT_FIRST)),
    ("row must be integers from 0 to 3", (X, "caller/1", None, NOT_FIRST)),
    ("first must be bool", (X, "caller/1", ROW, ROW)),
    ("first must be bool", (X, "caller/1", ROW, False)),
    ("expected 2 rows as in", (X, "caller/1", ROW, NOT_FIRST[:1])),
    ("expected 2 rows as in", (X, "caller/1", ROW[:1], NOT_FIRST)),
    (
        "it brings 5 rows",
        (np.ones((5, 3), np.float32), "caller/1", np.arange(5), np.zeros(5, bool)),
    ),
    ("rows without elements", (np.zeros((HUGE, 0), np.float32), "caller/1", ROW, NOT_FIRST)),
    ("missing", (X, "caller/1", ROW)),
    ("", ()),
]


@pytest.mark.parametrize(("says", "arguments"), WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(
    served: Served, says: str, arguments: tuple[Any, ...]
) -> None:
    before = served.state()
    refused(served.rpc, "server", INFER, says, *arguments)
    assert served.state() == before
    served.works()


@pytest.mark.parametrize(
    ("function", "says", "arguments"),
    [
        (END, "client must be a str", (["caller/1"],)),
        (END, "client must be a str", (7,)),
        (END, "missing 1 required positional argument", ()),
        (LOAD, "positional argument", ("caller",)),
    ],
)
def test_a_wrong_argument_of_end_and_load_is_named(
    served: Served, function: str, says: str, arguments: tuple[Any, ...]
) -> None:
    refused(served.rpc, "server", function, says, *arguments)
    served.works()


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        ("client must be a str", (X, 7, ROW, NOT_FIRST)),
        ("row must be integers", (X, "caller/1", ROW * 1.0, NOT_FIRST)),
        ("row must be integers", (X, "caller/1", ROW[:, None], NOT_FIRST)),
        ("row must be integers", (X, "caller/1", 0, NOT_FIRST)),
        ("first must be bool", (X, "caller/1", ROW, ROW)),
        ("first must be bool", (X, "caller/1", ROW, NOT_FIRST[:, None])),
        ("first must be bool", (X, "caller/1", ROW, None)),
    ],
)
def test_a_wrong_first_request_spoils_no_later_one(
    served: Served, says: str, arguments: tuple[Any, ...]
) -> None:
    state = np.zeros((), np.float32)
    with (
        moolink.InferenceServer(served.server_rpc, "new", model, state=state) as server,
        moolink.InferenceClient(served.rpc, "new", "server") as client,
    ):
        refused(served.rpc, "server", names.INFER.format("new"), says, *arguments)
        assert server.stats()["clients"] == 0
        assert client.infer(X, timeout=LONG).tolist() == [1, 1]


def test_nothing_of_a_closed_server_can_be_called(served: Served) -> None:
    moolink.InferenceServer(served.server_rpc, "closed", model).close()
    for function in (names.INFER, names.LOAD, names.END):
        with pytest.raises(moolink.NoSuchFunction):
            served.rpc.async_("server", function.format("closed")).result(LONG)


VALUES = values([X, ROW, NOT_FIRST, "caller/1", np.zeros((0, 2))])


@examples(100)
@given(st.lists(VALUES, max_size=5))
def test_whatever_is_called_the_server_serves_on(served: Served, arguments: list[Any]) -> None:
    call = served.rpc.async_("server", INFER, *arguments)
    with contextlib.suppress(moolink.RemoteError, OverflowError):
        call.result(LONG)
    served.server.stats()
    served.works()
