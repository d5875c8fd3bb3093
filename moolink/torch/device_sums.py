"""Sums of large tensors on devices by the communicator of the group's epoch.

docs/design/device.md describes the protocol.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from moolink._core import Future, LentSlot, Lock, RpcDeferredReturn
from moolink.accumulate.owned_functions import define_owned
from moolink.data.trees import flatten
from moolink.errors import CancelledError, Closed, Error, GroupChanged, NoSuchFunction
from moolink.group import Group
from moolink.group.collectives import Collective, GroupFuture
from moolink.internal import forks, logs
from moolink.internal.countdown import after_all
from moolink.internal.exceptions import copied
from moolink.torch.communicators import Backend, Communicator, GroupStore, Values
from moolink.torch.epochs import Epoch, Operation, View, over

LEAST = 4 << 20  # bytes of a tensor that is worth the messages of an agreement
DTYPES = ("float32", "float64")  # moolink sums the narrower ones in float32
KEPT = 4  # views whose decisions and values the member of rank 0 keeps
_LOOK_EVERY = 0.1  # seconds between looks for a new view, while rank 0 decides

# How a member's part of a sum ended; the greatest counts for all.
COMPLETE, FAILED, CANCELLED = 0, 1, 2

T = TypeVar("T")


class DeviceSums:
    """A group's sums of large tensors on devices.

    Attributes:
        by_communicator, by_group: the number of sums that the members agreed to compute by the
            communicator, and by the group's own operation.
    """

    def __init__(self, group: Group, backend: Backend, least: int = LEAST) -> None:
        # No reference to the group: it must end, and this with it, when the user drops it.
        self._group, self._core, self._rpc = group.name(), group._core, group.rpc
        self._backend, self._least = backend, least
        self._forked()
        self._decisions: dict[View, concurrent.futures.Future[bool]] = {}
        self._values: dict[View, Values] = {}
        self.by_communicator = self.by_group = 0
        forks.changes_in_children(self)
        self._function, self._undefine = define_owned(
            group, "sums", (self._group,), weakref.WeakMethod(self._asked)
        )

    def _forked(self) -> None:
        self._lock = Lock()
        self._epoch: Epoch | None = None  # a child must not use the parent's communicator

    def all_reduce(
        self, name: str, data: Any, op: str, inplace: bool, out: Any
    ) -> GroupFuture | None:
        """Like `Group.all_reduce`. All members must call this method for the same operations.

        Returns:
            None if no member uses a communicator for this operation; nothing was started.
        """
        if op not in ("sum", "mean") or isinstance(data, (dict, list, tuple)):
            return None
        if inplace and out is not None:  # the group's own operation raises the error
            return None
        place = data if inplace else out
        if getattr(data, "nbytes", self._least) < self._least:
            return None
        leaf = flatten(data, read=False)[0][0]
        if leaf.dtype not in DTYPES or leaf.array.nbytes < self._least:
            return None
        Collective(self._core, "all_reduce", name, 0, 0, out=place).targets(
            data, [leaf], [leaf.array.shape]
        )
        epoch = self._view_shown()
        communicator = None if epoch is None else self._communicator(epoch, data)
        if epoch is None or communicator is None:
            return None
        tensors = [data] if place is None else [data, place]
        suits = all(_suits(tensor, communicator.device) for tensor in tensors)
        mark = self._backend.mark(data) if suits else None
        part = epoch.rank, next(epoch.parts)
        mine = {
            "ready": suits and epoch.is_ready(),
            "what": f"{op} {leaf.dtype} {leaf.array.shape}",
            "parts": [part],
        }
        with self._lock:  # excludes update()
            if self._core.epoch() != epoch.number:  # another thread has called update()
                raise over(epoch)
            agreement = self._core.all_reduce_value(name, mine, epoch.combine(), False)
        operation = Operation(name, data, op, place, mark, part, agreement)
        agreement.add_done_callback(lambda ended: self._agreed(epoch, operation, ended))
        return GroupFuture([operation.promise], lambda results: results[0])  # type: ignore[list-item]

    def update(self) -> bool:
        """Takes over the newest view, as the core does."""
        with self._lock:
            changed = self._core.update()
        self._view_shown()
        return changed

    def _view_shown(self) -> Epoch | None:
        """Takes over the view that the user knows. Ends the communicator of the view before."""
        with self._lock:
            view = self._core.epoch(), tuple(self._core.members())
            if self._epoch is not None and self._epoch.view == view:
                return self._epoch
            before, rank = self._epoch, self._core.rank()
            has_others = len(view[1]) > 1
            epoch = self._epoch = Epoch(view, rank) if rank is not None and has_others else None
        if before is not None:
            before.end()
        return epoch

    def close(self) -> None:
        self._end_epoch()
        self._undefine()

    def __del__(self) -> None:  # of a group that was not closed
        self._end_epoch()

    def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end()

    # The member of rank 0 decides whether an epoch has a communicator.

    def _communicator(self, epoch: Epoch, data: Any) -> Communicator | None:
        """The epoch's communicator, which may not be ready yet. The first data gives its device."""
        with epoch.deciding:
            if epoch.uses_communicator is None:
                try:
                    decision = self._await_decision(epoch)
                except NoSuchFunction:
                    decision = False
                except Error as error:
                    raise over(epoch) from error
                if decision:
                    self._connect(epoch, data)
                epoch.uses_communicator = decision
        return epoch.communicator

    def _await_decision(self, epoch: Epoch) -> bool:
        answer = self._ask(epoch, "decide")

        def decided() -> bool:
            if epoch.rank:
                return bool(answer.wait(_LOOK_EVERY))
            return bool(concurrent.futures.wait([answer], _LOOK_EVERY).done)

        with LentSlot():
            # A call to a member that has died does not fail at once: it searches for another peer
            # of its name.
            while not decided():
                with self._lock:  # excludes update()
                    is_over = self._core.epoch() != epoch.number or self._core.is_outdated()
                if is_over:
                    answer.cancel()
                    raise over(epoch)
        return bool(answer.result())

    def _connect(self, epoch: Epoch, data: Any) -> None:
        mine = weakref.proxy(self)  # the communicator's thread must not keep this object
        store = GroupStore(lambda *asked: mine._ask(epoch, *asked))
        device = self._backend.device_of(data)
        size = len(epoch.members)
        epoch.begin(Communicator(self._backend, store, epoch.rank, size, device))

    def _call(self, member: str, *arguments: Any) -> Future:
        return self._rpc.async_(self._core.name_for_calls(member), self._function, *arguments)

    def _ask(self, epoch: Epoch, what: str, *arguments: Any) -> Any:
        """Sends a request to rank 0. Returns the future of the answer."""
        if epoch.rank:
            number, members = epoch.view
            return self._call(members[0], what, number, list(members), *arguments)
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def reply(value: Any) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                answer.set_result(value)

        self._serve(reply, what, epoch.view, *arguments)
        return answer

    def _asked(
        self,
        deferred: RpcDeferredReturn,
        what: str,
        number: int = 0,
        members: Any = (),
        *arguments: Any,
    ) -> None:
        self._serve(deferred, what, (number, tuple(members)), *arguments)

    def _serve(self, reply: Callable[[Any], object], what: str, view: View, *given: Any) -> None:
        if what == "capable":
            reply(self._backend.available())
        elif what == "failed":
            self._fail(view, Error("the communicator failed at another member"))
            reply(None)
        elif what == "lost":
            epoch = self._epoch
            if epoch is not None and epoch.view == view:
                epoch.lose((given[0], given[1]))
            reply(None)
        elif what == "decide":
            self._decision(view).add_done_callback(lambda decided: reply(decided.result()))
        else:
            self._of(self._values, view, Values)[0].serve(reply, what, *given)

    def _of(self, table: dict[View, T], view: View, make: Callable[[], T]) -> tuple[T, bool]:
        """The entry of a view, and whether it is new."""
        with self._lock:
            is_new = view not in table
            if is_new:
                table[view] = make()
                if len(table) > KEPT:
                    del table[next(iter(table))]
            return table[view], is_new

    def _decision(self, view: View) -> concurrent.futures.Future[bool]:
        decision, is_new = self._of(self._decisions, view, concurrent.futures.Future[bool])
        if is_new:
            others = view[1][1:]
            answers = [self._call(peer, "capable") for peer in others]

            def decide() -> None:
                able = all(a.exception() is None and a.result() is True for a in answers)
                decision.set_result(able and self._backend.available())

            one_less = after_all(len(answers), decide)
            for answer in answers:
                answer.add_done_callback(lambda _: one_less())
        return decision

    # Operations. Agreements end on workers; the epoch's thread takes turns on the communicator.

    def _agreed(self, epoch: Epoch, operation: Operation, agreement: Future) -> None:
        promise = operation.promise
        try:
            agreed = agreement.result()
        except Error as error:
            promise.outcome.set_exception(copied(error))
            # The others may have agreed, and wait for this member.
            self._fail(epoch.view, error, tell=True)
            if not _ends_with_epoch(error):
                self._tell_others(epoch, "lost", *operation.part)
            return
        operation.number = agreed.get("number", 0)
        operation.parts = frozenset((rank, part) for rank, part in agreed.get("parts", ()))
        parts = operation.parts  # a callback with the operation would keep its memory
        promise.outcome.add_done_callback(lambda _: epoch.ended(parts))
        try:
            if agreed.get("turn"):
                self.by_communicator += 1
                by_communicator = partial(self._by_communicator, epoch, operation)
                epoch.take_turn(agreed["turn"], partial(self._finish, operation, by_communicator))
            else:
                self.by_group += 1
                self._by_group(epoch, operation).add_done_callback(
                    lambda ended: self._finish(operation, ended.result)
                )
        except Exception as error:  # noqa: BLE001  result() raises it
            promise.outcome.set_exception(copied(error))

    def _finish(self, operation: Operation, compute: Callable[[], Any]) -> None:
        try:
            result = compute()
        except Exception as error:  # noqa: BLE001  result() raises it
            operation.promise.outcome.set_exception(copied(error))
        else:
            operation.promise.outcome.set_result(result)

    def _by_communicator(self, epoch: Epoch, operation: Operation) -> Any:
        """Either all members get this sum, or none does and all start the group's own operation."""
        communicator = epoch.communicator
        assert communicator is not None
        divisor = len(epoch.members) if operation.op == "mean" else 1
        total = None
        others, tell = self._others(epoch, operation)
        epoch.can_be_lost(operation.parts, others.cancel)
        running = communicator.sum(operation.data.detach(), operation.mark, divisor)
        # If a member dies meanwhile, `others` fails, and this aborts the sum here.
        others.add_done_callback(lambda ended: self._others_ended(epoch, ended))
        if (error := running.exception()) is None:
            total = running.result()
        elif not communicator.broken:
            self._fail(epoch.view, error, tell=True)
        cancelled = operation.promise.begin_last_step()
        end = tell(CANCELLED if cancelled else FAILED if total is None else COMPLETE)
        if end == CANCELLED:
            raise CancelledError(f"the sum '{operation.name}' was cancelled")
        if end == FAILED or total is None:
            return self._by_group(epoch, operation).result()
        return self._placed(operation, total)

    def _others_ended(self, epoch: Epoch, ended: Future) -> None:
        if (error := ended.exception()) is not None:
            self._fail(epoch.view, error)

    def _others(self, epoch: Epoch, operation: Operation) -> tuple[Future, Callable[[int], int]]:
        """Returns a future that ends no earlier than the others' sums, and a function. The function
        reports how this member's part ended, and returns how the sum ended for all members."""
        ends, end = (f"{self._name(epoch, operation)}: {what}" for what in ("ends", "end"))
        if epoch.rank == 0:
            gathered = self._start(epoch, ends, "gather", np.zeros(1, np.uint8))

            def tell(mine: int) -> int:
                greatest = max(mine, *gathered.result().tolist())
                self._start(epoch, end, "broadcast", np.array([greatest], np.uint8))
                return int(greatest)

            return gathered, tell
        awaited = self._start(epoch, end, "broadcast", np.empty(0, np.uint8))

        def tell_root(mine: int) -> int:
            self._start(epoch, ends, "gather", np.array([mine], np.uint8))
            return int(awaited.result()[0])

        return awaited, tell_root

    def _name(self, epoch: Epoch, operation: Operation) -> str:
        return f"{operation.name} (sum {operation.number} of membership {epoch.number})"

    def _start(self, epoch: Epoch, name: str, kind: str, array: Any) -> Future:
        future = self._core.collective(
            name, kind, 0, "sum", "uint8", "a sum by a communicator", 1, array, None, False
        )
        self._require(epoch, future)
        return future

    def _require(self, epoch: Epoch, future: Future | GroupFuture) -> None:
        """Cancels an operation that has begun in another epoch than `epoch`, and raises
        GroupChanged."""
        if self._core.epoch() != epoch.number:
            future.cancel()
            raise over(epoch)

    def _by_group(self, epoch: Epoch, operation: Operation) -> GroupFuture:
        if operation.mark is not None:
            self._backend.wait(operation.mark)
        collective = Collective(
            self._core,
            "all_reduce",
            self._name(epoch, operation),
            len(epoch.members),
            epoch.rank,
            operation.op,
            out=operation.place,
        )
        future = collective.begin(operation.data)
        self._require(epoch, future)
        if operation.promise.begin_last_step(future.cancel):
            future.cancel()
        epoch.can_be_lost(operation.parts, future.cancel)
        return future

    def _placed(self, operation: Operation, total: torch.Tensor) -> Any:
        if operation.place is None:
            return total
        # Autograd refuses to write a tensor of inference mode in another mode.
        with torch.inference_mode(operation.place.is_inference()), torch.no_grad():
            operation.place.copy_(total)
            self._backend.wait(self._backend.mark(operation.place))
        return operation.place

    def _fail(self, view: View, error: BaseException, tell: bool = False) -> None:
        """Aborts the communicator here and, if `tell`, at the others."""
        epoch = self._epoch
        if epoch is None or epoch.view != view or epoch.communicator is None:
            return
        if not epoch.communicator.broken and not _ends_with_epoch(error):
            logs.logger.warning(
                "group %r: sums of large tensors use the host until membership %d changes: %s",
                self._group,
                epoch.number,
                error,
            )
        epoch.abort(error)
        if tell and not _ends_with_epoch(error):
            self._tell_others(epoch, "failed")

    def _tell_others(self, epoch: Epoch, what: str, *arguments: Any) -> None:
        number, members = epoch.view
        for rank, peer in enumerate(members):
            if rank != epoch.rank:
                self._call(peer, what, number, list(members), *arguments)


def _ends_with_epoch(error: BaseException) -> bool:
    return isinstance(error, (GroupChanged, Closed))


def _suits(tensor: Any, device: torch.device) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )
