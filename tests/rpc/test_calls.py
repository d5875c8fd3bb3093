"""Calls and handlers, between two peers over each transport."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import moolink
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT, until


def test_values_and_keywords_travel(pair: Pair) -> None:
    client, server = pair
    server.define("join", lambda *args, **kwargs: (args, kwargs))
    assert client.sync("server", "join", 1, "two", [3.0, None], x={"y": b"z"}) == (
        (1, "two", [3.0, None]),
        {"x": {"y": b"z"}},
    )
    assert client.sync("server", "join") == ((), {})


@pytest.mark.parametrize("elements", [0, 1, 1000, 100_000, 5_000_000])
def test_arrays_of_every_size_travel_both_ways(pair: Pair, elements: int) -> None:
    client, server = pair
    server.define("double", lambda x: x * 2)
    x = np.arange(elements, dtype=np.int32)
    result = client.sync("server", "double", x)
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result, x * 2)
    result[:1] = 7  # private and writable
    np.testing.assert_array_equal(client.sync("server", "double", x), x * 2)


def test_arguments_are_captured_at_the_call(pair: Pair) -> None:
    client, server = pair
    server.define("total", lambda x: float(x.sum()))
    x = np.ones(2_000_000, np.float32)
    future = client.async_("server", "total", x)
    x[:] = 5
    assert future.result() == 2_000_000


def test_both_sides_call(pair: Pair) -> None:
    client, server = pair
    server.define("where", lambda: "server")
    client.define("where", lambda: "client")
    assert client.sync("server", "where") == "server"
    assert server.sync("client", "where") == "client"


def test_a_thousand_handlers_wait_for_calls_of_their_own_process_at_once(pair: Pair) -> None:
    client, server = pair
    begun = itertools.count(1)
    opened: list[moolink.rpc.RpcDeferredReturn] = []
    server.define_deferred("gate", opened.append)
    gate = server.async_("server", "gate")  # ends once every handler has begun

    def relay(i: int) -> int:
        if next(begun) == 1000:
            opened[0](None)
        gate.result()
        return int(server.sync("server", "echo", i))

    server.define("echo", lambda i: i)
    server.define("relay", relay)
    until(lambda: bool(opened), "the gate's call")
    futures = [client.async_("server", "relay", i) for i in range(1000)]
    assert client.sync("server", "echo", "well") == "well"
    assert [future.result() for future in futures] == list(range(1000))


def test_calls_nest_a_thousand_deep(pair: Pair) -> None:
    client, server = pair
    client.define("down", lambda n: n and 1 + server.sync("client", "down", n - 1))
    assert server.sync("client", "down", 1000) == 1000


def test_self_calls(pair: Pair) -> None:
    client, _ = pair
    client.define("twice", lambda x: 2 * x)
    assert client.sync("client", "twice", 21) == 42


def test_many_calls_in_flight(pair: Pair) -> None:
    client, server = pair
    server.define("square", lambda x: x * x)
    futures = [client.async_("server", "square", i) for i in range(3000)]
    assert [f.result() for f in futures] == [i * i for i in range(3000)]
    assert server.stats()["calls_received"] == 3000
    assert client.stats()["calls_succeeded"] == 3000


@pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"]])
def test_calls_of_a_thread_start_in_order(start: Start, transports: list[str]) -> None:
    # With one worker: of two handlers that run at once the later one may come to its first
    # statement sooner.
    child = start(
        f"""
        import numpy as np
        import moolink
        moolink.set_max_threads(1)
        with (
            moolink.Rpc("server", transports={transports}) as server,
            moolink.Rpc("client", transports={transports}, timeout=20) as client,
        ):
            client.connect(server.listen("127.0.0.1:0")[0])
            seen = []
            server.define("note", lambda i, _: seen.append(i))
            sizes = [1_000_000 if i % 10 == 0 else 1 for i in range(100)]
            futures = [
                client.async_("server", "note", i, np.zeros(n, np.uint8))
                for i, n in enumerate(sizes)
            ]
            for future in futures:
                future.result()
            print(seen == list(range(100)), seen)
        """
    )
    out, err = child.communicate(timeout=PROCESS_LIMIT)
    assert out.startswith("True"), out + err


def test_callback_gets_result_or_error(pair: Pair) -> None:
    client, server = pair
    server.define("invert", lambda x: 1 / x)
    outcomes: dict[int, tuple[object, BaseException | None]] = {}
    for x in (4, 0):
        client.async_callback("server", "invert", lambda r, e, x=x: outcomes.update({x: (r, e)}), x)
    until(lambda: len(outcomes) == 2, "both callbacks")
    assert outcomes[4] == (0.25, None)
    assert outcomes[0][0] is None
    assert isinstance(outcomes[0][1], moolink.RemoteError)


def test_a_raising_callback_harms_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = pair
    server.define("one", lambda: 1)
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: unraisable.append(args.exc_value))

    def bad(result: object, error: object) -> None:
        raise KeyError("callback")

    client.async_callback("server", "one", bad)
    until(lambda: len(unraisable) == 1, "the hook")
    assert isinstance(unraisable[0], KeyError)
    assert client.sync("server", "one") == 1


# --- errors


def test_what_a_handler_raises_is_raised_at_the_caller(pair: Pair) -> None:
    client, server = pair

    def fail(x: int) -> None:
        raise LookupError(f"no such thing: {x}")

    server.define("fail", fail)
    with pytest.raises(moolink.RemoteError, match="no such thing: 7") as caught:
        client.sync("server", "fail", 7)
    assert caught.value.remote_type == "LookupError"
    assert caught.value.function == "fail"
    assert caught.value.ran == "yes"
    assert "in fail" in caught.value.remote_traceback
    assert "in fail" in str(caught.value)


@pytest.mark.parametrize("arguments", [(), (1, 2, 3)])
def test_wrong_arguments_harm_nobody(pair: Pair, arguments: tuple[int, ...]) -> None:
    client, server = pair
    server.define("half", lambda x: x / 2)
    with pytest.raises(moolink.RemoteError, match="argument") as caught:
        client.sync("server", "half", *arguments)
    assert caught.value.remote_type == "TypeError"
    assert client.sync("server", "half", 4) == 2


def test_a_result_that_cannot_travel_is_an_error_of_the_call(pair: Pair) -> None:
    client, server = pair
    server.define("lock", threading.Lock)
    with pytest.raises(moolink.RemoteError, match="lock"):
        client.sync("server", "lock")
    server.define("loop", lambda: (x := [], x.append(x), x)[2])
    with pytest.raises(moolink.RemoteError):
        client.sync("server", "loop")


def test_an_argument_that_cannot_travel_raises_at_the_call(pair: Pair) -> None:
    client, _ = pair
    with pytest.raises(TypeError):
        client.async_("server", "f", threading.Lock())


def test_exit_in_a_handler_ends_the_call_only(pair: Pair) -> None:
    client, server = pair
    server.define("leave", lambda: exit(3))
    with pytest.raises(moolink.RemoteError) as caught:
        client.sync("server", "leave")
    assert caught.value.remote_type == "SystemExit"


def test_a_slow_handler_times_out(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("slow", lambda: release.wait(20))
    client.set_timeout(0.2)
    assert client.get_timeout() == 0.2
    with pytest.raises(moolink.TimeoutError, match="slow"):
        client.sync("server", "slow")
    release.set()
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError):
            client.set_timeout(wrong)


def test_a_call_with_a_time_limit_of_its_own(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("slow", lambda **options: release.wait(20) and options)
    client.set_timeout(0.05)
    unlimited = client.within(None).async_("server", "slow", timeout=2)
    with pytest.raises(moolink.TimeoutError):
        client.sync("server", "slow")
    client.set_timeout(100)
    calls = client.within(0.05)
    with pytest.raises(moolink.TimeoutError):
        calls.sync("server", "slow")
    with pytest.raises(moolink.TimeoutError):
        calls.async_many(["server"], "slow")["server"].result()
    assert repr(calls) == f"<moolink.rpc.TimedCalls of {client!r}: 0.05 s>"
    assert not unlimited.done()
    release.set()
    own: dict[str, Any] = {"self": 1, "seconds": 2, "peer": 3, "function": 4, "peers": 5}
    calls = client.within(10)
    assert calls.sync("server", "slow", **own) == own
    assert calls.async_("server", "slow", **own).result() == own
    assert calls.async_many(["server"], "slow", **own)["server"].result() == own
    assert unlimited.result() == {"timeout": 2}  # the handler's own


@pytest.mark.parametrize("wrong", [-1, float("nan"), "2", ()])
def test_a_time_limit_of_calls_is_a_number_of_seconds(pair: Pair, wrong: object) -> None:
    with pytest.raises(ValueError, match="a time limit must be a number of seconds"):
        pair[0].within(wrong)  # type: ignore[arg-type]


# --- deferred replies


def test_deferred_replies_from_other_threads(pair: Pair) -> None:
    client, server = pair
    waiting: list[tuple[moolink.rpc.RpcDeferredReturn, int]] = []
    server.define_deferred("later", lambda deferred, x: waiting.append((deferred, x)))
    futures = [client.async_("server", "later", i) for i in range(3)]
    until(lambda: len(waiting) == 3, "the calls")
    assert not any(f.done() for f in futures)

    def reply() -> None:
        for deferred, x in reversed(waiting):
            if x == 1:
                deferred.error(ValueError("not one"))
            else:
                deferred(x * 10)

    thread = threading.Thread(target=reply)
    thread.start()
    thread.join()
    assert futures[0].result() == 0
    assert futures[2].result() == 20
    with pytest.raises(moolink.RemoteError, match="not one") as caught:
        futures[1].result()
    assert caught.value.remote_type == "ValueError"
    with pytest.raises(moolink.Error, match="already"):
        waiting[0][0](1)
    with pytest.raises(moolink.Error, match="already"):
        waiting[1][0].error(ValueError())


def test_a_dropped_deferred_is_an_error_at_once(pair: Pair) -> None:
    client, server = pair
    server.define_deferred("drop", lambda deferred: None)
    with pytest.raises(moolink.RemoteError, match="without a reply"):
        client.sync("server", "drop")


def test_a_deferred_handler_that_raises(pair: Pair) -> None:
    client, server = pair

    def fail(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        raise OSError("disk")

    server.define_deferred("fail", fail)
    with pytest.raises(moolink.RemoteError, match="disk"):
        client.sync("server", "fail")


# --- handlers that block


def test_blocking_calls_inside_of_handlers_do_not_deadlock(pair: Pair) -> None:
    client, server = pair

    def down(depth: int) -> int:
        return 0 if depth == 0 else 1 + client.sync("server", "up", depth - 1)

    def up(depth: int) -> int:
        return 0 if depth == 0 else 1 + server.sync("client", "down", depth - 1)

    client.define("down", down)
    server.define("up", up)
    assert client.sync("server", "up", 40) == 40


def test_a_blocked_handler_does_not_block_others(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("wait", lambda: release.wait(20))
    server.define("release", release.set)
    waiting = client.async_("server", "wait")
    client.sync("server", "release")
    assert waiting.result() is True


# --- the end of a definition


def test_undefine_waits_for_running_calls(pair: Pair) -> None:
    client, server = pair
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        release.wait(20)
        time.sleep(0.01)  # Between the release and the return, undefine must still wait.
        ended.set()
        return "done"

    server.define("slow", slow)
    future = client.async_("server", "slow")
    assert started.wait(20)
    threading.Timer(0.05, release.set).start()
    server.undefine("slow")
    assert ended.is_set()
    assert future.result() == "done"
    with pytest.raises(moolink.NoSuchFunction):
        client.sync("server", "slow")
    with pytest.raises(ValueError, match="not defined"):
        server.undefine("slow")


def test_a_handler_may_undefine_itself(pair: Pair) -> None:
    client, server = pair
    server.define("once", lambda: server.undefine("once"))
    assert client.sync("server", "once") is None
    with pytest.raises(moolink.NoSuchFunction):
        client.sync("server", "once")


def test_undefine_in_another_functions_handler_waits_for_running_calls(pair: Pair) -> None:
    client, server = pair
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        release.wait(20)
        time.sleep(0.01)  # Between the release and the return, undefine must still wait.
        ended.set()

    def withdraw() -> bool:
        threading.Timer(0.05, release.set).start()
        server.undefine("slow")
        return ended.is_set()

    server.define("slow", slow)
    server.define("withdraw", withdraw)
    future = client.async_("server", "slow")
    assert started.wait(20)
    assert client.sync("server", "withdraw")
    future.result()


# --- ends


def test_use_after_close(pair: Pair) -> None:
    client, _ = pair
    client.close()
    client.close()
    for use in (
        lambda: client.async_("server", "f"),
        lambda: client.define("f", print),
        lambda: client.listen("127.0.0.1:0"),
    ):
        with pytest.raises(moolink.Closed):
            use()


def test_close_fails_pending_calls_and_flushes_replies(pair: Pair) -> None:
    client, server = pair
    started, release = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        release.wait(20)
        return "flushed"

    server.define("slow", slow)
    future = client.async_("server", "slow")
    assert started.wait(20)
    pending = server.async_("nobody", "f")
    threading.Timer(0.05, release.set).start()
    server.close()
    with pytest.raises(moolink.Closed):
        pending.result()
    assert future.result() == "flushed"


def test_a_peer_that_its_handlers_refer_to_is_collected() -> None:
    class Holder:
        def __init__(self) -> None:
            self.rpc = moolink.Rpc()
            self.rpc.define("f", self.f)

        def f(self) -> None: ...

    holder = Holder()
    seen = weakref.ref(holder)
    del holder
    gc.collect()
    assert seen() is None


def test_a_call_whose_time_was_up_before_its_handler_ran_is_timed_out(pair: Pair) -> None:
    client, server = pair
    server.define("size", len)
    array = np.ones(1 << 20, np.uint8)
    client.sync("server", "size", array)
    client.set_timeout(0.001)
    for _ in range(15):
        for future in [client.async_("server", "size", array) for _ in range(40)]:
            error = future.wait(20) and future.exception()
            assert error is None or isinstance(error, moolink.TimeoutError)


def test_names_that_are_no_text_are_named(pair: Pair) -> None:
    client, _ = pair
    wrong: Any = 3
    for call in (client.sync, client.async_, client.stream):
        with pytest.raises(TypeError, match="function must be a str, got 3"):
            call("server", wrong)
        with pytest.raises(TypeError, match="peer must be a str, got 3"):
            call(wrong, "f")
    with pytest.raises(TypeError, match="function must be a str, got 3"):
        client.async_callback("server", wrong, print)
    for define in (client.define, client.define_deferred):
        with pytest.raises(TypeError, match="name must be a str, got 3"):
            define(wrong, print)
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        client.define_queue(wrong)
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        client.undefine(wrong)
