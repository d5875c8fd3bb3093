"""The leader's parameters, for members that cannot compute them to the last bit themselves.

Two frameworks' optimisers differ in the last bit, so a member whose framework is not the leader's
takes the leader's parameters over after the rounds that it applies. It asks for those of a version
and the leader answers when it has them. A member that needs none causes no traffic, a slow one
delays no other, and when the leader dies the question goes to the next one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from moolink._core import AccumulatorCore, Future, Lock, RpcDeferredReturn
from moolink.accumulate.owned_functions import define_owned
from moolink.errors import Error
from moolink.group import Group
from moolink.internal import forks, logs

# Versions without a question after which the leader keeps no copy ready any more.
IDLE_VERSIONS = 16

POLL_INTERVAL = 0.02  # seconds between checks of the group while waiting for the leader's answer
_LONGEST_NAME = 1024  # characters of a peer's name
NOT_ANY_MORE = None  # in place of parameters: the leader is past that version, or leads no more


class ParameterSync:
    """One member's part: its questions to the leader, and its answers as the leader.

    All methods belong to the accumulator's thread; questions arrive on workers.

    Args:
        framework: in which this member computes.
        every: rounds between two versions that are taken over; 0: none; None: 1 while the leader
            computes in another framework, else 0.
        capture: returns a copy of the parameters, as a list of arrays.
        install: puts such a list, received from the leader, into the model.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        framework: str,
        every: int | None,
        capture: Callable[[], list[Any]],
        install: Callable[[list[Any]], None],
    ) -> None:
        self._rpc = group.rpc
        self._group = group
        self._framework = framework
        self._asked_every = every
        self._capture = capture
        self._install = install
        self.version = 0  # of the parameters, as far as rounds were applied
        self._leader = ""
        self.last_leader = ""  # the last one that there was
        self._leads = False
        self._leader_framework: str | None = None  # not known yet
        self._introduction: Future | None = None
        self._stale = False  # the leader's parameters of this very version may be others
        self._exact = True  # those of this version are the leader's, as far as can be known
        self._wanted: int | None = None
        self._gone = -1  # the version that the leader had no more
        self.is_refused = False  # the leader has ended at this version and does not give it
        self._began_under = ""  # the leader when the round that is being applied was shown
        self._question: tuple[int, Future] | None = None  # for a version
        self._closed = False
        self._lock = Lock()  # of the attributes that workers use:
        self._waiting: dict[str, tuple[int, RpcDeferredReturn]] = {}
        self._record: tuple[int, list[Any]] | None = None
        self._idle_versions = IDLE_VERSIONS
        self._ended: int | None = None  # the version at which this member's loop ended
        forks.changes_in_children(self)
        self._function, self._undefine = define_owned(
            group, "parameters", (group.name(), name), weakref.WeakMethod(self.asked)
        )

    @property
    def takes_over(self) -> bool:
        """Whether this member takes parameters over from a leader of another framework."""
        return self._asked_every != 0

    @property
    def awaits(self) -> bool:
        """Whether the next round must wait for the leader's parameters."""
        return self._wanted is not None

    def awaited(self) -> str:
        """The parameters that this member waits for, in words; "": none."""
        if self._wanted is None:
            return ""
        leader = self._leader or self.last_leader
        return (
            f"the parameters of version {self._wanted} from the leader '{leader}': its loop must "
            "call update() and zero_gradients()"
        )

    def wait(self, timeout: float, core: AccumulatorCore) -> bool:
        """Waits for them; returns whether there is an answer, or news of the group."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            turn = min(left, POLL_INTERVAL)
            if self._question is None:  # it failed, and is asked again by the next look
                time.sleep(turn)
                return True
            # The peer asked may no longer be the leader; only the core learns of that.
            if self._question[1].wait(turn) or core.wait(0.0):
                return True
        return False

    def exact(self) -> bool | None:
        """Whether the parameters ought to have the bits that the leader's of this version have;
        None while the leader's framework is not known."""
        if self._exact and not self._leads and self._leader_framework is None:
            return None
        return self._exact

    def comparable(self) -> bool | None:
        """Whether members whose ``exact`` is true may compare checksums of this version: not if
        another member led when its round was shown: some have taken over that one's parameters."""
        return self.exact() if self._began_under == self._leader else False

    def look(self, leader: str, leads: bool, between_rounds: bool) -> bool:
        """Takes over the leader's name, and the answers that have come.

        Args:
            between_rounds: whether the parameters are those of ``version``.

        Returns:
            Whether parameters of the version that was wanted were installed.
        """
        with self._lock:
            self._ended = None
        if (leader, leads) != (self._leader, self._leads):
            self._follow(leader, leads)
        self._be_introduced()
        if leads:
            if between_rounds:
                self._publish(self.version, ready=False)
            return False
        if self._leader and self._stale and between_rounds and self.version != self._gone:
            self._wanted = self.version
        if self._wanted is None:
            return False
        self._ask(self._wanted)
        return self._take_answer()

    def began(self, version: int) -> None:
        """A round is shown: the parameters that it leads to are asked for now, if they will be."""
        self._began_under = self._leader
        if not self._leads and self._needs(version):
            self._ask(version)

    def applied(self, version: int) -> None:
        """The parameters are of ``version``, as far as this member can compute them."""
        self.version, self.is_refused = version, False
        if self._leads:
            self._publish(version, ready=True)
        elif self._needs(version):
            self._wanted, self._exact = version, False
        elif self._leader_framework not in (None, self._framework):
            self._exact = False

    def received_state(self, version: int) -> None:
        """The whole model came from the leader."""
        self.version = version
        self._stale, self._exact, self._wanted = False, True, None
        self._forget_question()

    def has_last(self) -> bool:
        """Whether the parameters are those that the job ends with, if it ends at this version: the
        leader's, unless ``sync_every`` is 0. If not, the next look asks for them."""
        if not self.takes_over:
            return True
        exact = self.exact()
        if exact is False and not self.awaits:
            self._stale = True  # between two versions that are taken over
        return exact is True and not self.awaits

    def _forked(self) -> None:
        self._lock = Lock()

    def end(self) -> None:
        """This member's loop ends, and with it the looks that answer questions. Until the next look
        a question about a version up to this one is answered at once: with the parameters if a
        copy is ready, else that there are none any more."""
        with self._lock:
            self._ended, record = self.version, self._record
        self._answer_all(lambda version: version <= self.version, record)

    def close(self) -> None:
        """Asks and answers no more."""
        if self._closed:
            return
        self._closed = True
        self._forget_question()
        if self._introduction is not None:
            self._introduction.cancel()
        self._answer_all(lambda version: True, None)
        self._undefine()

    # Following.

    def _every(self) -> int:
        if self._asked_every is not None:
            return self._asked_every
        return int(self._leader_framework not in (None, self._framework))

    def _needs(self, version: int) -> bool:
        every = self._every()
        return self._stale or (every > 0 and version % every == 0)

    def _follow(self, leader: str, leads: bool) -> None:
        # Parameters that this member computed under a leader of another framework, or took over
        # from one unknown to the new leader, may differ from the new leader's.
        self._stale = not leads and (self._stale or self._every() > 0)
        self._exact = leads or (self._exact and not self._stale)
        self._wanted, self._gone, self.is_refused = None, -1, False
        self.last_leader = leader or self.last_leader
        self._forget_question()
        if self._introduction is not None:
            self._introduction.cancel()
        self._introduction = None
        self._leader_framework = self._framework if leads else None
        with self._lock:
            lost_the_lead = self._leads and not leads
            self._leader, self._leads = leader, leads
            self._record, self._idle_versions = None, IDLE_VERSIONS
        if lost_the_lead:
            self._answer_all(lambda version: True, None)

    def _be_introduced(self) -> None:
        """Asks the leader for its framework, and takes the answer."""
        if self._leads or not self._leader or self._leader_framework is not None:
            return
        if self._introduction is None:
            self._introduction = self._call(None)
        if not self._introduction.done():
            return
        introduction, self._introduction = self._introduction, None
        if introduction.exception() is not None:
            return  # it is gone, or its accumulator is not made yet: asked again
        answer = _checked(introduction.result())
        if answer is None:
            return  # no leader that keeps to the protocol: asked again
        self._leader_framework = answer[1]
        if self._every():  # rounds may have been applied since it leads
            self._stale, self._exact = True, False

    def _call(self, version: int | None) -> Future:
        leader = self._group._core.name_for_calls(self._leader)
        return self._rpc.async_(leader, self._function, self._rpc.get_name(), version)

    def _ask(self, version: int) -> None:
        if self._question is None or self._question[0] != version:
            self._forget_question()
            if self._leader:
                self._question = (version, self._call(version))

    def _forget_question(self) -> None:
        if self._question is not None:
            self._question[1].cancel()
        self._question = None

    def _take_answer(self) -> bool:
        if self._question is None or not self._question[1].done():
            return False
        future, self._question = self._question[1], None
        if future.exception() is not None:
            return False  # asked again, or another leader is
        answer = _checked(future.result())
        if answer is None:
            return False
        version, _, arrays = answer
        if arrays is NOT_ANY_MORE:
            # Past it: the rounds that wait here lead to a version that it still has. Or its loop
            # has ended at this one.
            if version >= self.version:
                self._wanted, self._gone = None, self.version
            self.is_refused = version == self.version
            return False
        try:
            self._install(arrays)
        except (TypeError, ValueError) as error:
            raise Error(
                f"the parameters of version {version} that leader '{self._leader}' has sent do not "
                f"fit: {error}"
            ) from error
        self._stale, self._exact, self._wanted = False, True, None
        return True

    # Leading.

    def _publish(self, version: int, ready: bool) -> None:
        """Answers members that wait for this version; keeps it for others, if any asked lately.

        Args:
            ready: whether to make a copy in advance.
        """
        with self._lock:
            asked = any(wanted <= version for wanted, _ in self._waiting.values())
            if ready:
                self._idle_versions = 0 if asked else self._idle_versions + 1
            if self._record is not None and self._record[0] != version:
                self._record = None
            wanted_soon = ready and self._idle_versions < IDLE_VERSIONS
            record = self._record
        if not asked and not wanted_soon:
            return
        if record is None:
            record = (version, self._capture())
            with self._lock:
                self._record, self._idle_versions = record, 0 if asked else self._idle_versions
        self._answer_all(lambda wanted: wanted <= version, record)

    def _answer_all(
        self, which: Callable[[int], bool], record: tuple[int, list[Any]] | None
    ) -> None:
        with self._lock:
            who = [name for name, (version, _) in self._waiting.items() if which(version)]
            answered = [self._waiting.pop(name) for name in who]
        for peer, (version, deferred) in zip(who, answered, strict=True):
            self._reply(deferred, peer, version, record)

    def _reply(
        self,
        deferred: RpcDeferredReturn,
        peer: str,
        version: int,
        record: tuple[int, list[Any]] | None,
    ) -> None:
        newest = record[0] if record is not None else -1 if self._ended is None else self._ended
        arrays = record[1] if record is not None and newest == version else NOT_ANY_MORE
        try:
            deferred((newest, self._framework, arrays))
        except Error as error:
            logs.logger.warning("parameters of version %d could not be sent: %s", version, error)

    def asked(self, deferred: RpcDeferredReturn, peer: str, version: int | None) -> None:
        """A member's question, on a worker."""
        # Kept for the accumulator's thread, which must be able to compare them.
        is_named = type(peer) is str and len(peer) <= _LONGEST_NAME
        if not is_named or not (version is None or type(version) is int):
            raise TypeError("a peer's name and a version are wanted")
        if version is None:
            deferred((-1, self._framework, NOT_ANY_MORE))
            return
        with self._lock:
            self._idle_versions = 0
            record = self._record if self._leads else None
            has_ended = self._ended is not None and version <= self._ended
            if not has_ended and (record is None or record[0] < version):
                # Told when this member is there, or learns that it leads, or does so no more.
                self._waiting[peer] = (version, deferred)
                return
        self._reply(deferred, peer, version, record)


def _checked(answer: Any) -> tuple[int, str, Any] | None:
    """A leader's answer, if it is well-formed."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        return None
    version, framework, arrays = answer
    if type(version) is not int or type(framework) is not str:
        return None
    return version, framework, arrays
