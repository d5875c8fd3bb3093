"""Calls of publishers, subscribers and parameter servers with arguments that no peer sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moolink
from moolink.weights import ParameterServer, Shard, names
from moolink.weights.blob import CHUNK
from tests.hostile import HUGE, refused, values
from tests.property import examples

LONG = 20.0
NAN = float("nan")
PUSH = {"w": np.ones(2)}


class Served:
    """A publisher with two subscribers, a parameter server with a client, and a peer that
    makes wrong calls."""

    def __init__(self) -> None:
        self.server, self.actor = moolink.Rpc("server"), moolink.Rpc("actor")
        self.rpc = moolink.Rpc("caller")
        address = self.server.listen("127.0.0.1:0")[0]
        self.rpc.connect(self.actor.listen("127.0.0.1:0")[0])
        for peer in (self.actor, self.rpc):
            peer.connect(address)
        self.publisher = moolink.Publisher(self.server, "w")
        self.count = 0
        self.publish()
        self.subscriber = moolink.Subscriber(self.actor, "w", "server")
        self.sharded = moolink.weights.ShardedSubscriber(self.actor, "w", ["server"])
        tree = {"w": np.zeros(2)}
        self.parameters = ParameterServer(self.server, "p", tree, descend, like=PUSH)
        self.client = moolink.weights.ParameterClient(self.actor, "p", "server")
        self.works()

    def publish(self) -> None:
        self.count += 1
        rows = np.full((2, 3), self.count, np.float32)
        tree = {"rows": Shard(rows, (0, 0), (2, 3)), "whole": np.full(3, self.count)}
        self.publisher.publish(tree, self.count)

    def works(self) -> None:
        self.publish()
        for one in (self.subscriber, self.sharded):
            weights = one.wait(self.count, LONG)
            assert weights.version == self.count
            assert (weights.tree["rows"] == self.count).all()
        version = self.parameters.version
        assert self.client.push({"w": np.ones(2)}, version) == version + 1
        weights = self.client.pull(version + 1, LONG)
        assert weights.tree["w"].tolist() == [-version - 1.0] * 2

    def close(self) -> None:
        for thing in (self.client, self.parameters, self.sharded, self.subscriber):
            thing.close()
        for last in (self.publisher, self.rpc, self.actor, self.server):
            last.close()


def descend(parameters: Any, pushed: Any) -> Any:
    parameters["w"] -= pushed["w"]
    return parameters


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


KEY = ("i", 1, "")
WHOLE = [(0, ((0, 2), (0, 3)))]
WRONG: list[tuple[str, str, tuple[Any, ...]]] = [
    (names.NEXT, "subscriber must be a str", (7, "host", None, "")),
    (names.NEXT, "subscriber must be a str", (["caller"], "host", None, "")),
    (names.NEXT, "host must be a str", ("caller", np.zeros(2), None, "")),
    (names.NEXT, "host must be a str", ("caller", None, None, "")),
    (names.NEXT, "is not a key of a version", ("caller", "host", 7, "")),
    (names.NEXT, "is not a key of a version", ("caller", "host", ("i", 1), "")),
    (names.NEXT, "is not a key of a version", ("caller", "host", (["i"], 1, ""), "")),
    (names.NEXT, "version must be an integer", ("caller", "host", ("i", "1", ""), "")),
    (names.NEXT, "version must be an integer", ("caller", "host", ("i", NAN, ""), "")),
    (names.NEXT, "version must be at least 0", ("caller", "host", ("i", -1, ""), "")),
    (names.NEXT, "version must be at most", ("caller", "host", ("i", 1 << 62, ""), "")),
    (names.NEXT, "version must be at most", ("caller", "host", ("i", 1 << 63, ""), "")),
    (names.NEXT, "not a type to convert to", ("caller", "host", None, "int8")),
    (names.NEXT, "not a type to convert to", ("caller", "host", None, None)),
    (names.NEXT, "not a type to convert to", ("caller", "host", None, np.zeros(2))),
    (names.NEXT, "missing 1 required positional argument: 'dtype'", ("caller", "host", None)),
    (names.SOURCE, "subscriber must be a str", (["caller"], None)),
    (names.SOURCE, "failed must be a str", ("caller", 7)),
    (names.SOURCE, "failed must be a str", ("actor", {"a": 1})),
    (names.CHUNK, "is not a key of a version", (7, 0)),
    (names.CHUNK, "is not a key of a version", (None, 0)),
    (names.CHUNK, "chunk must be an integer", (KEY, "x" * CHUNK)),
    (names.CHUNK, "chunk must be an integer", (KEY, [0])),
    (names.CHUNK, "chunk must be an integer", (KEY, None)),
    (names.CHUNK, "chunk must be at least 0", (KEY, -1)),
    (names.CHUNK, "chunk must be at most", (KEY, 1 << 63)),
    (names.PARTS_NEXT, "subscriber must be a str", (None, 0, None, -1, "")),
    (names.PARTS_NEXT, "number must be an integer", ("caller", None, None, -1, "")),
    (names.PARTS_NEXT, "number must be at least 0", ("caller", -1, None, -1, "")),
    (names.PARTS_NEXT, "version must be an integer", ("caller", 0, "1", -1, "")),
    (names.PARTS_NEXT, "version must be at least 0", ("caller", 0, -1, -1, "")),
    (names.PARTS_NEXT, "version must be at most", ("caller", 0, 1 << 62, -1, "")),
    (names.PARTS_NEXT, "above must be an integer", ("caller", 0, None, None, "")),
    (names.PARTS_NEXT, "above must be at least -1", ("caller", 0, None, -2, "")),
    (names.PARTS_NEXT, "not a type to convert to", ("caller", 0, None, -1, "float8")),
    (names.PARTS_END, "subscriber must be a str", (None, 0)),
    (names.PARTS_END, "number must be an integer", ("caller", [0])),
    (names.PARTS_END, "number must be at most", ("caller", 1 << 63)),
    (names.PARTS, "is not a key of a version", ("key", WHOLE)),
    (names.PARTS, "pieces must be pairs", (KEY, 7)),
    (names.PARTS, "pieces must be pairs", (KEY, [7])),
    (names.PARTS, "pieces must be pairs", (KEY, [(0, 1, 2)])),
    (names.PARTS, "array must be an integer", (KEY, [("rows", ((0, 2), (0, 3)))])),
    (names.PARTS, "a region must be pairs", (KEY, [(0, 7)])),
    (names.PARTS, "a region must be pairs", (KEY, [(0, [7])])),
    (names.PARTS, "index must be an integer", (KEY, [(0, ((0, "x"), (0, 3)))])),
    (names.PARTS, "index must be at least 0", (KEY, [(0, ((-1, 2), (0, 3)))])),
    (names.PARTS, "index must be at least 2", (KEY, [(0, ((2, 1), (0, 3)))])),
]


@pytest.mark.parametrize(("function", "says", "arguments"), WRONG)
def test_a_wrong_argument_to_a_publisher_is_named(
    served: Served, function: str, says: str, arguments: tuple[Any, ...]
) -> None:
    stats = served.publisher.stats()
    refused(served.rpc, "server", function.format("w"), says, *arguments)
    now = served.publisher.stats()
    assert (now["version"], now["subscribers"]) == (stats["version"], stats["subscribers"])
    served.works()


OF_A_VERSION: list[tuple[str, str, Any]] = [
    (names.CHUNK, "chunk must be at most 0, got 1", 1),
    (names.CHUNK, "chunk must be at most 0", HUGE),
    (names.PARTS, "there is no array 2: the tree has 2", [(2, ((0, 2), (0, 3)))]),
    (names.PARTS, "there is no array -1", [(-1, ((0, 2), (0, 3)))]),
    (names.PARTS, "is not in ((0, 2), (0, 3))", [(0, ((0, HUGE), (0, 3)))]),
    (names.PARTS, "is not in ((0, 2), (0, 3))", [(0, ((0, 2),))]),
    (names.PARTS, "is not in ((0, 2), (0, 3))", [(0, ())]),
]


@pytest.mark.parametrize(("function", "says", "what"), OF_A_VERSION)
def test_what_a_version_does_not_have_is_named(
    served: Served, function: str, says: str, what: Any
) -> None:
    served.publish()
    offer = served.rpc.sync("server", names.PARTS_NEXT.format("w"), "caller", 0, None, -1, "")
    refused(served.rpc, "server", function.format("w"), says, offer["key"], what)
    served.works()


@pytest.mark.parametrize("function", names.OF_PUBLISHER)
def test_a_message_does_not_repeat_what_a_peer_has_sent(served: Served, function: str) -> None:
    text = "x" * (4 << 20)
    of_each = {
        names.NEXT: [([text], "host", None, ""), ("s", "h", text, ""), ("s", "h", None, text)],
        names.SOURCE: [([text], None), ("s", [text])],
        names.CHUNK: [(text, 0), (KEY, text)],
        names.PARTS_NEXT: [("s", text, None, -1, ""), ("s", 0, None, -1, text)],
        names.PARTS: [(KEY, text), (KEY, [(0, text)])],
        names.PARTS_END: [([text], 0), ("s", text)],
    }
    for arguments in of_each[function]:
        with pytest.raises(moolink.RemoteError) as raised:
            served.rpc.async_("server", function.format("w"), *arguments).result(LONG)
        assert len(str(raised.value)) < 10_000, str(raised.value)[:300]


def test_a_version_of_this_publisher_that_was_never_made_is_refused(served: Served) -> None:
    offer = served.rpc.sync("server", names.PARTS_NEXT.format("w"), "caller", 0, None, -1, "")
    instance, newest, _ = offer["key"]
    held = (instance, newest + 100, "")
    says = f"version {newest + 100} was never made"
    refused(served.rpc, "server", names.NEXT.format("w"), says, "caller", "host", held, "")
    served.works()


def test_the_next_version_is_a_number_whatever_a_peer_says_it_has(served: Served) -> None:
    with moolink.Publisher(served.server, "new") as publisher:
        held = ("another", (1 << 61), "")
        call = served.rpc.async_("server", names.NEXT.format("new"), "caller", "host", held, "")
        assert not call.wait(0.2)
        publisher.publish([np.ones(1)])
        call.result(LONG)
        with moolink.Subscriber(served.actor, "new", "server") as one:
            assert one.wait(0, LONG).tree[0].tolist() == [1.0]
            publisher.publish([np.ones(1)])
            assert one.wait((1 << 61) + 2, LONG).version == (1 << 61) + 2


WRONG_COPIES: list[tuple[str, str, tuple[Any, ...]]] = [
    (names.COPY, "is not a key of a version", (7,)),
    (names.COPY, "is not a key of a version", (None,)),
    (names.COPY, "version must be at most", (("i", 1 << 63, ""),)),
    (names.COPY, "missing 1 required positional argument: 'key'", ()),
    (names.COPY_CHUNK, "is not a key of a version", (7, 0)),
    (names.COPY_CHUNK, "chunk must be an integer", (KEY, "x" * CHUNK)),
    (names.COPY_CHUNK, "chunk must be an integer", (KEY, [0])),
    (names.COPY_CHUNK, "chunk must be at least 0", (KEY, -1)),
]


@pytest.mark.parametrize(("function", "says", "arguments"), WRONG_COPIES)
def test_a_wrong_argument_to_a_subscriber_is_named(
    served: Served, function: str, says: str, arguments: tuple[Any, ...]
) -> None:
    refused(served.rpc, "actor", function.format("w"), says, *arguments)
    served.works()


def test_a_chunk_that_a_subscriber_s_version_does_not_have_is_named(served: Served) -> None:
    served.works()
    offer = served.rpc.sync(
        "server", names.PARTS_NEXT.format("w"), "caller", 0, None, served.count - 1, ""
    )
    for index in (1, HUGE):
        says = "chunk must be at most 0"
        refused(served.rpc, "actor", names.COPY_CHUNK.format("w"), says, offer["key"], index)
    served.works()


WRONG_PUSHES: list[tuple[str, tuple[Any, ...]]] = [
    ("version must be an integer, got '0'", (PUSH, "0")),
    ("version must be an integer, got None", (PUSH, None)),
    ("version must be an integer, got nan", (PUSH, NAN)),
    ("version must be at least 0", (PUSH, -1)),
    ("version must be at most", (PUSH, 1 << 63)),
    ("was never made", (PUSH, 1 << 40)),
    ("missing 1 required positional argument: 'version'", (PUSH,)),
    ("positional arguments but", (PUSH, 0, 0)),
    ("the item: expected a dict, got NoneType", (None, 0)),
    ("the item: expected a dict, got str", ("text", 0)),
    ("missing keys ['w']", ({}, 0)),
    ("unexpected keys ['b']", ({**PUSH, "b": 1}, 0)),
    ("w: expected (2,) float64", ({"w": np.ones(3)}, 0)),
    ("w: expected (2,) float64", ({"w": np.ones((HUGE, 0))}, 0)),
    ("w: expected (2,) float64", ({"w": np.ones(2, np.float32)}, 0)),
    ("w: expected (2,) float64", ({"w": 1.0}, 0)),
    ("w: expected (2,) float64", ({"w": {"deep": np.ones(2)}}, 0)),
]


@pytest.mark.parametrize(("says", "arguments"), WRONG_PUSHES)
def test_a_wrong_argument_to_a_parameter_server_is_named(
    served: Served, says: str, arguments: tuple[Any, ...]
) -> None:
    version = served.parameters.version
    refused(served.rpc, "server", names.PUSH.format("p"), says, *arguments)
    assert served.parameters.version == version
    served.works()


def test_functions_of_what_is_closed_are_not_there(served: Served) -> None:
    moolink.Publisher(served.server, "closed").close()
    moolink.Subscriber(served.actor, "closed", "server").close()
    ParameterServer(served.server, "closed", PUSH, descend).close()
    functions = [("server", one) for one in (*names.OF_PUBLISHER, names.PUSH)]
    for peer, function in [*functions, ("actor", names.COPY), ("actor", names.COPY_CHUNK)]:
        with pytest.raises(moolink.NoSuchFunction):
            served.rpc.async_(peer, function.format("closed")).result(LONG)


VALUES = values(["caller", "actor", "", "float16", KEY, WHOLE, np.zeros(2)])
ANY = [("server", one) for one in (*names.OF_PUBLISHER, names.PUSH)]
ANY += [("actor", names.COPY), ("actor", names.COPY_CHUNK)]


@examples(100)
@given(st.sampled_from(ANY), st.lists(VALUES, max_size=5))
def test_whatever_is_called_versions_arrive(
    served: Served, function: tuple[str, str], arguments: list[Any]
) -> None:
    peer, name = function
    with contextlib.suppress(moolink.RemoteError, moolink.TimeoutError, OverflowError):
        of = "p" if name == names.PUSH else "w"
        call = served.rpc.async_(peer, name.format(of), *arguments)
        try:
            call.result(0.05)  # some wait for a later version
        finally:
            call.cancel()
    served.works()
