"""Groups through a real broker over tcp and shared memory, several peers in one process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from tests.processes import killed_at_the_end, start_python
from tests.waiting import formed, until

Join = Callable[..., moolink.Group]


def test_members_in_order_of_joining_and_sort(join: Join) -> None:
    first = join("first")
    formed([first])
    second = join("second")
    formed([first, second])
    third = join("third", sort=-1)
    formed([first, second, third])
    assert first.members() == ["third", "first", "second"]
    assert [g.rank() for g in (first, second, third)] == [1, 2, 0]
    assert all(g.active() and g.epoch() > 0 for g in (first, second, third))


def test_update_tells_of_changes_once_and_calls_back(join: Join) -> None:
    first = join("first")
    seen: list[list[str]] = []
    first.on_change(lambda group: seen.append(group.members()))
    until(first.update, "the first view")
    assert not first.update()
    second = join("second")
    until(first.update, "the second view")
    assert seen == [["first"], ["first", "second"]]
    second.close()
    until(first.update, "the third view")
    assert seen[-1] == ["first"]


def test_waiting_for_members(join: Join) -> None:
    first = join("first")
    first.wait_for_members(1, 20)
    assert first.members() == ["first"]
    with pytest.raises(moolink.TimeoutError, match=r"'.*' had 1 of 2 members after 0.01 s: start"):
        first.wait_for_members(2, 0.01)
    with pytest.raises(ValueError, match="not negative"):
        first.wait_for_members(2, -1)
    with pytest.raises(TypeError, match="count must be an integer, got '2'"):
        first.wait_for_members("2", 1)  # type: ignore[arg-type]
    for count in (0, 2**64):
        with pytest.raises(ValueError, match="count must be at"):
            first.wait_for_members(count, 1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.wait_for_members, 3)
        second = join("second")
        second.wait_for_members(2, 20)
        assert not waiting.done()
        join("third")
        waiting.result(20)
    assert first.members() == ["first", "second", "third"]


def test_two_groups_that_wait_for_each_others_members(
    join: Join, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moolink.group.other_groups._LOOK_AROUND", 0.01)
    a, b = join("a", "one"), join("b", "tow")
    for group in (a, b):
        group.wait_for_members(1, 20)
    with pytest.raises(moolink.TimeoutError, match="the broker also has group 'tow' with 1 member"):
        a.wait_for_members(2, 0.2)
    assert (
        "group 'one' has 1 of 2 members: the broker also has group 'tow' with 1 member: give all "
        "peers of a job the same group's name"
    ) in caplog.messages
    with pytest.raises(moolink.TimeoutError, match="group 'one' with 1 member"):
        b.wait_for_members(2, 0.2)
    second = join("another", "tow")
    second.wait_for_members(2, 20)
    with pytest.raises(moolink.TimeoutError, match="start the others"):
        a.wait_for_members(2, 0)  # the other one has all of its members


@pytest.mark.parametrize("timeout", [0, 0.05, 1.5])
def test_a_wait_for_members_lasts_no_longer_for_a_broker_without_an_answer(
    join: Join, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = join("alone")
    group.wait_for_members(1, 20)
    questions = []
    turns: list[float] = []

    class Unanswered:
        """An answer that does not come. The wait for members must not wait for it."""

        cancelled = False

        def done(self) -> bool:
            return False

        def cancel(self) -> None:
            self.cancelled = True

    def ask(*_: object) -> Unanswered:
        questions.append(Unanswered())
        return questions[-1]

    class Core:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def wait_for_members(self, count: int, timeout: float | None) -> bool:
            assert timeout is not None
            turns.append(timeout)
            return core.wait_for_members(count, timeout)

    core = group._core
    monkeypatch.setattr(group.rpc, "async_", ask)
    monkeypatch.setattr(group, "_core", Core())
    with pytest.raises(moolink.TimeoutError, match="start the others"):
        group.wait_for_members(2, timeout)
    # Each turn may last as long, and begins within the time limit.
    assert sum(turns) <= timeout + 0.01
    assert len(questions) == (timeout > 0)
    assert all(question.cancelled for question in questions)


def test_closing_a_group_ends_the_waits_for_members(join: Join) -> None:
    group = join("alone")
    group.wait_for_members(1, 20)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(group.wait_for_members, 2)
        until(lambda: "members of a group" in moolink.dump(), "the wait to begin")
        group.close()
        with pytest.raises(moolink.Closed):
            waiting.result(20)


def test_groups_do_not_mix(join: Join) -> None:
    a, b = join("a", "one"), join("b", "two")
    formed([a])
    formed([b])
    assert (a.members(), b.members()) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("min", 1.0), ("max", 3.0), (None, 6.0)]
)
def test_operations(join: Join, op: str | None, expected: float) -> None:
    groups = [join(f"peer-{i}") for i in range(3)]
    formed(groups)
    inputs = [np.full((2, 3), i + 1.0, np.float32) for i in range(3)]
    started = [g.all_reduce("x", x, op=op) for g, x in zip(groups, inputs, strict=True)]
    for future, given, i in zip(started, inputs, range(3), strict=True):
        result = future.result(20)
        assert result.dtype == np.float32
        assert result.shape == (2, 3)
        assert (result == expected).all()
        assert (given == i + 1.0).all(), "inputs are untouched"


def test_large_tensors_have_the_same_bits_everywhere(join: Join) -> None:
    groups = [join(f"peer-{i}") for i in range(3)]
    formed(groups)
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(300_001).astype(np.float32) for _ in groups]
    futures = [g.all_reduce("big", x) for g, x in zip(groups, inputs, strict=True)]
    results = [f.result(20) for f in futures]
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    by_rank = [inputs[i] for i in sorted(range(3), key=lambda i: groups[i].rank() or 0)]
    # In rank order once the members share memory; the operation may begin before that.
    np.testing.assert_allclose(results[0], by_rank[0] + by_rank[1] + by_rank[2], atol=1e-5)


def test_trees_keep_their_types(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)
    Pair = namedtuple("Pair", "mean count")

    def data(i: int) -> dict[str, object]:
        return {
            "torch": torch.full((2,), float(i)),
            "half": torch.full((3,), float(i), dtype=torch.bfloat16),
            "pair": Pair(np.float32(i), [i, 0.5]),
        }

    futures = [g.all_reduce("stats", data(i + 1)) for i, g in enumerate(groups)]
    for future in futures:
        result = future.result(20)
        assert list(result) == ["torch", "half", "pair"]
        assert torch.equal(result["torch"], torch.full((2,), 3.0))
        assert torch.equal(result["half"], torch.full((3,), 3.0, dtype=torch.bfloat16))
        assert isinstance(result["pair"], Pair)
        assert result["pair"].count == [3, 1.0]
        assert isinstance(result["pair"].count[0], int)


def test_several_operations_in_flight_and_names_counted(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)
    futures = {
        (name, n): [g.all_reduce(name, np.array([n])) for g in groups]
        for n in range(5)
        for name in ("x", "y")
    }
    for (_, n), pair in futures.items():
        assert [f.result(20)[0] for f in pair] == [2 * n, 2 * n]


def test_python_operation_runs_once_in_rank_order(join: Join) -> None:
    groups = [join("a"), join("b"), join("c")]
    formed(groups)
    order = groups[0].members()
    futures = [
        g.all_reduce("lists", [g.members()[g.rank() or 0]], op=lambda x, y: x + y) for g in groups
    ]
    assert [f.result(20) for f in futures] == [order] * 3


def test_python_operation_that_raises_fails_everywhere(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)

    def fail(x: object, y: object) -> object:
        raise KeyError("no such statistic")

    futures = [g.all_reduce("stats", 1, op=fail) for g in groups]
    for future in futures:
        with pytest.raises(moolink.RemoteError, match="no such statistic"):
            future.result(20)


def test_python_operation_whose_result_cannot_travel_fails_everywhere(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)
    futures = [g.all_reduce("stats", 1, op=lambda x, y: object()) for g in groups]
    for future in futures:
        with pytest.raises(moolink.RemoteError, match="cannot travel"):
            future.result(20)


def test_closing_the_rpc_ends_the_operations_of_its_groups(broker_address: str) -> None:
    with moolink.Rpc("a") as rpc, moolink.Rpc("b") as other_rpc:
        for peer in (rpc, other_rpc):
            peer.connect(broker_address)
        groups = [moolink.Group(rpc, "group"), moolink.Group(other_rpc, "group")]
        formed(groups)
        pending = groups[0].all_reduce("x", np.ones(1))
        rpc.close()
        with pytest.raises(moolink.Closed):
            pending.result(5)
        with pytest.raises(moolink.Closed):
            groups[0].update()
        until(lambda: groups[1].update() or groups[1].members() == ["b"], "the other to be alone")


@pytest.mark.parametrize("name", ["", "x" * 2000, "a\nb"])
def test_names_are_checked_where_they_are_given(name: str) -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(ValueError, match="a group's name has 1 to"):
        moolink.Group(rpc, name)
    if name:
        with pytest.raises(ValueError, match="a peer's name has 1 to"):
            moolink.Rpc(name)


def test_shapes_that_differ_are_an_error_that_names_both(join: Join) -> None:
    groups = [join("alice"), join("bob")]
    formed(groups)
    futures = [g.all_reduce("x", np.zeros(n)) for g, n in zip(groups, (2, 3), strict=True)]
    for future in futures:
        with pytest.raises(moolink.Error, match=r"(?s)(alice.*bob|bob.*alice)"):
            future.result(20)
    again = [g.all_reduce("y", np.ones(1)) for g in groups]
    assert again[0].result(20)[0] == 2, "the group goes on"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": np.ones(2), "b": np.ones(3)}, {"a": np.ones(3), "b": np.ones(2)}),
        (np.ones((2, 3)), np.ones((3, 2))),
        ({"loss": 1.0}, {"return": 1.0}),
        ({"x": np.ones(2, np.float32)}, {"x": np.ones(2, np.float32), "y": np.ones(1)}),
    ],
    ids=["shapes", "transposed", "keys", "dtypes"],
)
def test_trees_that_differ_are_an_error_though_they_have_as_many_elements(
    join: Join, one: object, other: object
) -> None:
    groups = [join("alice"), join("bob")]
    formed(groups)
    futures = [g.all_reduce("x", tree) for g, tree in zip(groups, (one, other), strict=True)]
    for future in futures:
        with pytest.raises(moolink.Error, match="does not fit"):
            future.result(20)
    again = [g.all_reduce("y", np.ones(1)) for g in groups]
    assert again[0].result(20)[0] == 2, "the group goes on"


def test_a_member_that_leaves_fails_or_retries_what_it_had_not_started(join: Join) -> None:
    groups = [join("a"), join("b"), join("c")]
    formed(groups)
    failing = groups[0].all_reduce("x", np.ones(1))
    retried = [g.all_reduce("y", np.ones(1), on_change="retry") for g in groups[:2]]
    groups[2].close()
    with pytest.raises(moolink.GroupChanged, match="c"):
        failing.result(20)
    assert [f.result(20)[0] for f in retried] == [2.0, 2.0]


def test_an_operation_that_nobody_else_starts_times_out_and_says_whom_it_waits_for(
    join: Join,
) -> None:
    groups = [join("a"), join("b")]
    formed(groups)
    groups[0].set_timeout(1.0)
    with pytest.raises(moolink.TimeoutError, match="b"):
        groups[0].all_reduce("x", np.ones(1)).result(20)


def test_await(join: Join) -> None:
    groups = [join("a"), join("b")]
    formed(groups)

    async def both() -> list[float]:
        futures = [g.all_reduce("x", 1.5) for g in groups]
        return list(await asyncio.gather(*(_wait(f) for f in futures)))

    async def _wait(future: object) -> float:
        return await future  # type: ignore[misc]

    assert asyncio.run(both()) == [3.0, 3.0]


def test_misuse(join: Join) -> None:
    group = join("a")
    formed([group])
    with pytest.raises(ValueError, match="median"):
        group.all_reduce("x", np.ones(1), op="median")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"data\['a'\]"):
        group.all_reduce("x", {"a": "text"})
    group.close()
    with pytest.raises(moolink.Closed):
        group.update()


def test_without_a_broker_there_is_no_view_and_a_reason() -> None:
    with moolink.Rpc("alone") as rpc, moolink.Group(rpc, "group") as group:
        assert not group.update()
        assert group.members() == []
        assert group.rank() is None
        assert "broker" in group.waiting_for()
        with pytest.raises(moolink.Closed):
            group.all_reduce("x", np.ones(1))


def test_a_second_peer_of_a_name_is_told_so(join: Join) -> None:
    first = join("same")
    formed([first])
    second = join("same")
    with pytest.raises(moolink.Error, match="'same' is taken"):
        second.rpc.sync("anybody", "f")
    with pytest.raises(moolink.Error, match=r"'group' has no broker: .*'same' is taken") as caught:
        second.wait_for_members(1)
    assert type(caught.value) is moolink.Error
    assert first.members() == ["same"]
    first.rpc.close()

    def joined() -> bool:
        with contextlib.suppress(moolink.Error):  # the last refusal may still be raised
            second.update()
        return second.members() == ["same"]

    until(joined, "the name")


MEMBER = """
import sys
import moolink

with moolink.Rpc("same") as rpc, moolink.Group(rpc, "group") as group:
    rpc.connect(sys.argv[1])
    group.wait_for_members(1)
    print(group.members(), flush=True)
    sys.stdin.read()
"""


def test_a_peer_that_was_killed_comes_back_under_its_name() -> None:
    """Also if nothing tells the broker of the end, as when a host is gone: then the name is refused
    until the silence is noticed."""
    with moolink.Broker(first=True) as broker, killed_at_the_end() as processes:
        address = broker.listen("127.0.0.1:0")[0]
        for end in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            process = start_python("-c", MEMBER, address)
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "['same']\n"
            process.send_signal(end)


def test_what_a_group_waits_for_names_an_address_once(join: Join) -> None:
    first = join("same")
    formed([first])
    second = join("same")
    until(lambda: "is taken" in second.waiting_for(), "the refusal")
    # A peer answers there, so the text does not ask whether the broker runs there.
    assert "does broker" not in second.waiting_for()
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0]
    with moolink.Rpc("alone") as rpc, moolink.Group(rpc, "group") as group:
        rpc.connect(address)
        until(lambda: "cannot connect" in group.waiting_for(), "a dial that fails")
        assert group.waiting_for().count(address) == 1
        assert group.waiting_for().endswith("does broker 'broker' run there?")


def test_a_group_whose_token_is_refused_does_not_ask_whether_its_broker_runs() -> None:
    broker_token, own = (f"moolink-token:{digit * 64}" for digit in "ab")
    with (
        moolink.Broker(token=broker_token) as broker,
        moolink.Rpc("stranger", token=own) as rpc,
        moolink.Group(rpc, "group") as group,
    ):
        rpc.connect(broker.listen("127.0.0.1:0")[0])
        until(lambda: "is refused" in group.waiting_for(), "the refusal")
        assert "does broker" not in group.waiting_for()
