"""Destructors and collections of garbage that come while the library is at work."""

from __future__ import annotations

import gc
import pathlib
import re
import threading
import weakref

import pytest

import moolink
from moolink._core import Lock
from tests.processes import start_python
from tests.rpc import destructors
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [kind.__name__ for kind in destructors.KINDS])
def test_garbage_may_call_the_library(kind: str, threads: int) -> None:
    process = start_python("-m", "tests.rpc.destructors", kind, threads)
    try:
        output, errors = process.communicate(timeout=PROCESS_LIMIT)
    finally:
        process.kill()
    assert output == "done\n", errors[-4000:]
    assert "Traceback" not in errors, errors[-4000:]


class _Cycle:
    def __init__(self) -> None:
        self.me = self


# These make threads wait for one another, or mark something as in use: no code runs under them.
NO_SECTIONS = {"rpc/queue.py", "inference/client.py"}


def test_the_packages_locks_are_the_librarys() -> None:
    package = pathlib.Path(moolink.__file__).parent
    others = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"threading\.(Lock|RLock|Condition)\(\)", path.read_text())
    }
    assert others == NO_SECTIONS


def test_a_thread_that_holds_a_lock_collects_nothing() -> None:
    lock, other = Lock(), Lock()
    with lock, other:
        gone = weakref.ref(_Cycle())
        gc.collect()
        assert gone() is not None
    assert gc.get_freeze_count() < 5000  # Python 3.12 has frozen some
    gc.collect()
    assert gone() is None
    with lock:
        gone = weakref.ref(_Cycle())
        gc.collect()
        assert gone() is not None


def test_collections_that_are_put_off_are_made_up_for() -> None:
    lock = Lock()
    with lock:
        gone = weakref.ref(_Cycle())  # without the lock, the collector may run
        for _ in range(100):
            gc.collect(0)
        assert gone() is not None
    assert gone() is None


def test_collections_without_a_lock_do_not_hide_those_put_off() -> None:
    """A collection that is put off moves garbage to the oldest generation, which a collection of a
    younger one does not look at."""
    lock = Lock()
    with lock:
        gone = weakref.ref(_Cycle())
        gc.collect(0)
    for _ in range(100):
        with lock:
            gc.collect(0)
        gc.collect(0)
    assert gone() is None


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with Lock():
            gc.collect()
        assert gc.get_freeze_count() >= count - 100  # some may have been dropped
    finally:
        gc.unfreeze()


def test_a_lock_is_reentrant_and_held_by_one_thread() -> None:
    lock = Lock()
    assert lock.acquire()
    assert lock.acquire(blocking=False)
    others: list[bool] = []

    def attempt() -> None:
        others.append(lock.acquire(timeout=0.01))
        with pytest.raises(RuntimeError, match="does not hold"):
            lock.release()

    for _ in range(2):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        lock.release()
    assert others == [False, False]
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.release()
    with lock:
        pass


def test_what_is_dropped_later_goes_without_a_lock() -> None:
    lock = Lock()
    held: list[bool] = []

    class Value:
        def __del__(self) -> None:
            held.append(lock._is_owned())

    with lock:
        with lock:
            lock.drop_later(Value())
        assert held == []
    assert held == [False]


def test_an_rpc_that_the_collector_drops_does_not_keep_it_waiting(pair: Pair) -> None:
    """Its close() waits half a second for handlers that run; this one waits for the collection."""
    client, _ = pair

    def attempt(name: str) -> bool:
        begun, collected = threading.Event(), threading.Event()
        rpc = moolink.Rpc(name, timeout=20)

        def wait() -> bool:
            begun.set()
            return collected.wait(20)

        rpc.define("wait", wait)
        client.connect(rpc.listen("127.0.0.1:0")[0])
        call = client.async_(name, "wait")
        assert begun.wait(20)
        cycle = _Cycle()
        cycle.rpc = rpc  # type: ignore[attr-defined]
        del rpc, cycle
        gc.collect()
        collected.set()
        return call.wait(20) and call.exception() is None

    # A machine under load may not run the handler in time.
    assert any(attempt(f"dropped {number}") for number in range(5))


def test_the_exit_waits_for_an_rpc_that_the_collector_dropped(pair: Pair, start: Start) -> None:
    client, _ = pair
    program = """
    import gc, threading
    import moolink

    begun, collected = threading.Event(), threading.Event()

    class Cycle:
        pass

    cycle = Cycle()
    cycle.me, cycle.rpc = cycle, moolink.Rpc("NAME")
    cycle.rpc.define("wait", lambda: (begun.set(), collected.wait(20))[1])
    print(cycle.rpc.listen("127.0.0.1:0")[0], flush=True)
    begun.wait(20)
    del cycle
    gc.collect()
    collected.set()
    """

    def attempt(name: str) -> bool:
        process = start(program.replace("NAME", name))
        assert process.stdout is not None
        client.connect(process.stdout.readline().strip())
        call = client.async_(name, "wait")
        assert process.wait(PROCESS_LIMIT) == 0
        return call.wait(20) and call.exception() is None

    assert any(attempt(f"child {number}") for number in range(5))
