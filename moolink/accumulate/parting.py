"""The end of a job: members leave once all have the last round as the leader has it.

Members end at the same round. One of another framework than the leader's still has to take the
leader's parameters over, and any member may still lack the round's result. So a member leaves when
it has both, and the leader, which serves them, when every other member has said that it has.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moolink._core import AccumulatorCore, Future, Lock, RpcDeferredReturn
from moolink.accumulate import run_record
from moolink.accumulate.owned_functions import define_owned
from moolink.errors import Error, NoSuchFunction, StateError
from moolink.group import Group
from moolink.internal import forks, logs

if TYPE_CHECKING:
    from moolink.accumulate import AccumulatorBase

LONGEST = 60.0  # seconds that a leader waits for a member that stays in the group and does not end
_TELL_SECONDS = 1.0  # seconds to tell the members that it does not wait for
_LOOK = 0.05  # seconds between two looks of a leader that waits
_LONGEST_NAME = 1024  # characters of a peer's name


class Parting:
    """One member's messages about its end, and, as the leader, its questions about the others'.

    All methods belong to the accumulator's thread; questions arrive on workers.
    """

    def __init__(self, group: Group, name: str, is_observer: bool) -> None:
        self._group = group
        self._name = name
        self._has_begun = False
        self._lock = Lock()  # of the attributes that workers use:
        self._ended = -1  # the last version at which this member was ready to leave
        self._waiting: dict[str, tuple[int, RpcDeferredReturn]] = {}
        # The leader waits for an observer only if its loop is known to have an end.
        self._has_end = not is_observer
        # The leader that left at a version without this member, and its framework.
        self._left: tuple[int, str, str] | None = None
        self._asked: dict[str, Future] = {}
        forks.changes_in_children(self)
        self._function, self._undefine = define_owned(
            group, "parting", (group.name(), name), weakref.WeakMethod(self._answer)
        )

    def _forked(self) -> None:
        self._lock = Lock()

    def begin(self, core: AccumulatorCore) -> None:
        """Checks once, when this peer first has the group's model, that it does not start a job
        again that has finished.

        Raises:
            moolink.Error: it would; see :mod:`moolink.accumulate.run_record`.
        """
        if self._has_begun or not core.connected():
            return
        if core.is_leader() and core.model_version() == 0:
            run_record.require_unfinished(self._group.name(), self._name)
        self._has_begun = True

    def expect_end(self) -> None:
        """This member's loop ends by itself."""
        with self._lock:
            self._has_end = True

    def ready(self, version: int) -> None:
        """This member needs no more from the others to leave at ``version``."""
        with self._lock:
            self._ended = version
            reached = [name for name, (asked, _) in self._waiting.items() if asked <= version]
            answered = [self._waiting.pop(name)[1] for name in reached]
        _answer_all(answered, True)

    def not_ready(self, version: int) -> list[str]:
        """The other members that are not known to be ready to leave at ``version``; asks them."""
        own = self._group.rpc.get_name()
        others = [name for name in self._group.members() if name != own]
        for name in [name for name in self._asked if name not in others]:
            self._asked.pop(name).cancel()
        return [name for name in others if not self._is_ready(name, version)]

    def _is_ready(self, name: str, version: int) -> bool:
        future = self._asked.get(name)
        if future is None or (future.done() and _came_to_nothing(future)):
            future = self._asked[name] = self._call(name, version)
        return future.done()

    def leave(self, members: list[str], version: int, framework: str) -> None:
        """Tells members that the leader ends at ``version`` and does not wait for them."""
        told = [self._call(name, version, framework) for name in members]
        deadline = time.monotonic() + _TELL_SECONDS
        for future in told:
            future.wait(max(0.0, deadline - time.monotonic()))

    def _call(self, member: str, *arguments: Any) -> Future:
        rpc, receiver = self._group.rpc, self._group._core.name_for_calls(member)
        return rpc.async_(receiver, self._function, rpc.get_name(), *arguments)

    def left_by(self, version: int) -> tuple[str, str] | None:
        """Name and framework of a leader that ended at ``version`` without this member."""
        with self._lock:
            if self._left is None or self._left[0] != version:
                return None
            return self._left[1], self._left[2]

    def forget(self) -> None:
        """Cancels all questions."""
        for future in self._asked.values():
            future.cancel()
        self._asked.clear()

    def close(self) -> None:
        """Answers no more: tells leaders that ask not to wait for this member."""
        self.forget()
        with self._lock:
            answered = [deferred for _, deferred in self._waiting.values()]
            self._waiting.clear()
            self._has_end = False
        _answer_all(answered, False)
        self._undefine()

    def _answer(
        self, deferred: RpcDeferredReturn, peer: str, version: int, left: str | None = None
    ) -> None:
        """A leader's question, or with its framework that it waits no longer, on a worker."""
        if type(peer) is not str or len(peer) > _LONGEST_NAME or type(version) is not int:
            raise TypeError("a peer's name and a version are wanted")
        with self._lock:
            if type(left) is str:
                self._left = (version, peer, left)
            elif self._has_end and self._ended < version:
                self._waiting[peer] = (version, deferred)
                return
            ended = self._ended >= version
        deferred(ended)


def _answer_all(waiting: list[RpcDeferredReturn], answer: bool) -> None:
    for deferred in waiting:
        try:
            deferred(answer)
        except Error as error:
            logs.logger.debug("a leader did not hear of this member's end: %s", error)


def _came_to_nothing(question: Future) -> bool:
    """Whether there is no answer, and may be one yet: not from a member that has no accumulator."""
    error = question.exception()
    return error is not None and not isinstance(error, NoSuchFunction)


def leave_together(
    accumulator: AccumulatorBase,
    state: Callable[[], Any],
    idle: Callable[[], None] | None = None,
) -> bool:
    """See :meth:`moolink.accumulate.AccumulatorBase.finish`. An exception of `idle` ends it."""
    group, parting, sync = accumulator._group, accumulator._parting, accumulator._sync
    version, own = accumulator.model_version(), group.rpc.get_name()
    deadline = time.monotonic() + LONGEST
    has_last = has_leaders = False
    parting.expect_end()
    while True:
        has_last = sync.has_last() or has_last
        has_leaders = has_leaders or (has_last and not accumulator.is_leader())
        leader = sync.last_leader
        group.update()
        take_news(accumulator._update_all_but_rounds)
        if accumulator.has_new_state():
            parting.forget()
            return False
        if accumulator.wants_state():
            accumulator.set_state(state())
        left_by = parting.left_by(version)
        if left_by is not None:
            leader, framework = left_by
            if framework == accumulator.framework:  # it computed the same bits
                has_last = True
            elif sync.takes_over and not has_leaders:
                raise _left_behind(version, leader, accumulator.framework)
        alone = accumulator.is_leader() or group.members() == [own]
        # A member that has followed no leader yet has its own parameters, or all of a leader's
        # state. It may be at its end already: a resumed loop, or a newcomer, while the membership
        # changes.
        if leader and not has_last and (alone or sync.is_refused):
            raise _left_behind(version, leader, accumulator.framework)
        if accumulator.is_leader():
            missing = parting.not_ready(version)
            if missing and time.monotonic() > deadline:
                _log_who_is_left(missing, version)
                parting.leave(missing, version, accumulator.framework)
                missing = []
        else:  # one that led before the members changed will lead again, or another one will
            missing = [own] if not has_last or sync.last_leader in ("", own) else []
        if not missing and accumulator._core.is_everywhere():
            break
        accumulator._await(_awaited(accumulator, [n for n in missing if n != own], has_last))
        accumulator.wait(_LOOK)
        if idle is not None:
            idle()
    accumulator._await("")
    sync.end()
    parting.forget()
    parting.ready(version)
    run_record.note_end(group.name(), accumulator._name, version)
    return True


def _awaited(accumulator: AccumulatorBase, missing: list[str], has_last: bool) -> str:
    version = accumulator.model_version()
    if missing:
        return f"{', '.join(map(repr, missing))} to end the loop at version {version}, too"
    if not has_last:
        return accumulator._sync.awaited() or "the leader to say in which framework it computes"
    return f"round {version}, the last, to reach every member"


def take_news(update: Callable[[], None]) -> None:
    """Calls it, and logs if a state has come that cannot be taken over: another one will come."""
    try:
        update()
    except StateError as error:
        logs.logger.error("%s", error)


def _log_who_is_left(missing: list[str], version: int) -> None:
    logs.logger.warning(
        "%s did not end at version %d within %g s, and may go on without the last parameters: let "
        "all members end by the same condition",
        ", ".join(missing),
        version,
        LONGEST,
    )


def _left_behind(version: int, leader: str, framework: str) -> Error:
    return Error(
        f"leader '{leader}' is gone or has ended its loop, and this peer has not its parameters of "
        f"version {version}, the last: those here were computed by {framework} and may differ from "
        "them in the last "
        f"bits. Take the model from '{leader}' or its checkpoint",
        peer=leader,
    )
