"""The gradient accumulator, as far as it does not depend on a framework.

:class:`AccumulatorBase` is moolib's accumulator: its methods, its loop. The adapters
(:mod:`moolink.torch`) know tensors: they gather gradients into a flat bucket and scatter results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from moolink._core import AccumulatorCore
from moolink.accumulate.adapter import Adapter
from moolink.accumulate.checks import checked_batch_size, checked_counters, require_one_of
from moolink.accumulate.checksums import Checksums
from moolink.accumulate.left_out_rounds import LeftOutRounds
from moolink.accumulate.norms import NormPolicy
from moolink.accumulate.options import Divergence, Nonfinite, Role
from moolink.accumulate.ordered import MOST_UNITS, OrderedCore
from moolink.accumulate.parameter_sync import ParameterSync
from moolink.accumulate.parting import Parting, leave_together
from moolink.accumulate.state_transfer import StateTransfer
from moolink.accumulate.training_steps import (
    LoopOptions,
    Progress,
    TrainingStep,
    Until,
    training_steps,
)
from moolink.group import Group
from moolink.internal import logs
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.metrics import sources
from moolink.metrics.rounds import Rounds
from moolink.metrics.run_log import RunLog
from moolink.rpc import Rpc

if TYPE_CHECKING:
    from moolink.reports import GradientStats


@names_keywords
class AccumulatorBase(Adapter, Closing):
    """Elastic data-parallel training: every member applies the same rounds in the same order.

    A round is the weighted mean of the shortest run of contributions, in the order of their arrival
    at the leader, whose batch sizes sum to the virtual batch size. The loop is moolib's::

        while True:
            accumulator.update()
            if accumulator.wants_state():
                accumulator.set_state({"optimizer": ...})
            if accumulator.has_new_state():
                state = accumulator.state()
            if accumulator.has_gradients():
                ...  # clip, optimizer step
                accumulator.zero_gradients()
            elif accumulator.wants_gradients():
                ...  # forward, backward
                accumulator.reduce_gradients(batch_size)

    Members, gradients, parameters and versions change in :meth:`update` only, never between two
    calls of it. All methods belong to one thread at a time.
    :meth:`training_steps` is this loop as an iterator.

    Args:
        role: ``"member"``, or ``"observer"``: receives the model and all rounds, contributes
            nothing, and no member waits for its user.
        checksum_every: rounds between two comparisons of the members' parameters; 0: never.
        on_divergence: when a member's parameters differ from the leader's, :meth:`update` raises
            at every peer (``"raise"``), logs it (``"warn"``), or logs it and has the member that
            differs take the leader's state anew (``"resync"``).
        max_grad_norm: a round's gradient is scaled down to this norm (L2, over all parameters)
            before it is shown, at every member by the same factor. None: never.
        on_nonfinite: the effect of NaN and infinity. ``"keep"``: they are sent like other values.
            ``"skip"``: a contribution that has one becomes a skip, and no member applies a round
            whose mean has one; its counters come with the next round. ``"raise"``:
            ``FloatingPointError`` from :meth:`reduce_gradients`, with nothing contributed and the
            gradients as they were, and from :meth:`update`, at every member, with the round in
            the gradients.
        sync_every: rounds between two versions of the parameters that this peer takes over from
            the leader, whatever its own optimizer has computed; 0: none. None: 1 while the leader
            computes in another framework (see :attr:`framework`), else 0.
        units: for repeatable runs (docs/repeatable.md), the number of units of data, 1 to 128.
            Each unit belongs to one member; the members' shares differ by at most one unit. A
            round is exactly one contribution of each unit, summed as by
            :func:`moolink.accumulate.ordered_sum`, so its bits depend on these gradients alone,
            not on the number of members.
            :attr:`unit` is the unit whose gradient is wanted. The virtual batch size follows from
            ``units``, and only one round is under way at once. A bucket is as large as the
            gradients of all units.

    ``max_grad_norm``, ``on_nonfinite`` and ``units`` are part of the model's layout: a peer with
    other ones is refused, for its parameters would drift away.
    """

    _kind_of_step: type[TrainingStep] = TrainingStep
    _kind_of_rpc: type[Rpc] = Rpc  # of the one made without a group

    def __init__(
        self,
        name: str,
        sections: list[tuple[str, int]],
        layout: str,
        group: Group | None,
        /,
        *,
        role: Role = "member",
        checksum_every: int = 100,
        on_divergence: Divergence = "raise",
        max_grad_norm: float | None = None,
        on_nonfinite: Nonfinite = "keep",
        sync_every: int | None = None,
        units: int | None = None,
    ) -> None:
        require_one_of("role", role, get_args(Role))
        require_one_of("on_divergence", on_divergence, get_args(Divergence))
        checksum_every = integer_of(checksum_every, "checksum_every", least=0)
        if sync_every is not None:
            sync_every = integer_of(sync_every, "sync_every", least=0)
        self._norms = NormPolicy(max_grad_norm, on_nonfinite)
        layout += self._norms.layout()
        self._own_rpc: Rpc | None = None
        if group is None:
            self._own_rpc = self._kind_of_rpc()
            group = Group(self._own_rpc, name)
        self._group = group
        self._name = name
        self._role: Role = role
        is_observer = role == "observer"
        self._sync = ParameterSync(
            group,
            name,
            self.framework,
            sync_every,
            self._capture_parameters,
            self._install_parameters,
        )
        self._parting = Parting(group, name, is_observer=is_observer)
        # Made last: it makes this peer a member, and others may then call the functions above.
        self._core = self._make_core(sections, layout, units)
        self._rounds = Rounds(self._core, group, name, role)
        self._rounds.are_of_units = units is not None
        sources.add(self._rounds, group.rpc)
        self._checksums = Checksums(self._core, self._sync, checksum_every, self._checksum)
        self._on_divergence: Divergence = on_divergence
        self._left_out = LeftOutRounds()
        self._transfer = StateTransfer(
            self._core,
            self._sync,
            self._checksums,
            self._left_out,
            self._capture_model,
            self._install,
        )
        self._has_gradients = self._in_backward = False
        self._awaited = ""
        self._told_of_nonfinite = False
        self._progress: Progress | None = None  # of the loops so far

    def _make_core(
        self, sections: list[tuple[str, int]], layout: str, units: int | None
    ) -> AccumulatorCore:
        group, name, is_observer = self._group, self._name, self._role == "observer"
        try:
            if units is None:
                return AccumulatorCore(group._core, name, sections, layout, is_observer)
            units = integer_of(units, "units", 1, MOST_UNITS)
            return OrderedCore(group, name, sections, layout, is_observer, units)
        except BaseException:
            self._parting.close()
            self._sync.close()
            raise

    def connect(self, address: str) -> None:
        """Connects to the broker at ``address``; only for an accumulator that made its own group.

        Raises:
            RuntimeError: a group was given; connect its ``Rpc`` instead.
        """
        if self._own_rpc is None:
            raise RuntimeError(
                "this accumulator was given a group: call connect on the group's Rpc instead"
            )
        self._own_rpc.connect(address)

    def update(self) -> None:
        """Takes over the events since the last call: views, a new state, a result.

        Raises:
            moolink.Error: the group refused this peer (for example, its parameters have another
                layout, or another peer has its name), or the model's checksums differ and
                ``on_divergence`` is ``"raise"``.
            moolink.errors.StateError: the leader's state is not one of this model. Later calls go
                on without it, and ask for another after a pause of 1 s, which doubles to 30 s;
                :meth:`training_steps` does so by itself and logs the error.
            AuthError: the key of this peer was refused where it looks for the broker; see
                :meth:`Group.update`.
            FloatingPointError: a round's mean is not finite and ``on_nonfinite`` is ``"raise"``.
            ValueError: a parameter or its gradient has another shape or dtype than when the
                accumulator was made; the round or the state waits until it is as it was. Or this
                peer's virtual batch size or parallel gradients have not been the leader's for 10 s.
            TypeError: a gradient is not dense; likewise.
        """
        self._update_all_but_rounds()
        while not self._has_gradients and not self._sync.awaits:
            result = self._core.take_result()
            if result is None:
                return
            self._take_round(result)

    def _update_all_but_rounds(self) -> None:
        if self._in_backward:
            raise RuntimeError("update() was called in a reduce_during_backward() block")
        self._core.update(self._on_divergence)
        self._group.follow()
        self._parting.begin(self._core)
        self._transfer.give_if_overdue()
        if self._core.has_new_state() or (not self._has_gradients and self._core.has_result()):
            self._validate()
        if self._core.has_new_state() and self._transfer.receive():
            self._has_gradients = False
        self._take_parameters()

    def _install(self, model: Any) -> None:
        self._install_model(model)
        self._clear()  # the gradients belong to the model before

    def _take_parameters(self) -> None:
        """Takes the leader's parameters over, if they have come and are wanted."""
        leader, leads = self._core.leader(), self._core.is_leader()
        if self._sync.look(leader, leads, between_rounds=not self._has_gradients):
            self._checksums.note(self._sync.version)
        self._await(self._sync.awaited())
        self._checksums.report()

    def _await(self, what: str) -> None:
        """Tells the core a reason to wait that it does not know itself; "": none."""
        if what != self._awaited:
            self._awaited = what
            self._core.set_awaited(what)

    def _take_round(self, result: npt.NDArray[np.uint8]) -> None:
        self._sync.began(self._core.model_version())
        self._rounds.add()
        if not self._norms.scale(self._core, result):
            return self._skip_round()
        self._left_out.show()
        self._show(result)
        self._has_gradients = True
        self._norms.require_finite(self._core)

    def _skip_round(self) -> None:
        """Applies nothing of this round. Every member sees the same bits and does the same."""
        self._left_out.add(self._core.model_version(), self._core.stats())
        self._release_round()
        self._core.update(self._on_divergence)

    def wait(self, timeout: float) -> bool:
        """Blocks, without the GIL, until :meth:`update` may have something new.

        Args:
            timeout: seconds.

        Returns:
            Whether there is news.
        """
        if self._sync.awaits:
            return self._sync.wait(timeout, self._core)
        return self._core.wait(timeout)

    def awaits_parameters(self) -> bool:
        """Whether this peer has applied a round and waits for the leader's parameters of it, which
        take the place of its own (see ``sync_every``); :meth:`update` takes them over."""
        return self._sync.awaits

    def in_step(self) -> bool:
        """Whether the parameters have the bits that the leader's of this version have: at members
        of its framework, and at others once they have taken its parameters over. A member of
        another framework that is behind leaves out versions that the leader is past."""
        return self._sync.exact() is True and not self._sync.awaits

    def finish(self, state: Callable[[], Any]) -> bool:
        """Ends a loop at this version, as every member ends its own at the same one.

        Returns once the last round is at every member and this peer has the leader's parameters of
        it (see ``sync_every``). The leader stays until every other member has called this method
        as well, or is gone, for 60 s at most, and gives newcomers the state meanwhile.
        :meth:`training_steps` calls it by itself.

        Args:
            state: returns the newcomers' state beside the model, as for :meth:`set_state`.

        Returns:
            False: ``has_new_state()`` is true, because this peer had lost its place in the group:
            take the state and go on with the loop.

        Raises:
            moolink.Error: the leader is gone and has taken its last parameters with it: those of
                this peer may have other bits.
        """
        return leave_together(self, state)

    def connected(self) -> bool:
        """Whether this peer is an active member and its model is the group's."""
        return self._core.connected()

    def wants_state(self) -> bool:
        """Whether newcomers wait for this peer's state; true once for each snapshot."""
        return self._core.wants_state()

    def set_state(self, state: Any) -> None:
        """Gives the state that newcomers receive beside parameters and buffers.

        Args:
            state: a tree of tensors, arrays and plain values, copied before this returns.

        Raises:
            RuntimeError: ``wants_state()`` is false.
            TypeError: the state holds an object that the typed codec does not know.
        """
        self._transfer.give(state)

    def has_new_state(self) -> bool:
        """Whether a state has arrived; parameters and buffers are already installed."""
        return self._transfer.has_new

    def state(self) -> Any:
        """Returns the state that arrived, once.

        Raises:
            RuntimeError: ``has_new_state()`` is false.
        """
        return self._transfer.take()

    def wants_gradients(self) -> bool:
        """Whether ``reduce_gradients`` or ``skip_gradients`` may be called now."""
        wanted = not self._must_first() and self._core.wants_gradients()
        if wanted:
            self._prepare()
        return wanted

    @property
    def unit(self) -> int | None:
        """With ``units``: the unit of data whose gradient the next ``reduce_gradients`` takes; None
        while none is wanted of this member, and without ``units``."""
        if not isinstance(self._core, OrderedCore) or self._must_first():
            return None
        return self._core.unit() if self._core.wants_gradients() else None

    @property
    def own_units(self) -> list[int]:
        """With ``units``: the units of this member in the current membership, ascending."""
        return self._core.own_units() if isinstance(self._core, OrderedCore) else []

    def has_gradients(self) -> bool:
        """Whether the gradients now hold a round's result."""
        return self._has_gradients

    def reduce_gradients(self, batch_size: int, counters: Mapping[str, int] | None = None) -> None:
        """Contributes the current gradients.

        Args:
            batch_size: the weight of this contribution in the mean, at least 1.
            counters: integers summed exactly over the round's contributions, such as
                ``{"steps": 640}``.

        Raises:
            RuntimeError: ``wants_gradients()`` is false.
            ValueError: ``batch_size`` is less than 1 or more than 2**40, a counter needs more
                than 64 bits, its name more than 256 bytes, there are more than 256 of them, or a
                parameter or its gradient has another shape or dtype than when
                the accumulator was made. Nothing was contributed then.
            TypeError: ``batch_size`` or a counter is no integer, its name no string, or a gradient
                is not dense.
            FloatingPointError: an element is not finite and ``on_nonfinite`` is ``"raise"``.
        """
        batch_size, sums = checked_batch_size(batch_size), checked_counters(counters)
        self._require_wanted("reduce_gradients")
        self._validate()
        clear = self._norms.on_nonfinite != "raise"
        finite = self._gather(batch_size, clear)
        if not finite and self._norms.on_nonfinite == "raise":
            raise FloatingPointError("the gradients are not finite: nothing was contributed")
        if not clear:
            self._clear()
        if not finite and self._norms.on_nonfinite == "skip":
            self._left_out.add_contribution()
            batch_size = 0
        elif not finite:
            self._tell_of_nonfinite()
        self._core.offer(batch_size, sums)
        self._rounds.contributed(batch_size, sums)

    def _tell_of_nonfinite(self) -> None:
        if self._norms.on_nonfinite == "keep" and not self._told_of_nonfinite:
            self._told_of_nonfinite = True
            logs.logger.warning(
                "gradients of version %d are NaN or infinite, and are averaged like others: "
                'on_nonfinite="skip" leaves such contributions out, "raise" ends the loop. (This '
                "is said once)",
                self._core.model_version(),
            )

    def skip_gradients(self, counters: Mapping[str, int] | None = None) -> None:
        """Contributes nothing but counters. Never needed: a silent peer delays no member.

        Raises:
            RuntimeError: ``wants_gradients()`` is false.
        """
        sums = checked_counters(counters)
        self._require_wanted("skip_gradients")
        self._core.offer(0, sums)
        self._rounds.contributed(0, sums)

    def zero_gradients(self) -> None:
        """Ends the use of a result: zeroes the gradients and makes room for the next round."""
        self._clear()
        if self._has_gradients:
            self._has_gradients = False
            self._release_round()

    def _release_round(self) -> None:
        version = self._core.model_version()
        self._sync.applied(version)
        self._checksums.note(version)
        self._checksums.report()
        self._core.release_result()

    def model_version(self) -> int:
        """Number of rounds that were delivered to this peer's model."""
        return self._core.model_version()

    def set_model_version(self, version: int) -> None:
        """Sets the version of a model loaded from a checkpoint, before ``connect``.

        The member with the highest version becomes the first leader, and the others get its state.

        Raises:
            ValueError: the group has begun, at another version.
        """
        self._core.set_model_version(version)
        self._sync.version = version

    def set_virtual_batch_size(self, size: int) -> None:
        """Sets the sum of batch sizes that makes a round (default 1): the same on every peer.

        The leader's value counts for all. :meth:`update` raises ``ValueError`` at a member that has
        set another one for 10 s.
        """
        size = integer_of(size, "size")
        self._core.set_virtual_batch_size(size)
        self._rounds.set_virtual_batch_size(size)

    def set_parallel_gradients(self, rounds: int) -> None:
        """Sets how many rounds may be under way at once (default 1): the same on every peer, as for
        :meth:`set_virtual_batch_size`.

        With 1 every gradient is of the newest parameters. With more the next contribution is
        computed while a round is reduced: gradients are up to ``rounds - 1`` updates old.

        Raises:
            ValueError: ``rounds`` is not between 1 and 256.
        """
        self._core.set_parallel_gradients(integer_of(rounds, "rounds"))

    def get_leader(self) -> str:
        """Name of the leader, or ``""`` while there is none."""
        return self._core.leader()

    def is_leader(self) -> bool:
        """Whether this peer cuts the rounds."""
        return self._core.is_leader()

    def is_observer(self) -> bool:
        """Whether this peer follows and never contributes."""
        return self._role == "observer"

    def get_gradient_stats(self) -> GradientStats:
        """Returns the statistics of the round that was delivered last."""
        stats = self._left_out.complete(self._core.stats())
        stats["grad_norm"] = self._norms.norm
        return stats

    def training_steps(
        self,
        apply: Callable[[], None],
        *,
        state: Callable[[], Any] | None = None,
        load_state: Callable[[Any], None] | None = None,
        until: Until | None = None,
        totals: Mapping[str, int] | None = None,
        idle: Callable[[], None] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = 60.0,
        log: str | os.PathLike[str] | RunLog | None = None,
    ) -> Iterator[TrainingStep]:
        """Iterates over the turns of a training loop in which gradients are wanted.

        Between two turns it does all the rest: applies rounds, gives newcomers the state, takes
        the state where this peer is the newcomer, and waits without the GIL (Ctrl-C ends it).
        An adapter makes something shorter of it, such as ``steps(optimizer)`` for torch.

        Args:
            apply: changes the parameters by the round in the gradients, as at every member.
            state: returns the newcomers' state beside the model: a tree as for :meth:`set_state`.
            load_state: takes such a state.
            until: called with the totals of all counters after each round, with equal ones at
                every member (a counter that no round had is 0): true ends the iteration there, at
                the same round everywhere. Or totals, such as ``{"steps": 1_000_000}``: the
                iteration ends when one of them is reached, and the dashboard shows the time left,
                as it does for a function with such totals as its attribute ``target``.
            totals: those of a checkpoint, with which the counters go on; None: those of this
                accumulator's loop before.
            idle: called while the loop waits, five times a second: between two rounds, so that an
                exception of it ends the loop with complete parameters.
            checkpoint: path of a file in which the leader keeps the model, ``state()``, the totals
                and the statistics of the last round. If there is one, this call takes them over, so
                call it before ``connect()``. An observer neither reads nor writes it.
            every: seconds between two times that it is written; it is also written at the end.
            log: where ``step.log()`` writes: a folder, for ``log.csv``, or a
                :class:`moolink.metrics.RunLog`.

        Raises:
            ValueError: ``totals`` is given beside ``checkpoint``, which has its own.
            moolink.FileError: the checkpoint is damaged, or of another model or loop; nothing has
                changed. Exceptions of ``load_state`` come as they are.
            OSError: in the loop, at its end: the checkpoint cannot be written. Before that, this is
                a warning, and the leader tries again after ``every`` seconds.
            RuntimeError: ``connect()`` was called before, with ``checkpoint``.

        An observer gets a turn after each round and each state; it cannot contribute. One that
        falls behind goes on from a later state, and has no turns for the rounds in between.
        """
        options = LoopOptions(state, load_state, until, totals, idle, checkpoint, every, log)
        return training_steps(self, lambda totals: apply(), options)

    def close(self) -> None:
        """Ends this peer's part in the rounds and releases its memory.

        If the accumulator made its group, it also leaves the group. Otherwise close the group, too:
        the other members wait for this peer while it is a member.
        """
        sources.remove(self._rounds)
        self._sync.close()
        self._parting.close()
        self._core.close()
        if self._own_rpc is not None:
            self._group.close()
            self._own_rpc.close()

    def __repr__(self) -> str:
        leader = self.get_leader()
        return (
            f"<{type(self).__module__}.{type(self).__qualname__} {self._name!r} in group "
            f"{self._group.name()!r}, version {self.model_version()}, "
            + (f"led by {leader!r}>" if leader else "without a leader>")
        )

    def _require_wanted(self, method: str) -> None:
        if not self.wants_gradients():
            why = self._must_first() or self._core.why_not_wanted()
            raise RuntimeError(f"{method} was called while wants_gradients() is false: {why}")

    def _must_first(self) -> str:
        """Why this peer cannot contribute, with the call that is due; "": nothing here."""
        if self._in_backward:
            return "a reduce_during_backward() block has not ended"
        if self._has_gradients:
            return "a result is in the gradients: step the optimizer and call zero_gradients()"
        if self._transfer.has_new:
            return "a new state has arrived: call state()"
        if self._sync.awaits:
            return "the leader's parameters are on their way: call update()"
        return "an observer does not contribute" if self.is_observer() else ""
