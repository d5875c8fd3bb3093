"""The ends of sums by a communicator: cancel, close, drop, fork and exit; and their remains."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import moolink
from moolink.torch.device_sums import DeviceSums
from tests.group.gloo import Gloo, Held, N, at_all, connect, start_held, sums, ways
from tests.processes import ROOT
from tests.waiting import TIMEOUT, formed, until

Member = Callable[..., moolink.Group]


class Slow(Gloo):
    """Its answer, and with it rank 0's decision for a communicator, waits for `answers`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def available(self) -> bool:
        self.asked.set()
        return self.answers.wait(TIMEOUT)


def start_undecided(
    groups: list[moolink.Group], slow: Slow
) -> concurrent.futures.Future[torch.Tensor]:
    """Starts a sum at the second member; returns its future once rank 0 is asked."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(lambda: groups[1].all_reduce("x", torch.ones(N)).result(TIMEOUT))
    pool.shutdown(wait=False)
    assert slow.asked.wait(TIMEOUT)
    return future


def of_communicators() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in ("sums", "communicator")}


def test_a_cancelled_task_does_not_cancel_the_sum(member: Member) -> None:
    held = Held()
    groups = [member("a", held), member("b")]
    connect(groups)
    futures = start_held(groups, held)

    async def stop_waiting() -> None:
        async def wait() -> None:
            await futures[0]

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop_waiting())
    held.goes_on.set()
    assert all((future.result(TIMEOUT) == 2).all() for future in futures)
    assert all((total == 3).all() for total in sums(groups))


def test_a_sum_that_has_ended_keeps_no_memory(member: Member) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    kept: list[weakref.ref[torch.Tensor]] = []

    def start(rank: int) -> None:
        data = torch.ones(N)
        total = groups[rank].all_reduce("x", data).result(TIMEOUT)
        kept.extend([weakref.ref(data), weakref.ref(total)])

    before = ways(groups[0])[0]
    at_all(groups, start)
    assert ways(groups[0])[0] == before + 1
    until(lambda: all(tensor() is None for tensor in kept), "the tensors to end")


def test_a_member_that_has_died_does_not_hold_up_the_decision(member: Member) -> None:
    groups = [member("a"), member("b"), member("c")]
    formed(groups)
    groups[2].rpc.close()
    until(lambda: all(g._core.is_outdated() for g in groups[:2]), "a view without c")

    def start(rank: int) -> None:
        with pytest.raises(moolink.GroupChanged):
            groups[rank].all_reduce("x", torch.ones(N))

    at_all(groups[:2], start)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_in_another_thread_ends_the_wait_for_a_decision(
    member: Member, rank: int
) -> None:
    slow = Slow()
    groups = [member("a"), member("b", slow), member("c")]
    formed(groups)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: groups[rank].all_reduce("x", torch.ones(N)))
        assert slow.asked.wait(TIMEOUT)
        groups[2].rpc.close()
        until(lambda: groups[rank].update(), "a view without c")
        with pytest.raises(moolink.GroupChanged):
            future.result(TIMEOUT)
    slow.answers.set()


def test_a_lost_agreement_leaves_no_later_sum_waiting(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    for group in groups:
        group.set_timeout(2.0)
    device_sums = groups[1]._device_sums
    assert device_sums is not None
    agreed = device_sums._agreed
    arrived = {name: threading.Event() for name in "xy"}
    lost: list[Any] = []

    class TimedOut:
        def result(self) -> None:
            raise moolink.TimeoutError("the agreement was lost")

    def lose_the_first(epoch: Any, operation: Any, ended: Any) -> None:
        if operation.name == "x":
            lost.extend([epoch, operation, TimedOut()])
        else:
            agreed(epoch, operation, ended)
        arrived[operation.name].set()

    monkeypatch.setattr(device_sums, "_agreed", lose_the_first)
    futures: dict[str, list[Any]] = {}
    for name in "xy":
        futures[name] = at_all(groups, lambda r, n=name: groups[r].all_reduce(n, torch.ones(N)))
        assert arrived[name].wait(TIMEOUT)
    agreed(*lost)
    # Rank 0 waits for the lost agreement until its time limit, and the other member may wait as
    # long.
    assert all(future.wait(TIMEOUT) for future in [*futures["x"], *futures["y"]])
    with pytest.raises(moolink.TimeoutError, match="lost"):
        futures["x"][1].result()


def test_tensors_of_inference_mode_are_written_in_place(member: Member) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    before = ways(groups[0])[0]
    with torch.inference_mode():
        data = [torch.ones(N) for _ in groups]
    got = at_all(groups, lambda r: groups[r].all_reduce("x", data[r], inplace=True).result(TIMEOUT))
    assert all(a is b and (a == 2).all() for a, b in zip(got, data, strict=True))
    assert ways(groups[0])[0] == before + 1


def test_a_sum_that_the_others_have_not_begun_can_be_cancelled(member: Member) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    future = groups[0].all_reduce("x", torch.ones(N))
    assert future.cancel()
    with pytest.raises(moolink.CancelledError):
        future.result(TIMEOUT)
    assert not future.cancel()
    assert all((total == 3).all() for total in sums(groups, "y"))


@pytest.mark.parametrize("place", [0, 1])
def test_the_communicator_is_usable_after_a_cancelled_sum(member: Member, place: int) -> None:
    held = Held()
    groups = [member("a", held), member("b")]
    connect(groups)
    before = ways(groups[1])[0]
    first = start_held(groups, held)
    second = at_all(groups, lambda r: groups[r].all_reduce("y", torch.ones(N)))
    until(lambda: ways(groups[place])[0] == before + 2, "the agreements")
    assert second[place].cancel()
    held.goes_on.set()
    assert all((future.result(TIMEOUT) == 2).all() for future in first)
    for future in second:
        with pytest.raises(moolink.CancelledError):
            future.result(TIMEOUT)
    assert all((total == 3).all() for total in sums(groups))
    assert ways(groups[1])[0] == before + 3


class LostAgreement:
    """An agreement that all members but this one learn of: it ends when it is cancelled."""

    def __init__(self) -> None:
        self._callback: Callable[[Any], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callback = callback

    def cancel(self) -> bool:
        assert self._callback is not None
        self._callback(self)
        return True

    def result(self) -> Any:
        raise moolink.CancelledError("cancelled")


class CoreThatLoses:
    """The core of a group; its member learns of no agreement."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def all_reduce_value(self, *arguments: Any) -> LostAgreement:
        self._core.all_reduce_value(*arguments)
        return LostAgreement()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("by_communicator", [True, False])
def test_an_agreement_that_one_member_loses_ends_the_sum_at_all(
    member: Member, monkeypatch: pytest.MonkeyPatch, place: int, by_communicator: bool
) -> None:
    groups = [member(name) for name in "abc"]
    connect(groups)
    data = torch.ones(N) if by_communicator else torch.ones(N, 2)[:, 0]
    before = [ways(group) for group in groups]
    loser = groups[place]._device_sums
    assert loser is not None
    with monkeypatch.context() as patched:
        patched.setattr(loser, "_core", CoreThatLoses(loser._core))
        futures = at_all(groups, lambda r: groups[r].all_reduce("y", data))
    others = [rank for rank in range(3) if rank != place]
    until(lambda: all(ways(groups[r]) != before[r] for r in others), "the others' agreements")
    assert futures[place].cancel()
    for future in futures:
        with pytest.raises(moolink.CancelledError):
            future.result(TIMEOUT)
    assert all((total == 6).all() for total in sums(groups))


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_time_limits_are_those_of_other_operations(member: Member, limit: float) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    future = groups[0].all_reduce("x", torch.ones(N))
    with pytest.raises(ValueError, match="not negative"):
        future.result(limit)


def test_an_unusable_target_is_refused_before_anything_is_sent(member: Member) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    fixed = np.ones(N, np.float32)
    fixed.flags.writeable = False
    memory = torch.ones(2 * N)
    with pytest.raises(ValueError, match="cannot be written"):
        groups[0].all_reduce("x", fixed, inplace=True)
    with pytest.raises(ValueError, match="overlap"):
        groups[0].all_reduce("x", memory[:N], out=memory[N // 2 :][:N])
    assert all((total == 3).all() for total in sums(groups))


@pytest.mark.parametrize("place", [0, 1])
def test_a_member_that_closes_ends_the_sum_of_the_others(
    member: Member, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """The others do not call `update()`: they wait for the sum."""
    held = Held()
    groups = [member("a", held), member("b", held)]
    connect(groups)
    futures = start_held(groups, held)
    groups[place].close()
    with pytest.raises(moolink.Closed):
        futures[place].result(TIMEOUT)
    with pytest.raises(moolink.GroupChanged):
        futures[1 - place].result(TIMEOUT)
    held.goes_on.set()
    assert not [line for line in caplog.messages if "use the host" in line]


def test_a_peer_that_closes_ends_sums_that_the_others_have_not_begun(member: Member) -> None:
    groups = [member("a"), member("b")]
    connect(groups)
    future = groups[0].all_reduce("x", torch.ones(N))
    groups[0].rpc.close()
    with pytest.raises(moolink.Closed):
        future.result(TIMEOUT)


def test_closing_while_rank_0_decides_leaves_no_communicator(member: Member) -> None:
    slow = Slow()
    before = of_communicators()
    groups = [member("a", slow), member("b")]
    formed(groups)
    future = start_undecided(groups, slow)
    groups[1].close()
    slow.answers.set()
    assert isinstance(future.exception(TIMEOUT), moolink.Closed)
    until(lambda: of_communicators() <= before, "the communicator's threads to end")


def test_an_update_while_rank_0_decides_starts_nothing_in_the_new_epoch(member: Member) -> None:
    slow = Slow()
    groups = [member("a", slow), member("b")]
    formed(groups)
    future = start_undecided(groups, slow)
    groups.append(member("c"))
    formed(groups)
    slow.answers.set()
    assert isinstance(future.exception(TIMEOUT), moolink.GroupChanged)
    for group in groups:
        group.set_timeout(2.0)
    assert all((total == 6).all() for total in sums(groups))


def test_a_member_tries_again_after_its_communicator_could_not_be_made(member: Member) -> None:
    class Missing(Gloo):
        def device_of(self, data: Any) -> torch.device:
            if not missed:
                missed.append(data)
                raise RuntimeError("there is no device")
            return super().device_of(data)

    missed: list[Any] = []
    groups = [member("a"), member("b", Missing())]
    formed(groups)
    with pytest.raises(RuntimeError, match="no device"):
        groups[1].all_reduce("x", torch.ones(N))
    connect(groups)


def test_an_operation_agreed_in_one_epoch_does_not_begin_in_the_next(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unconnected(Gloo):
        def make(self, *arguments: Any) -> Any:
            raise RuntimeError("there is no network")

    groups = [member("a"), member("b", Unconnected())]
    formed(groups)
    device_sums = groups[1]._device_sums
    assert device_sums is not None
    agreed, held, arrived = device_sums._agreed, list[Any](), threading.Event()
    monkeypatch.setattr(device_sums, "_agreed", lambda *given: (held.extend(given), arrived.set()))
    futures = at_all(groups, lambda r: groups[r].all_reduce("x", torch.ones(N)))
    assert arrived.wait(TIMEOUT)
    groups.append(member("c"))
    formed(groups)
    agreed(*held)
    for future in futures:
        with pytest.raises(moolink.GroupChanged):
            future.result(TIMEOUT)


def test_a_group_that_is_dropped_leaves(member: Member, broker_address: str) -> None:
    before = of_communicators()
    one = member("a")
    with moolink.Rpc("b") as rpc:
        rpc.connect(broker_address)
        group = moolink.Group(rpc, "group")
        group._device_sums = DeviceSums(group, Gloo(), least=4 * N)
        connect([one, group])
        dropped = weakref.ref(group)
        del group
        until(lambda: dropped() is None, "the group to end")
        until(lambda: one.update() and one.members() == ["a"], "one member")
        until(lambda: of_communicators() <= before, "the communicators' threads to end")


def test_a_forked_child_leaves_the_parents_communicator_alone(member: Member) -> None:
    backends = [Gloo(), Gloo()]
    groups = [member(name, backend) for name, backend in zip("ab", backends, strict=True)]
    connect(groups)
    child = os.fork()
    if child == 0:
        groups[0].close()
        os._exit(int(backends[0].aborted.is_set()))
    assert os.waitpid(child, 0)[1] == 0
    assert all((total == 3).all() for total in sums(groups))


JOINS = """
import sys
import moolink.group.group as group

def join(rpc, name):
    print("moolink.torch.device_sums" in sys.modules)
    raise SystemExit

group.GroupCore = join
with group.Rpc("peer") as rpc:
    group.Group(rpc, "group")
"""


def test_torch_is_imported_before_a_member_can_be_asked() -> None:
    run = subprocess.run(
        [sys.executable, "-c", JOINS],
        cwd=ROOT,
        env=os.environ | {"MOOLINK_NCCL": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "True\n"


EXITS = """
import datetime, sys, threading, time
import torch
import moolink
from moolink.errors import Error
from moolink.torch.communicators import Communicator, GroupStore
from tests.group.gloo import Gloo

begun = threading.Event()

class InTorch(Gloo):
    def make(self, *arguments):
        return None

    def sum(self, *arguments):
        begun.set()
        try:  # without the GIL
            torch.distributed.HashStore().wait(["never"], datetime.timedelta(seconds=0.5))
        except torch.distributed.DistStoreError:
            raise Error("the sum ended") from None

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # the interpreter has ended by now, and the process has not

sys.stays_until_the_end = LongEnd()
communicator = Communicator(InTorch(), GroupStore(print), 0, 2, torch.device("cpu"))
communicator.sum(torch.ones(1), None, 1)
begun.wait()
"""


def test_an_exit_during_a_sum_does_not_abort_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", EXITS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
