"""The gradient accumulator for JAX: parameters and gradients are pytrees."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from moolink._core import check_array
from moolink.accumulate import AccumulatorBase
from moolink.accumulate import training_steps as loops
from moolink.accumulate.buckets import Description, Section, layout, sections
from moolink.accumulate.options import AccumulatorOptions
from moolink.accumulate.totals import Means, Totals, with_means
from moolink.group import Group
from moolink.internal.keywords import names_keywords
from moolink.jax import arrays
from moolink.jax.optimizers import load_optimizer_state
from moolink.jax.optimizers import optimizer_state as common_state
from moolink.jax.states import plain_tree, tree_like
from moolink.metrics.run_log import RunLog


@names_keywords
class Accumulator(AccumulatorBase):
    """moolink's accumulator for pytrees; see :class:`moolink.accumulate.AccumulatorBase`.

    JAX arrays are immutable, so parameters and gradients are handed in and out::

        while True:
            accumulator.update()
            if accumulator.wants_state():
                accumulator.set_state(optimizer_state)
            if accumulator.has_new_state():
                optimizer_state = accumulator.state(like=optimizer_state)
            if accumulator.has_gradients():
                parameters, optimizer_state = apply(
                    accumulator.parameters(), optimizer_state, accumulator.gradients()
                )
                accumulator.set_parameters(parameters)
                accumulator.zero_gradients()
            elif accumulator.wants_gradients():
                gradients = gradients_of(accumulator.parameters(), batch)
                accumulator.reduce_gradients(gradients, batch_size)

    :meth:`steps` is this loop as an iterator.

    Args:
        name: name of the model within the group.
        parameters: pytree of arrays of floating point, which JAX arrays are made of. Members agree
            in the order of the leaves and in their shapes and dtypes, not in the containers. (JAX
            sorts the keys of dicts; namedtuples and OrderedDicts keep their order.) A member in
            torch has the same leaves as its ``model.parameters()``.
        buffers: pytree of arrays that newcomers receive beside the parameters.
        group: the group to reduce in. Without one the accumulator makes an ``Rpc`` and a ``Group``
            called ``name``; then call :meth:`connect`.
        options: ``role``, ``checksum_every``, ``on_divergence``, ``max_grad_norm``,
            ``on_nonfinite``, ``sync_every`` and ``units`` of the base class.

    Gradients of float16 and bfloat16 are summed, sent and scaled as float32, and rounded once.

    Raises:
        TypeError: a leaf is no array, is 64 bits wide without x64, or a parameter is not of
            floating point.
        ValueError: there are no parameters.
    """

    framework = "jax"
    _optimizer: Any = None  # of the last steps()
    _optimizer_state: Any = None

    def __init__(
        self,
        name: str,
        parameters: Any,
        buffers: Any = (),
        group: Group | None = None,
        **options: Unpack[AccumulatorOptions],
    ) -> None:
        self._parameters, self._structure, self._paths = _leaves("parameters", parameters)
        self._buffers, self._buffer_structure, self._buffer_paths = _leaves("buffers", buffers)
        described = [_description(leaf, True) for leaf in self._parameters]
        for path, leaf in zip(self._paths, self._parameters, strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise TypeError(
                    f"{path} is {arrays.described(leaf)}, which has no gradient: give it among "
                    "the buffers"
                )
        if not described:
            raise ValueError("there are no parameters: nothing to reduce")
        self._sections = sections(described)
        self._made_with = described
        self._unpack = jax.jit(partial(_unpack, self._sections, described))
        self._offered: list[npt.NDArray[Any]] = []
        self._flats: list[jax.Array] | None = None  # the round that is shown, a section each
        self._gradients: Any = None
        super().__init__(
            name,
            [(section.dtype, section.count) for section in self._sections],
            layout(described, [_description(b, False) for b in self._buffers]),
            group,
            **options,
        )

    def parameters(self) -> Any:
        """The pytree of parameters. It changes in :meth:`set_parameters` and :meth:`update`."""
        return jax.tree.unflatten(self._structure, self._parameters)

    def set_parameters(self, parameters: Any) -> None:
        """Gives the parameters after a round, or those of a checkpoint before the group forms.

        Raises:
            ValueError: structure, shapes or dtypes are not those that the accumulator was made for.
        """
        self._parameters = self._checked(
            "parameters", parameters, self._parameters, self._structure
        )

    def buffers(self) -> Any:
        """The pytree of buffers. It changes in :meth:`set_buffers` and :meth:`update`."""
        return jax.tree.unflatten(self._buffer_structure, self._buffers)

    def set_buffers(self, buffers: Any) -> None:
        """Gives other buffers.

        Raises:
            ValueError: as for :meth:`set_parameters`.
        """
        self._buffers = self._checked("buffers", buffers, self._buffers, self._buffer_structure)

    def optimizer_state(self) -> Any:
        """As the optimizer of :meth:`steps` left it after the last round; None before ``steps``."""
        return self._optimizer_state

    def gradients(self) -> Any:
        """The round's mean, a pytree of JAX arrays as the parameters are.

        Raises:
            RuntimeError: ``has_gradients()`` is false.
        """
        if self._flats is None:
            raise RuntimeError("there is no round: call gradients() when has_gradients() is true")
        if self._gradients is None:
            leaves = self._unpack(self._flats)
            here = map(arrays.placed, leaves, self._parameters)
            self._gradients = jax.tree.unflatten(self._structure, list(here))
        return self._gradients

    def reduce_gradients(  # type: ignore[override]
        self, gradients: Any, batch_size: int, counters: Mapping[str, int] | None = None
    ) -> None:
        """Contributes gradients.

        Args:
            gradients: pytree as the parameters are; None in place of a leaf counts as zero.
            batch_size: the weight of this contribution in the mean, at least 1.
            counters: integers summed exactly over the round's contributions.

        Raises:
            RuntimeError: ``wants_gradients()`` is false.
            ValueError: a gradient has another shape or dtype than its parameter, the structure is
                another one, or as for the base class. Nothing was contributed then.
            TypeError: a gradient is traced, or as for the base class.
            FloatingPointError: an element is not finite and ``on_nonfinite`` is ``"raise"``.
        """
        self._offered = self._checked_gradients(gradients)
        try:
            super().reduce_gradients(batch_size, counters)
        finally:
            self._offered = []

    def set_state(self, state: Any) -> None:
        """Gives the state that newcomers receive beside parameters and buffers.

        Args:
            state: any pytree, such as a state of optax. It travels as a plain tree: see
                :func:`moolink.jax.plain_tree`.

        Raises:
            RuntimeError: ``wants_state()`` is false.
            TypeError: a leaf is neither an array nor a value that the typed codec knows.
        """
        super().set_state(plain_tree(state))

    def state(self, like: Any = None) -> Any:
        """Returns the state that arrived, once.

        Args:
            like: a pytree of the structure, shapes and dtypes that the state has, such as this
                peer's own; None: as the plain tree that it travelled as.

        Raises:
            RuntimeError: ``has_new_state()`` is false.
            ValueError: the state does not look like ``like``.
        """
        state = super().state()
        return state if like is None or state is None else tree_like(like, state)

    def steps(
        self,
        optimizer: Any,
        *,
        optimizer_state: Any = None,
        learning_rate: Callable[[Totals], float] | None = None,
        state: Callable[[], Any] | None = None,
        load_state: Callable[[Any], None] | None = None,
        until: loops.Until | None = None,
        totals: Mapping[str, int] | None = None,
        idle: Callable[[], None] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: float = 60.0,
        log: str | os.PathLike[str] | RunLog | None = None,
    ) -> Iterator[TrainingStep]:
        """Iterates over the turns of a training loop in which gradients are wanted::

            for step in accumulator.steps(optax.adam(1e-3)):
                gradients = gradients_of(step.parameters, next(batches))
                step.reduce(gradients, batch_size=32, counters={"samples": 32})

        Between two turns rounds are applied with ``optimizer.update``, compiled once; its state
        travels to newcomers with the model. Members in other frameworks understand the states
        that :func:`moolink.jax.optimizer_state` knows. The rest is as in
        :meth:`~moolink.accumulate.AccumulatorBase.training_steps`.

        Args:
            optimizer: an ``optax.GradientTransformation``, or anything with its
                ``init(parameters)`` and ``update(gradients, state, parameters)``; the same at
                every member.
            optimizer_state: that of a checkpoint; None: that of the loop before with this
                optimizer, or ``optimizer.init(parameters)``.
            learning_rate: returns a factor of a round's updates from the totals of the rounds
                before it, which are equal at every member: with ``optax.adam(1.0)``, the rate.
            state: returns the newcomers' further state: a plain tree, or any pytree.
            load_state: takes it, as a plain tree.
            until: ends the iteration when true of the counters' totals; or totals, such as
                ``{"steps": 1_000_000}``, of which one has to be reached.
            totals: those of a checkpoint; None: those of this accumulator's loop before.
            idle: called while the loop waits; an exception of it ends the loop.
            checkpoint: path of a file in which the leader keeps the model, the optimizer, the
                totals and ``state()``. If there is one, this call takes them over, so call it
                before ``connect()``.
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
        """
        if optimizer_state is None and optimizer is self._optimizer:
            optimizer_state = self._optimizer_state  # of the loop before
        if optimizer_state is None:
            optimizer_state = optimizer.init(self.parameters())
        self._optimizer, self._optimizer_state = optimizer, optimizer_state
        update = jax.jit(partial(_optimize, optimizer))

        def apply(totals: Totals) -> None:
            rate = 1.0 if learning_rate is None else learning_rate(totals)
            parameters, self._optimizer_state = update(
                self.parameters(), self._optimizer_state, self.gradients(), rate
            )
            self.set_parameters(parameters)

        def capture() -> Any:
            users = None if state is None else plain_tree(state())
            common = common_state(self._optimizer_state)
            own = plain_tree(self._optimizer_state) if common is None else None
            return {"optimizer": common, "jax": own, "users": users}

        def install(received: Any) -> None:
            received = loops.checked_loop_state(received, self.framework)
            mine, common = self._optimizer_state, received["optimizer"]
            if common is not None:
                self._optimizer_state = load_optimizer_state(mine, common)
            else:
                self._optimizer_state = tree_like(mine, received["jax"], "the optimizer's state")

        def keep() -> Callable[[], None]:
            return partial(setattr, self, "_optimizer_state", self._optimizer_state)

        own = loops.OwnState(install, keep)
        options = loops.LoopOptions(
            capture, load_state, until, totals, idle, checkpoint, every, log, own=own
        )
        return loops.training_steps(self, apply, options)

    def training_steps(self, apply: Callable[[], None], **options: Any) -> Iterator[TrainingStep]:
        """Iterates over the turns of a training loop in which gradients are wanted, with steps as
        in :meth:`steps` and options as in the base class: for members of several frameworks, whose
        states of optimizers need a form that all understand.

        Args:
            apply: calls :meth:`set_parameters` with parameters updated by :meth:`gradients`.
        """
        return cast(Iterator[TrainingStep], super().training_steps(apply, **options))

    def _checked(self, what: str, tree: Any, mine: list[jax.Array], structure: Any) -> list[Any]:
        leaves, given, paths = _leaves(what, tree)
        if given != structure:
            raise ValueError(f"{what} are a tree of {given}, and were of {structure}")
        for path, leaf, old in zip(paths, leaves, mine, strict=True):
            if leaf.shape != old.shape or leaf.dtype != old.dtype:
                raise ValueError(
                    f"{path} is {arrays.described(leaf)} now and was {arrays.described(old)} when "
                    "the accumulator was made: make another one for another model"
                )
        return leaves

    def _checked_gradients(self, gradients: Any) -> list[npt.NDArray[Any]]:
        """The gradients in host memory; an empty array stands for one that is missing."""
        leaves = self._like_parameters(gradients)
        checked = []
        for path, leaf, parameter in zip(self._paths, leaves, self._made_with, strict=True):
            if leaf is None:
                checked.append(np.empty(0))
                continue
            _require_array(f"the gradient of {path}", leaf)
            if _description(leaf, True) != parameter:
                raise ValueError(
                    f"the gradient of {path} is {arrays.described(leaf)}, and the parameter "
                    f"{parameter}"
                )
            checked.append(np.ascontiguousarray(leaf))
        return checked

    def _like_parameters(self, gradients: Any) -> list[Any]:
        """The gradients at the positions of the parameters' leaves, which may be None."""
        try:
            leaves: list[Any] = self._structure.flatten_up_to(gradients)
        except (TypeError, ValueError):
            leaves = []
        fits = len(leaves) == len(self._parameters)
        if not fits or not jax.tree_util.all_leaves([x for x in leaves if x is not None]):
            structure = jax.tree.structure(gradients)
            raise ValueError(
                f"the gradients are a tree of {structure}, and the parameters of {self._structure}"
            )
        return leaves

    def _gather(self, batch_size: int, clear: bool) -> bool:
        finite = True
        for section in self._sections:
            pieces = []
            for index, count, offset in section.places:
                gradient = self._offered[index]
                if gradient.dtype != section.dtype and gradient.size:
                    gradient = gradient.astype(section.dtype)
                pieces.append((gradient if gradient.size else None, count, offset))
            # Arrays of JAX are immutable: they are not zeroed.
            finite &= self._core.gather(section.dtype, pieces, float(batch_size), False)
        return finite

    def _show(self, result: npt.NDArray[np.uint8]) -> None:
        # An array costs JAX some 20 us to take over, whatever its size: so one for all leaves.
        self._flats = [
            arrays.lent(result[section.begin : section.end].view(section.dtype))
            for section in self._sections
        ]
        self._gradients = None

    def _clear(self) -> None:
        self._flats = self._gradients = None

    def _capture_model(self) -> Any:
        return self._parameters, self._buffers

    def _install_model(self, model: Any) -> None:
        parameters, buffers = model
        received = _received(buffers, self._buffers, self._buffer_paths)
        self._install_parameters(parameters)
        self._buffers = received

    def _capture_parameters(self) -> list[Any]:
        return self._parameters  # they cannot be written

    def _install_parameters(self, parameters: list[Any]) -> None:
        self._parameters = _received(parameters, self._parameters, self._paths)

    def _checksum(self) -> int:
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._parameters:
            digest.update(np.asarray(parameter).tobytes())
        return int.from_bytes(digest.digest(), "little")


@names_keywords
class TrainingStep(loops.TrainingStep):
    """One turn: gradients of ``parameters``, which are those of ``version``, are wanted.

    Attributes:
        parameters: the pytree.
        optimizer_state: as the optimizer of :meth:`Accumulator.steps` left it, for a checkpoint.
    """

    _accumulator: Accumulator

    def __init__(self, accumulator: Any, totals: Totals, stats: Any) -> None:
        super().__init__(accumulator, totals, stats)
        self.parameters = accumulator.parameters()
        self.optimizer_state = accumulator._optimizer_state

    def reduce(  # type: ignore[override]
        self,
        gradients: Any,
        batch_size: int,
        counters: Mapping[str, int] | None = None,
        means: Means | None = None,
    ) -> None:
        """Contributes gradients, once a turn; as the accumulator's ``reduce_gradients``.

        Args:
            gradients: pytree as the parameters are; None in place of a leaf counts as zero.
            batch_size: the weight of this contribution in the mean of the gradients, at least 1.
            counters: integers summed exactly over the round's contributions.
            means: numbers, or iterables of any number of numbers, of which ``totals.mean(name)`` is
                the mean over all contributions.

        Raises:
            RuntimeError: it was already called in this turn, or the turn is over, because the
                parameters are of a later version.
        """
        self._require_first("reduce")
        self._accumulator.reduce_gradients(gradients, batch_size, with_means(counters, means))
        self._reduced = True


Accumulator._kind_of_step = TrainingStep


def _unpack(
    sections: list[Section], parameters: list[Description], flats: list[jax.Array]
) -> list[jax.Array]:
    """The leaves of a result, a flat array for each section."""
    leaves: dict[int, jax.Array] = {}
    for section, flat in zip(sections, flats, strict=True):
        begin = 0
        for index, count in zip(section.indices, section.counts, strict=True):
            leaf = flat[begin : begin + count].reshape(parameters[index].shape)
            leaves[index] = leaf.astype(parameters[index].dtype)
            begin += count
    return [leaves[index] for index in range(len(parameters))]


def _optimize(
    optimizer: Any, parameters: Any, state: Any, gradients: Any, rate: float
) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, parameters)
    return jax.tree.map(lambda p, u: (p + rate * u).astype(p.dtype), parameters, updates), state


def _leaves(what: str, tree: Any) -> tuple[list[jax.Array], Any, list[str]]:
    """Leaves as JAX arrays, the structure, and names of the leaves for errors."""
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, paths = [], []
    for key, leaf in keyed:
        path = what + jax.tree_util.keystr(key)
        _require_array(path, leaf)
        arrays.require_whole(path, leaf)
        # A numpy array may be written later; JAX relies on memory that is not.
        leaves.append(leaf if isinstance(leaf, jax.Array) else jnp.array(leaf))
        paths.append(path)
    return leaves, structure, paths


def _require_array(what: str, leaf: Any) -> None:
    """Raises ``TypeError`` unless it is an array of JAX or numpy with elements in memory."""
    check_array(leaf, what)
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{what} is a {type(leaf).__qualname__}, not an array of JAX or numpy")


def _received(values: list[Any], mine: list[jax.Array], paths: list[str]) -> list[jax.Array]:
    if len(values) != len(mine):
        raise ValueError(f"{len(values)} arrays came for the {len(mine)} of this model")
    return [
        arrays.received(value, old, path)
        for value, old, path in zip(values, mine, paths, strict=True)
    ]


def _description(array: Any, reduced: bool) -> Description:
    return Description(np.dtype(array.dtype).name, tuple(array.shape), reduced)
