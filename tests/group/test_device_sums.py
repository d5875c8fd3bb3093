"""Sums of large tensors by a communicator of torch: the choice of the communicator, and failures.

gloo takes NCCL's place, and tensors in host memory that of tensors on a device.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import datetime
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from moolink.torch.communicators import Communicator, GroupStore, Nccl, Values
from tests.group.gloo import Gloo, Held, N, at_all, connect, start_held, sums, ways
from tests.waiting import TIMEOUT, formed, until

Join = Callable[..., moolink.Group]


def test_the_communicator_computes_sums_and_means(member: Any) -> None:
    groups = [member(name) for name in "abc"]
    connect(groups)
    before = ways(groups[0])
    assert all((total == 6).all() for total in sums(groups))
    assert all((mean == 2).all() for mean in sums(groups, op="mean"))
    for dtype in (torch.float32, torch.float64):
        data = [torch.randn(50, 200, dtype=dtype) for _ in groups]
        got = at_all(groups, lambda r, d=data: groups[r].all_reduce("y", d[r]).result(TIMEOUT))
        torch.testing.assert_close(got[0], data[0] + data[1] + data[2])
        assert all(torch.equal(x, got[0]) and x.dtype is dtype for x in got)
        assert len({x.data_ptr() for x in [*got, *data]}) == 6
    assert ways(groups[0]) == (before[0] + 4, before[1])
    assert [group._device_sums._backend.connected for group in groups] == [1, 1, 1]


def test_results_are_new_or_in_place_or_in_out(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    before = ways(groups[0])[0]
    data = [torch.full((N,), rank + 1.0) for rank in range(2)]
    out = [torch.zeros(N) for _ in range(2)]
    got = at_all(groups, lambda r: groups[r].all_reduce("x", data[r], out=out[r]).result(TIMEOUT))
    assert all(a is b and (a == 3).all() for a, b in zip(got, out, strict=True))
    assert [x[0].item() for x in data] == [1, 2]
    versions = [x._version for x in data]
    got = at_all(groups, lambda r: groups[r].all_reduce("x", data[r], inplace=True).result(TIMEOUT))
    assert all(a is b and (a == 3).all() for a, b in zip(got, data, strict=True))
    assert all(x._version > version for x, version in zip(data, versions, strict=True))
    assert ways(groups[0])[0] == before + 2
    with pytest.raises(ValueError, match="the result is float32"):
        groups[0].all_reduce("x", data[0], out=torch.zeros(N - 1))


def test_ineligible_operations_do_not_use_the_communicator(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    before = ways(groups[0])
    cases: list[tuple[Any, dict[str, Any]]] = [
        (torch.ones(N - 1), {}),
        (torch.ones(N, dtype=torch.int64), {}),
        (torch.ones(2 * N, dtype=torch.bfloat16), {}),
        ({"tree": torch.ones(N)}, {}),
        (torch.ones(N), {"op": "max"}),
        (torch.ones(N), {"on_change": "retry"}),
        (torch.ones(N), {"compress": "bf16"}),
    ]
    for number, (data, options) in enumerate(cases):
        got = at_all(
            groups,
            lambda r, n=number, d=data, o=options: (
                groups[r].all_reduce(f"{n}", d, **o).result(TIMEOUT)
            ),
        )
        leaf = got[0]["tree"] if isinstance(data, dict) else got[0]
        assert (leaf == (1 if "op" in options else 2)).all()
    assert ways(groups[0]) == before
    with pytest.raises(ValueError, match="exclude"):
        groups[0].all_reduce("x", torch.ones(N), inplace=True, out=torch.ones(N))


def test_no_member_uses_the_communicator_until_all_are_connected(member: Any) -> None:
    may_connect = threading.Event()

    class Late(Gloo):
        def connect(self, *arguments: Any) -> Any:
            may_connect.wait(TIMEOUT)
            return super().connect(*arguments)

    groups = [member("a"), member("b", Late()), member("c")]
    formed(groups)
    for _ in range(3):
        assert all((total == 6).all() for total in sums(groups))
    assert [ways(group) for group in groups] == [(0, 3)] * 3
    may_connect.set()
    connect(groups)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_no_member_uses_a_communicator_if_one_cannot(member: Any, join: Join, which: int) -> None:
    for backend in (None, Gloo(is_there=False)):
        with contextlib.ExitStack() as stack:
            names = [f"{name} {backend is None}" for name in "abc"]
            groups = []
            for place, name in enumerate(names):
                if place != which:
                    groups.append(member(name))
                else:
                    groups.append(join(name) if backend is None else member(name, backend))
                stack.callback(groups[-1].close)
            formed(groups)
            for _ in range(2):
                assert all((total == 6).all() for total in sums(groups))
            capable = [group for group in groups if group._device_sums is not None]
            assert all(ways(group) == (0, 0) for group in capable)


def test_the_variable_turns_nccl_on(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, asked in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("MOOLINK_NCCL", value)
        groups = [join(f"{name}{value}", f"group {value}") for name in "ab"]
        formed(groups)
        assert all((group._device_sums is not None) == asked for group in groups)
        large = torch.ones(2_000_000)
        got = at_all(groups, lambda r, g=groups, d=large: g[r].all_reduce("x", d).result(TIMEOUT))
        assert all((total == 2).all() for total in got)
    if Nccl().available():
        pytest.skip("the members' tensors are not on a device")
    assert groups[0]._device_sums is not None
    assert ways(groups[0]) == (0, 0)


def test_another_value_of_the_variable_is_refused(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOOLINK_NCCL", "true")
    with pytest.raises(ValueError, match="MOOLINK_NCCL is 'true': 1 turns it on, 0 turns it off"):
        join("a")


def test_members_with_an_observer_sum_without_a_communicator(member: Any, join: Join) -> None:
    groups = [member("a"), member("b")]
    parameter = torch.nn.Parameter(torch.zeros(3))
    third = member("c")
    with moolink.Accumulator("model", [parameter], group=third, role="observer") as observer:
        until(lambda: (observer.update(), len(third.members()) == 3)[1], "the observer")
        formed(groups, 3)
        for _ in range(3):
            assert all((total == 3).all() for total in sums(groups))
        assert [ways(group) for group in groups] == [(0, 3), (0, 3)]


def test_no_member_uses_the_communicator_if_one_array_is_unsuitable(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    before = ways(groups[0])
    others = [
        np.full(N, 2, np.float32),
        torch.full((2 * N,), 2.0)[::2],
        torch.full((N,), 2.0, requires_grad=True),
    ]
    for other in others:
        data = [torch.ones(N), other]
        got = at_all(groups, lambda r, d=data: groups[r].all_reduce("x", d[r]).result(TIMEOUT))
        assert all((np.asarray(total) == 3).all() for total in got)
        assert type(got[1]) is type(other)
    assert ways(groups[0]) == (before[0] + 1, before[1] + 2)  # the last suits


def test_members_that_pass_different_arguments_get_an_error(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    for data in ([torch.ones(N), torch.ones(N + 1)], [torch.ones(N), torch.ones(N).double()]):
        futures = at_all(groups, lambda r, d=data: groups[r].all_reduce("x", d[r]))
        for future in futures:
            with pytest.raises(moolink.Error, match=r"data: .*5000.*data: "):
                future.result(TIMEOUT)
    assert all((total == 3).all() for total in sums(groups))


def test_operations_may_begin_in_different_orders(member: Any) -> None:
    groups = [member(name) for name in "abc"]
    connect(groups)
    before = ways(groups[0])[0]
    names = [f"name {number}" for number in range(12)]

    def start(rank: int) -> list[float]:
        order = names[rank:] + names[:rank]
        order = order[::-1] if rank == 1 else order
        futures = {
            name: groups[rank].all_reduce(name, torch.full((N,), float(names.index(name) + rank)))
            for name in order
        }
        assert not any(future.exception() for future in futures.values())
        return [future.result(TIMEOUT)[0].item() for _, future in sorted(futures.items())]

    wanted = [3.0 * names.index(name) + 3 for name in sorted(names)]
    assert at_all(groups, start) == [wanted] * 3
    assert ways(groups[0])[0] == before + 12


def test_agreements_that_arrive_in_another_order_keep_their_turns(
    member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    device_sums = groups[1]._device_sums
    assert device_sums is not None
    agreed = device_sums._agreed
    held: list[tuple[Any, ...]] = []

    def reverse_two(*arguments: Any) -> None:
        held.append(arguments)
        for late in held[::-1] if len(held) == 2 else ():
            agreed(*late)

    monkeypatch.setattr(device_sums, "_agreed", reverse_two)

    def start(rank: int) -> list[float]:
        futures = [
            groups[rank].all_reduce(name, torch.full((N,), value))
            for name, value in (("x", 1.0), ("y", 10.0))
        ]
        return [future.result(TIMEOUT)[0].item() for future in futures]

    before = ways(groups[1])[0]
    assert at_all(groups, start) == [[2, 20], [2, 20]]
    assert ways(groups[1])[0] == before + 2


@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_at_one_member_ends_the_communicator_for_the_rest_of_the_epoch(
    member: Any, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    fails = threading.Event()

    def fail(number: int) -> None:
        if fails.is_set():
            raise RuntimeError("NCCL is out of memory")

    backends = [Gloo(fail) if rank == which else Gloo() for rank in range(3)]
    groups = [member(name, backend) for name, backend in zip("abc", backends, strict=True)]
    connect(groups)
    fails.set()
    with caplog.at_level(logging.WARNING, "moolink"):
        assert all((total == 6).all() for total in sums(groups))
    assert "NCCL is out of memory" in caplog.text
    assert all(backend.aborted.wait(TIMEOUT) for backend in backends)
    fails.clear()
    before = ways(groups[0])
    for _ in range(3):
        assert all((total == 6).all() for total in sums(groups))
    assert ways(groups[0]) == (before[0], before[1] + 3)
    groups.append(member("d"))
    connect(groups)
    assert [backend.connected for backend in backends] == [2, 2, 2]


def test_a_failed_connection_is_not_an_error(member: Any) -> None:
    class Failing(Gloo):
        def connect(self, *arguments: Any) -> Any:
            self.aborted.set()
            raise RuntimeError("two members have one device")

    backend = Failing()
    groups = [member("a"), member("b", backend)]
    formed(groups)
    for _ in range(3):
        assert all((total == 3).all() for total in sums(groups))
    assert backend.aborted.wait(TIMEOUT)  # on a thread of its own
    assert ways(groups[0])[0] == 0


@pytest.mark.parametrize("late", [0, 1])
def test_a_newcomer_ends_a_sum_that_waits_and_the_next_epoch_has_its_own_communicator(
    member: Any, late: int
) -> None:
    """One member never begins its part: without an abort the other would wait for 600 s."""
    held = Held()
    backends = [held if rank == late else Gloo() for rank in range(2)]
    groups = [member(name, backend) for name, backend in zip("ab", backends, strict=True)]
    connect(groups)
    futures = start_held(groups, held)
    assert not any(future.wait(0.1) for future in futures)
    groups.append(member("c"))
    for future in futures:
        with pytest.raises(moolink.GroupChanged):
            future.result(TIMEOUT)
    held.goes_on.set()
    assert all(backend.aborted.wait(TIMEOUT) for backend in backends)
    connect(groups)
    assert [backend.connected for backend in backends] == [2, 2]


def test_a_sum_that_is_cancelled_ends_at_all_members(member: Any) -> None:
    held = Held()
    groups = [member("a", held), member("b")]
    connect(groups)
    first = start_held(groups, held)
    second = at_all(groups, lambda r: groups[r].all_reduce("y", torch.ones(N)))
    assert second[1].cancel()
    held.goes_on.set()
    assert all((future.result(TIMEOUT) == 2).all() for future in first)
    assert not first[0].cancel()
    for future in second:
        with pytest.raises(moolink.Error, match="cancel"):
            future.result(TIMEOUT)
    assert all((total == 3).all() for total in sums(groups))


def test_futures_behave_like_those_of_other_operations(member: Any) -> None:
    held = Held()
    groups = [member("a", held), member("b")]
    connect(groups)
    futures = start_held(groups, held)
    called = threading.Event()
    futures[0].add_done_callback(lambda future: called.set())
    with pytest.raises(moolink.TimeoutError):
        futures[0].result(0.01)
    assert not futures[0].done()
    assert futures[0].exception() is None
    assert not called.is_set()
    held.goes_on.set()

    async def both() -> list[Any]:
        return [await future for future in futures]

    assert all((total == 2).all() for total in asyncio.run(both()))
    assert called.wait(TIMEOUT)
    assert futures[0].done()


def test_a_group_that_is_closed_ends_its_sums(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    connect(groups)
    future = groups[0].all_reduce("x", torch.ones(N))
    groups[0].close()
    with pytest.raises(moolink.Error):
        future.result(TIMEOUT)
    with pytest.raises(moolink.Closed):
        groups[0].all_reduce("x", torch.ones(N))
    until(lambda: groups[1].update() and len(groups[1].members()) == 1, "one member")
    assert (groups[1].all_reduce("x", torch.ones(N)).result(TIMEOUT) == 1).all()


def test_unknown_requests_are_refused(member: Any) -> None:
    groups = [member(name) for name in "ab"]
    formed(groups)
    with pytest.raises(moolink.RemoteError, match="unknown request 'secrets'"):
        groups[1].rpc.sync("a", "moolink.sums:'group'", "secrets")


# The communicator and its store


def test_abort_before_the_process_group_is_made_takes_effect_once_it_is() -> None:
    making, made = threading.Event(), threading.Event()

    class Slow(Gloo):
        def make(self, *arguments: Any) -> Any:
            making.set()
            made.wait(TIMEOUT)
            return "group"

    backend = Slow()
    communicator = Communicator(backend, store_of(Values()), 0, 2, torch.device("cpu"))
    assert making.wait(TIMEOUT)
    communicator.abort(moolink.Error("over"))
    assert not backend.aborted.is_set()
    made.set()
    assert backend.aborted.wait(TIMEOUT)
    assert backend.connected == 0
    assert not communicator.ready
    with pytest.raises(moolink.Error, match="aborted"):
        communicator.sum(torch.ones(3), "mark", 1).result(TIMEOUT)


def store_of(values: Values) -> GroupStore:
    def ask(what: str, *arguments: Any) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        values.serve(answer.set_result, what, *arguments)
        return answer

    return GroupStore(ask)


def test_the_store_holds_the_values_that_torch_sets() -> None:
    values = Values()
    one, other = store_of(values), store_of(values)
    two = torch.distributed.PrefixStore("epoch", other)  # it does not keep Python's part alive
    one.set("epoch/key", "text")
    assert two.get("key") == b"text"
    assert two.add("count", 2) == 2
    assert one.add("epoch/count", 3) == 5
    assert two.check(["key", "count"])
    assert not one.check(["epoch/key", "other"])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(two.get, "later")
        one.set("epoch/later", b"\x00\xff")
        assert waits.result(TIMEOUT) == b"\x00\xff"
    one.wait(["epoch/key"], datetime.timedelta(seconds=1))
    with pytest.raises(TimeoutError):
        one.wait(["never"], datetime.timedelta(milliseconds=10))


def test_closing_the_store_ends_waiting_calls() -> None:
    store = store_of(Values())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(store.get, "never")
        until(lambda: bool(store._pending), "the call to wait")
        store.close()
        with pytest.raises(concurrent.futures.CancelledError):
            waits.result(TIMEOUT)
    with pytest.raises(moolink.Error, match="has ended"):
        store.get("never")
