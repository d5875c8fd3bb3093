"""Calls of a replay's server with arguments that no client sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moolink
from moolink.replay import MinSize, Table, names
from tests.hostile import HUGE, refused, values
from tests.property import examples
from tests.waiting import until

LONG = 20.0
STEP = {"x": np.zeros((1, 3), np.float32)}
ITEM = ({"x": 0}, 1, [(0, 0, 0)], None, [0], np.ones(1))
NAN, INFINITE = float("nan"), float("inf")


class Served:
    """A replay with some items, its server, a client, and a peer that makes wrong calls."""

    def __init__(self) -> None:
        self.server_rpc, self.rpc = moolink.Rpc("server"), moolink.Rpc("caller")
        self.rpc.connect(self.server_rpc.listen("127.0.0.1:0")[0])
        self.replay = moolink.Replay(Table("items", 100, limiter=MinSize(1)), seed=0)
        self.server = moolink.ReplayServer(self.server_rpc, self.replay)
        self.client = moolink.ReplayClient(self.rpc, server="server")
        self.keys = self.client.extend({"x": np.zeros((5, 3), np.float32)}, timeout=LONG)
        self.calls = 0

    def refuses(self, function: str, says: str, *arguments: Any) -> None:
        tables = self.server.stats()["tables"]
        refused(self.rpc, "server", function.format("replay"), says, *arguments)
        assert self.server.stats()["tables"] == tables
        batch = self.client.sample(4, timeout=LONG)
        assert batch.priorities.tolist() == [1.0] * 4
        assert not batch.data["x"].any()

    def writes(self) -> str:
        self.calls += 1
        return f"caller/{self.calls}"

    def close(self) -> None:
        for thing in (self.server, self.replay, self.rpc, self.server_rpc):
            thing.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.fixture(scope="module")
def prodded() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


KEYS = np.arange(2)
WRONG: list[tuple[str, str, tuple[Any, ...]]] = [
    (names.SAMPLE, "there is no table 'unknown'", ("unknown", 1, 1.0, False)),
    (names.SAMPLE, "there is no table ['items']", (["items"], 1, 1.0, False)),
    (names.SAMPLE, "there is no table 7", (7, 1, 1.0, False)),
    (names.SAMPLE, "batch_size must be at least 1, got 0", (None, 0, 1.0, False)),
    (names.SAMPLE, "batch_size must be at least 1, got -1", (None, -1, 1.0, False)),
    (names.SAMPLE, "batch_size must be at most", (None, HUGE, 1.0, False)),
    (names.SAMPLE, "batch_size must be at most", (None, 1 << 62, 0.0, True)),
    (names.SAMPLE, "batch_size must be at most", (None, 1 << 63, 0.0, True)),
    (names.SAMPLE, "batch_size must be an integer, got 1.5", (None, 1.5, 1.0, False)),
    (names.SAMPLE, "batch_size must be an integer, got 'x'", (None, "x", 1.0, False)),
    (names.SAMPLE, "batch_size must be an integer, got None", (None, None, 1.0, False)),
    (names.SAMPLE, "a time limit must be a number of seconds", (None, 1, -1.0, False)),
    (names.SAMPLE, "a time limit must be a number of seconds", (None, 1, NAN, False)),
    (names.SAMPLE, "a time limit must be a number of seconds", (None, 1, "x", False)),
    (names.SAMPLE, "lend must be True or False", (None, 1, 1.0, "yes")),
    (names.SAMPLE, "missing 1 required positional argument: 'lend'", (None, 1, 1.0)),
    (names.EXTEND, "there is no table 'unknown'", ("unknown", STEP, 1.0, 1.0)),
    (names.EXTEND, "a step differs from the first one", (None, {"y": STEP["x"]}, 1.0, 1.0)),
    (names.EXTEND, "a step differs from the first one", (None, None, 1.0, 1.0)),
    (names.EXTEND, "x: expected float32 (1, 3)", (None, {"x": np.zeros((1, 2))}, 1.0, 1.0)),
    (names.EXTEND, "x: expected float32 (1, 3)", (None, {"x": np.zeros((1, 3))}, 1.0, 1.0)),
    (names.EXTEND, "items as their first dimension", (None, {"x": np.float32(1)}, 1.0, 1.0)),
    (names.EXTEND, "only arrays, tensors and numbers are stored", (None, {"x": "text"}, 1.0, 1.0)),
    (names.EXTEND, "a priority must be finite", (None, STEP, NAN, 1.0)),
    (names.EXTEND, "a priority must be finite", (None, STEP, INFINITE, 1.0)),
    (names.EXTEND, "a priority must be finite", (None, STEP, -1.0, 1.0)),
    (names.EXTEND, "expected one priority, or 1", (None, STEP, np.ones(2), 1.0)),
    (names.EXTEND, "priorities must be numbers", (None, STEP, "high", 1.0)),
    (names.EXTEND, "priorities must be numbers", (None, STEP, {"x": 1}, 1.0)),
    (names.EXTEND, "a time limit must be a number of seconds", (None, STEP, 1.0, "soon")),
    (names.EXTEND, "a time limit must be a number of seconds", (None, STEP, 1.0, -1)),
    (names.UPDATE, "there is no table 'unknown'", ("unknown", KEYS, np.ones(2))),
    (names.UPDATE, "as many priorities as keys", (None, KEYS, np.ones(3))),
    (names.UPDATE, "a priority must be finite", (None, KEYS, np.array([1, NAN]))),
    (names.UPDATE, "a priority must be finite", (None, KEYS, np.array([1, -1]))),
    (names.UPDATE, "a priority must be finite", (None, KEYS, np.array([1, INFINITE]))),
    (names.UPDATE, "priorities must have one dimension", (None, KEYS, np.ones((2, 1)))),
    (names.UPDATE, "priorities must be numbers", (None, KEYS, ["a", "b"])),
    (names.UPDATE, "keys must be integers", (None, ["a", "b"], np.ones(2))),
    (names.UPDATE, "keys must be integers", (None, np.array([0.5, 1]), np.ones(2))),
    (names.UPDATE, "keys must be integers", (None, None, np.ones(2))),
    (names.UPDATE, "keys must have one dimension", (None, KEYS[None], np.ones(2))),
    (names.REMOVE, "keys must be integers", (None, "all")),
    (names.REMOVE, "keys must be integers", (None, np.array([NAN]))),
    (names.REMOVE, "keys must have one dimension", (None, 0)),
    (names.REMOVE, "there is no table {}", ({}, KEYS)),
    (names.RESET, "there is no table 'unknown'", ("unknown",)),
    (names.RESET, "missing 1 required positional argument", ()),
    (names.END, "writer must be a str", (["caller/1"],)),
    (names.END, "writer must be a str", (7,)),
    (names.WRITE, "writer must be a str", (7, 0, 0, [(1, STEP)], [ITEM])),
    (names.WRITE, "writer must be a str", (["caller/1"], 0, 0, [(1, STEP)], [ITEM])),
    (names.WRITE, "missing 1 required positional argument: 'items'", ("caller/0", 0, 0, [])),
]


@pytest.mark.parametrize(("function", "says", "arguments"), WRONG)
def test_a_wrong_argument_is_named_and_changes_nothing(
    served: Served, function: str, says: str, arguments: tuple[Any, ...]
) -> None:
    served.refuses(function, says, *arguments)


WRONG_WRITES: list[tuple[str, tuple[Any, ...]]] = [
    ("turn must be an integer, got 'first'", ("first", 0, [(1, STEP)], [ITEM])),
    ("turn must be at least 0", (-1, 0, [(1, STEP)], [ITEM])),
    ("turn must be at most", (1 << 63, 0, [(1, STEP)], [ITEM])),
    ("forgotten must be an integer, got None", (0, None, [(1, STEP)], [ITEM])),
    ("forgotten must be at least 0", (0, -1, [(1, STEP)], [])),
    ("steps 5 to 5 are not among the writer's steps 0 to 1", (0, 5, [(1, STEP)], [])),
    ("steps must be pairs", (0, 0, 7, [ITEM])),
    ("steps must be pairs", (0, 0, [7], [ITEM])),
    ("steps must be pairs", (0, 0, [(1, STEP, 3)], [ITEM])),
    ("a number of steps must be an integer", (0, 0, [("x", STEP)], [ITEM])),
    ("a number of steps must be at least 1", (0, 0, [(-1, STEP)], [ITEM])),
    ("x: expected float32", (0, 0, [(HUGE, STEP)], [ITEM])),
    ("x: expected float32", (0, 0, [(1, STEP), (1, {"x": np.zeros((1, 3))})], [ITEM])),
    ("a step differs from the first one", (0, 0, [(1, STEP), (1, {})], [ITEM])),
    ("items must be groups of six", (0, 0, [(1, STEP)], 7)),
    ("items must be groups of six", (0, 0, [(1, STEP)], [7])),
    ("items must be groups of six", (0, 0, [(1, STEP)], [ITEM[:5]])),
    ("the writer has sent no steps", (0, 0, [], [ITEM])),
]
WRONG_ITEMS: list[tuple[str, dict[int, Any]]] = [
    ("an array for each leaf", {0: {"x": 7}}),
    ("an array for each leaf", {0: {"x": "text"}}),
    ("another tree", {0: {"x": 0, "y": 1}}),
    ("width must be an integer", {1: "wide"}),
    ("width must be at least 1", {1: 0}),
    ("steps 0 to 4294967295 are not among", {1: (1 << 32) - 1, 2: [(0, 0, (1 << 32) - 1)]}),
    ("width must be at most", {1: 1 << 32}),
    ("pieces must be triples", {2: 7}),
    ("pieces must be triples", {2: [(0, 0)]}),
    ("a column must be at least 0", {2: [(-1, 0, 0)]}),
    ("a column must be at most 0", {2: [(9, 0, 0)]}),
    ("a piece's first step must be", {2: [(0, -1, 0)]}),
    ("a piece's first step must be", {2: [(0, 1 << 40, 0)]}),
    ("a piece's steps must be", {2: [(0, 0, -1)]}),
    ("a piece's steps must be", {2: [(0, 0, 2)]}),
    ("there is no table 'unknown'", {3: "unknown"}),
    ("first steps must be a list", {4: 0}),
    ("an item's first step must be an integer", {4: ["x"]}),
    ("steps -1 to 0 are not among", {4: [-1]}),
    ("steps 1 to 2 are not among", {4: [1]}),
    ("expected one priority for each item", {5: np.ones(2)}),
    ("expected one priority for each item", {5: 1.0}),
    ("priorities must be numbers", {5: ["x"]}),
    ("a priority must be finite", {5: np.array([NAN])}),
    ("a priority must be finite", {5: np.array([-1.0])}),
]


@pytest.mark.parametrize(("says", "arguments"), WRONG_WRITES)
def test_a_wrong_turn_of_a_writer_is_named(
    served: Served, says: str, arguments: tuple[Any, ...]
) -> None:
    served.refuses(names.WRITE, says, served.writes(), *arguments)


@pytest.mark.parametrize(("says", "changed"), WRONG_ITEMS)
def test_a_wrong_item_of_a_writer_is_named(
    served: Served, says: str, changed: dict[int, Any]
) -> None:
    item = tuple(changed.get(i, part) for i, part in enumerate(ITEM))
    served.refuses(names.WRITE, says, served.writes(), 0, 0, [(1, STEP)], [item])


LONG_TEXT = "x" * (4 << 20)
LARGE = [LONG_TEXT, [LONG_TEXT] * 2, {"x": LONG_TEXT}, LONG_TEXT.encode(), np.array([LONG_TEXT])]


@pytest.mark.parametrize("large", LARGE, ids=["str", "list", "dict", "bytes", "array"])
def test_a_message_does_not_repeat_what_a_peer_has_sent(served: Served, large: Any) -> None:
    step = [(1, STEP)]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (names.EXTEND, (None, STEP, large, 1.0)),
        (names.EXTEND, ([large], STEP, 1.0, 1.0)),
        (names.EXTEND, (None, STEP, 1.0, large)),
        (names.EXTEND, (None, {LONG_TEXT: STEP["x"]}, 1.0, 1.0)),
        (names.REMOVE, (None, large)),
        (names.SAMPLE, (None, large, 1.0, False)),
        (names.SAMPLE, (None, 1, 1.0, large)),
        (names.END, ([large],)),
        (names.WRITE, (served.writes(), 0, 0, [large], [ITEM])),
        (names.WRITE, (served.writes(), 0, 0, step, [large])),
        (names.WRITE, (served.writes(), 0, 0, step, [(*ITEM[:2], [large], *ITEM[3:])])),
        (names.WRITE, (served.writes(), 0, 0, step, [(*ITEM[:4], {"x": large}, ITEM[5])])),
    ]
    for function, arguments in calls:
        with pytest.raises(moolink.RemoteError) as raised:
            served.rpc.async_("server", function.format("replay"), *arguments).result(LONG)
        assert len(str(raised.value)) < 10_000, str(raised.value)[:300]


def test_priorities_beyond_a_float_are_no_numbers() -> None:
    with moolink.Replay(Table("t", 10)) as replay, pytest.raises(TypeError, match="be numbers"):
        replay.extend({"x": np.zeros(1)}, [10**400])


def test_a_batch_of_more_bytes_than_a_message_is_refused(served: Served) -> None:
    table = Table("large", 10)
    with moolink.Replay(table, seed=0) as replay:
        server = moolink.ReplayServer(served.server_rpc, replay, "large")
        client = moolink.ReplayClient(served.rpc, "large", server="server")
        client.insert({"x": np.zeros(1 << 20, np.float32)}, timeout=LONG)
        says = "batch_size must be at most"
        refused(served.rpc, "server", names.SAMPLE.format("large"), says, None, 1100, 1.0, True)
        assert len(client.sample(2, timeout=LONG)) == 2
        server.close()


def test_a_restored_table_knows_how_large_its_items_are(tmp_path: Path) -> None:
    table = Table("large", 10)
    with moolink.Replay(table, seed=0) as replay:
        replay.insert({"x": np.zeros(1 << 20, np.float32)})
        replay.checkpoint(tmp_path / "file")
    with (
        moolink.Replay.restore(tmp_path / "file", table) as restored,
        pytest.raises(ValueError, match="batch_size must be at most 1023, got 1100"),
    ):
        restored.sample(1100)


def test_a_writer_of_a_wrong_name_leaves_the_next_writers_alone(served: Served) -> None:
    for name in (7, None, 1.5, "no slash", "", "caller/"):
        function = names.WRITE.format("replay")
        future = served.rpc.async_("server", function, name, 0, 0, [(1, STEP)], [])
        future.wait(LONG)
    writers = served.server.stats()["writers"]
    with served.client.writer(keep=1) as writer:
        writer.append({"x": np.zeros(3, np.float32)})
        writer.create_item({"x": writer.history["x"][-1]})
        writer.flush()
        assert served.server.stats()["writers"] <= writers + 1


def test_nothing_of_a_closed_server_can_be_called(served: Served) -> None:
    with moolink.Replay(Table("items", 10)) as replay:
        server = moolink.ReplayServer(served.server_rpc, replay, "closed")
        writer = moolink.ReplayClient(served.rpc, "closed", server="server").writer(keep=1)
        writer.append({"x": 1.0})
        server.close()
        for function in names.ALL:
            with pytest.raises(moolink.NoSuchFunction):
                served.rpc.async_("server", function.format("closed")).result(LONG)
    with moolink.Replay(Table("items", 10)) as replay:
        moolink.ReplayServer(served.server_rpc, replay, "replay is closed")
        replay.close()
        client = moolink.ReplayClient(served.rpc, "replay is closed", server="server")
        with pytest.raises(moolink.Error, match="closed"):
            client.insert({"x": 1.0}, timeout=1)


VALUES = values([KEYS, STEP, ITEM, np.ones(3), np.zeros((0, 2)), "items", "caller/1"])
HARMLESS = [name for name in names.ALL if name not in (names.RESET, names.REMOVE, names.UPDATE)]


@examples(150)
@given(st.sampled_from(HARMLESS), st.lists(VALUES, max_size=6))
def test_whatever_is_called_the_server_lives_on(
    prodded: Served, function: str, arguments: list[Any]
) -> None:
    call = prodded.rpc.async_("server", function.format("replay"), *arguments)
    with contextlib.suppress(moolink.RemoteError, OverflowError):
        call.result(LONG)
    assert len(prodded.client.sample(3, timeout=LONG)) == 3


def test_a_group_without_items_fixes_nothing(served: Served) -> None:
    """Neither what items of a new table look like, nor how large a batch can be."""
    table = moolink.Replay(Table("empty", 10, limiter=MinSize(1)))
    with table, moolink.ReplayServer(served.server_rpc, table, name="empty"):
        for skeleton, width in (({"zz": 0}, 1), ({"x": 0}, 2**32 - 1)):
            no_items = (skeleton, width, [(0, 0, width)], "empty", [], np.ones(0))
            write = (served.writes(), 0, 0, [(1, STEP)], [no_items])
            served.rpc.sync("server", names.WRITE.format("empty"), *write)
        table.insert({"x": np.zeros(3, np.float32)})
        assert len(table.sample(4).keys) == 4


def test_a_step_without_arrays_is_refused(served: Served) -> None:
    write = (served.writes(), 0, 0, [(HUGE, {})], [])
    served.refuses(names.WRITE, "a step has no arrays", *write)


def test_a_batch_of_a_first_item_that_is_too_large_is_refused() -> None:
    """Its bytes are known when the sample has begun to wait."""
    with moolink.Replay(Table("t", 10, limiter=MinSize(1))) as replay:
        raised: list[BaseException] = []

        def sample() -> None:
            try:
                replay.sample(1 << 20, timeout=LONG)
            except ValueError as error:
                raised.append(error)

        waits = threading.Thread(target=sample)
        waits.start()
        until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 1, "a sample")
        replay.insert({"x": np.zeros(100_000, np.uint8)})
        waits.join(LONG)
        assert "batch_size must be at most" in str(raised[0])
