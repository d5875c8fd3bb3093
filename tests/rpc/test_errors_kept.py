"""Errors that are kept and raised again: complete, and without the frames of their readers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

import moolink
from moolink.errors import Closed, Error
from moolink.internal.exceptions import copied


class Strict(Exception):
    """Cannot be made from its arguments."""

    __slots__ = ("extra",)

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code
        self.extra = [code]


class Changing(Exception):
    """Its constructor changes its arguments."""

    def __init__(self, text: str) -> None:
        super().__init__(text + "!")


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        try:
            raise RuntimeError("the context")
        except RuntimeError:
            error.add_note("a note")
            raise error from cause
    except BaseException as caught:  # noqa: BLE001 - such as KeyboardInterrupt
        return caught


def _decode_error() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no start")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text", 1),
        OSError(2, "no such", "/file"),
        _decode_error(),
        KeyboardInterrupt(),
        Strict("text", code=3),
        Changing("text"),
        moolink.RemoteError("text", peer="p", remote_type="T", remote_traceback="trace"),
        moolink.EnvError("text", environments=(1, 2)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_is_whole_and_has_no_traceback(error: BaseException) -> None:
    original = _raised(error, KeyError("the cause"))
    assert original.__traceback__ is not None
    copy = copied(original)
    assert copy is not original
    assert type(copy) is type(original)
    assert (copy.args, str(copy)) == (original.args, str(original))
    assert copy.__dict__ == original.__dict__
    assert copy.__notes__ == ["a note"]
    for name in ("errno", "filename", "object", "reason", "extra"):
        assert getattr(copy, name, None) == getattr(original, name, None)
    assert isinstance(copy.__cause__, KeyError)
    assert isinstance(copy.__context__, RuntimeError)
    assert copy.__suppress_context__
    for one in (copy, copy.__cause__, copy.__context__):
        assert one is not None
        assert one.__traceback__ is None
    assert original.__traceback__ is not None


def test_a_copy_of_a_group_has_copies() -> None:
    parts: list[Exception] = [ValueError("a"), Strict("b", code=1)]
    for part in parts:
        _raised(part)
    group = ExceptionGroup("both", parts)
    _raised(group)
    copy = copied(group)
    assert [type(part) for part in copy.exceptions] == [ValueError, Strict]
    assert all(part.__traceback__ is None for part in copy.exceptions)
    assert (copy.message, copy.__notes__) == ("both", ["a note"])


def test_a_note_of_a_copy_is_its_own() -> None:
    error = _raised(ValueError("text"))
    for _ in range(2):
        copy = copied(error)
        copy.add_note("more")
        assert copy.__notes__ == ["a note", "more"]
    assert error.__notes__ == ["a note"]


def test_a_long_chain_of_errors_is_copied() -> None:
    last: BaseException | None = None
    for number in range(5000):
        error = ValueError(number)
        error.__context__ = last
        last = error
    assert last is not None
    copy: BaseException | None = copied(last)
    for number in reversed(range(5000)):
        assert copy is not None
        assert copy.args == (number,)
        copy = copy.__context__
    assert copy is None


def test_errors_that_refer_to_each_other_are_copied() -> None:
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    copy = copied(a)
    assert copy.__context__ is not None
    assert copy.__context__.__context__ is copy


class Watched:
    """An object that can be watched by a weak reference."""


def _kept(read: Callable[[], object], kind: type[BaseException], times: int = 3) -> object:
    """What keeps the reader's frame, without a collection, after it has read; None: nothing."""

    def frame() -> weakref.ref[Watched]:
        watched = Watched()
        for _ in range(times):
            with pytest.raises(kind):
                read()
        return weakref.ref(watched)

    gc.collect()
    gc.disable()
    try:
        return frame()()
    finally:
        gc.enable()


def test_batches_keep_no_frame() -> None:
    replay = moolink.Replay(moolink.replay.Table("t", 10))
    replay.insert({"x": 1.0})
    batches = replay.batches(1)
    next(batches)
    replay.close()

    def read() -> None:
        for _ in range(10):  # some may have been sampled before
            next(batches)

    assert _kept(read, Closed) is None


def test_moolibs_futures_keep_no_frame() -> None:
    from moolink.compat import moolib

    with moolib.Rpc() as rpc:
        rpc.set_name("a")
        future = rpc.async_("a", "nothing")
        assert _kept(future.result, RuntimeError) is None
        assert _kept(lambda: _throw(future.exception()), RuntimeError) is None


def test_promises_of_sums_keep_no_frame() -> None:
    pytest.importorskip("torch", reason="sums on devices are of torch tensors")
    from moolink.torch.epochs import Promise

    with moolink.Rpc("a") as rpc:
        promise = Promise(rpc.async_("a", "nothing"))
        promise.outcome.set_exception(copied(_raised(Error("failed"))))
        assert _kept(promise.result, Error) is None
        assert _kept(lambda: _throw(promise.exception()), Error) is None

        async def read() -> weakref.ref[Watched]:
            watched = Watched()
            with contextlib.suppress(Error):  # asyncio keeps those of whole tasks
                await promise
            return weakref.ref(watched)

        gc.disable()
        try:
            assert asyncio.run(read())() is None
        finally:
            gc.enable()


def _throw(error: BaseException | None) -> None:
    assert error is not None
    try:
        raise error
    finally:
        del error


def test_a_group_futures_result_cannot_be_part_of_itself() -> None:
    with moolink.Rpc("a") as rpc:
        rpc.define("one", lambda: 1)
        call = rpc.async_("a", "one")
        nested: list[str] = []

        def finish(results: list[object]) -> object:
            with contextlib.suppress(Error):
                future.result()
                nested.append("returned")
            return results[0]

        future = moolink.group.GroupFuture([call], finish)
        thread = threading.Thread(target=future.result)
        thread.start()
        thread.join()
        assert (future.result(), nested) == (1, [])
