"""All-reduces inside of compiled functions: a typed custom call of XLA, handled by C++.

The handler blocks the program that calls it and nothing else: it holds no GIL. One call takes a
whole pytree. Calls of one program have no order of their own; a token gives them one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from moolink import _core, errors
from moolink.data.trees import layout_text
from moolink.group import Group
from moolink.group.group import Reduction
from moolink.jax.arrays import require_whole

_TARGET = "moolink_all_reduce"
_LINEAR = ("sum", "mean")

jax.ffi.register_ffi_target(_TARGET, _core.xla_all_reduce(), platform="cpu")
jax.ffi.register_ffi_target(_TARGET, _core.xla_all_reduce_on_cuda(), platform="CUDA")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Token:
    """Orders the calls of one program, and says in which membership it was dispatched.

    A pytree: it goes into a compiled function as an argument, through ``lax.scan`` in the carry.

    Attributes:
        epoch: the membership's number, uint32, shape ().
        chain: float32, shape (), without a meaning: each call takes one and gives the next.
    """

    epoch: Any
    chain: Any


def token(group: Group) -> Token:
    """Returns a token of the membership that the group's last ``update()`` has shown.

    Make one for each dispatch of a compiled function, and give it as an argument.

    Raises:
        moolink.Closed: ``update()`` has shown no members yet.
    """
    epoch = group.epoch()
    if epoch == 0:
        raise errors.Closed(
            f"a token of group '{group.name()}': update() has shown no members yet; call it first",
            function=group.name(),
        )
    return Token(np.uint32(epoch & 0xFFFFFFFF), np.float32(0))


def all_reduce(
    group: Group,
    name: str,
    tree: Any,
    *,
    op: Reduction = "sum",
    on_change: Literal["raise", "retry"] = "raise",
    token: Token | None = None,
    donate: bool = False,
) -> Any:
    """Combines a pytree of all members inside of a compiled function; all get the same bits.

    The group's ``all_reduce`` of the same name, with the same tree, meets it at other members.
    Works under ``jit``, ``lax.scan``, ``lax.cond``, ``vmap`` and ``grad``. The gradient of a sum is
    the sum of all members' cotangents, that of a mean their mean: an all-reduce of its own, called
    ``"<name>, gradient"``, so all members differentiate.

    A program waits in one call at a time. Where it has several that do not depend on one another,
    members may enter them in different orders and wait for one another until the time-out, whose
    error names the members and the operations: chain them by a token, or give them one tree. JAX
    drops a call whose results (the token among them) are not used.

    Args:
        group: the program finds it by its name each time that it runs, on one device.
        name: tells operations apart; the n-th call of a name meets the others' n-th.
        tree: pytree of arrays, of the same structure, shapes and dtypes at all members. One
            operation for each dtype.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, ``"and"``, ``"or"``, ``"xor"``.
        on_change: the reaction when the members change before all have the result: ``"raise"``
            :class:`moolink.GroupChanged`, or ``"retry"`` among the newest members, with elements
            of one dtype only.
        token: where this call comes after the one that returned it. The program must then run in
            the membership in which its first token was made. Without it, it runs in the one that
            ``update()`` has shown last when the call begins, which is later than the dispatch for
            programs that JAX runs in the background.
        donate: the results take the memory of the operands; not with ``on_change="retry"``, which
            needs them again.

    Returns:
        A pytree like ``tree``; with a token the pair of that and the next token.

    Raises (when it is traced):
        ValueError: ``op`` is not defined for a dtype, or the options contradict one another.
        TypeError: a leaf is no array that can be reduced, or 64 bits wide without x64.
        moolink.Closed: the group was closed.

    Raises (when it runs):
        jax.errors.JaxRuntimeError, ValueError: with the text of a moolink error; which of both is
            JAX's choice; see :func:`translate_errors`.
    """
    _check_options(name, on_change, donate)
    keyed, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple("data" + jax.tree_util.keystr(keys) for keys, _ in keyed)
    arrays = tuple(
        _as_operand(name, path, leaf) for path, (_, leaf) in zip(paths, keyed, strict=True)
    )
    dtypes = list(dict.fromkeys(array.dtype.name for array in arrays))
    for dtype in dtypes:
        group._core.check_reduction(op, dtype)
    if on_change == "retry" and len(dtypes) > 1:
        raise ValueError(
            f"all_reduce '{name}': elements of {', '.join(dtypes)} go in one operation each, whose "
            'retries could end among different members: one call for each, or on_change="raise"'
        )
    key = group._core.program_key()
    if not key:
        raise errors.Closed(
            f"all_reduce '{name}': the group '{group.name()}' was closed", function=group.name()
        )
    call = _Call(key, name, op, on_change, donate, paths)
    given = Token(np.uint32(0), np.float32(0)) if token is None else token
    results, chain = _reduce(call, arrays, given.epoch, given.chain)
    reduced = jax.tree.unflatten(structure, results)
    return reduced if token is None else (reduced, Token(given.epoch, chain))


def _check_options(name: str, on_change: str, donate: bool) -> None:
    if on_change not in ("raise", "retry"):
        raise ValueError(f"all_reduce '{name}': on_change {on_change!r} is not raise or retry")
    if donate and on_change == "retry":
        raise ValueError(
            f"all_reduce '{name}': donated operands are gone when the operation begins again: "
            'not with on_change="retry"'
        )


def _as_operand(name: str, path: str, leaf: Any) -> jax.Array:
    if leaf is None or isinstance(leaf, str | bytes):
        raise TypeError(f"all_reduce '{name}': {path} is a {type(leaf).__name__}, not an array")
    require_whole(f"all_reduce '{name}': {path}", leaf)
    return jnp.asarray(leaf)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are known when it is traced."""

    group: str
    name: str
    op: str
    on_change: str
    donate: bool
    paths: tuple[str, ...]


Arrays = tuple[jax.Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(call: _Call, arrays: Arrays, epoch: Any, chain: Any) -> tuple[Arrays, jax.Array]:
    *results, chain = _primitive.bind(*arrays, epoch, chain, call=call)
    return tuple(results), chain


def _forward(call: _Call, arrays: Arrays, epoch: Any, chain: Any) -> Any:
    if call.op not in _LINEAR:
        raise TypeError(
            f"all_reduce '{call.name}': {call.op} has no gradient, only sum and mean have one; "
            "wrap its operands in jax.lax.stop_gradient"
        )
    results, chain = _reduce(call, arrays, epoch, chain)
    return (results, chain), (epoch, chain)


def _backward(call: _Call, residuals: Any, cotangents: Any) -> Any:
    epoch, chain = residuals
    gradients, chain_back = cotangents
    real = [i for i, g in enumerate(gradients) if g.dtype != jax.dtypes.float0]
    results: list[Any] = [None] * len(gradients)
    if real:
        # After the call itself, and after those of the calls that came after it.
        back = replace(
            call,
            name=f"{call.name}, gradient",
            donate=False,
            paths=tuple(call.paths[i] for i in real),
        )
        reduced, chain_back = _reduce(
            back, tuple(gradients[i] for i in real), epoch, chain + chain_back
        )
        for i, gradient in zip(real, reduced, strict=True):
            results[i] = gradient
    return tuple(results), None, chain_back


_reduce.defvjp(_forward, _backward)

# Not jax.ffi.ffi_call: its side effects cost 35 us a dispatch and exclude custom_vjp. Here only XLA
# knows of them, so that it neither merges calls nor moves them out of loops.
_primitive: Any = Primitive("moolink_all_reduce")
_primitive.multiple_results = True


def _shapes(*operands: Any, call: _Call) -> list[Any]:
    arrays, chain = operands[:-2], operands[-1]
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in (*arrays, chain)]


@functools.lru_cache(maxsize=256)
def _compiled(call: _Call) -> Any:
    return jax.jit(functools.partial(_primitive.bind, call=call))


def _run(*operands: Any, call: _Call) -> Any:
    with jax.disable_jit(False):  # or the primitive would run itself
        return _compiled(call)(*operands)


_primitive.def_abstract_eval(_shapes)
_primitive.def_impl(_run)


def _lower(context: Any, *operands: Any, call: _Call) -> Any:
    devices = getattr(context.module_context.axis_context, "num_devices", None)
    if devices not in (None, 1):
        raise NotImplementedError(
            f"all_reduce '{call.name}': the program runs on {devices} devices of this peer, and "
            "moolink reduces in programs of one: bring the operands there (jax.device_put), or "
            "call moolink.jax.all_reduce on the program's results"
        )
    arrays = context.avals_in[:-2]
    layout = layout_text(
        (path, array.dtype.name, array.shape)
        for path, array in zip(call.paths, arrays, strict=True)
    )
    rule = jax.ffi.ffi_lowering(
        _TARGET,
        has_side_effect=True,
        operand_output_aliases={i: i for i in range(len(arrays))} if call.donate else {},
    )
    attributes = {
        "group": call.group,
        "layout": layout,
        "name": call.name,
        "on_change": call.on_change,
        "op": call.op,
    }
    return rule(context, *operands, **attributes)


def _lower_elsewhere(context: Any, *operands: Any, call: _Call) -> Any:
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(
        f"all_reduce '{call.name}': moolink reduces in functions compiled for CPUs and CUDA "
        f"devices, and this one is for {', '.join(platforms)}; return the operands from it and "
        "call moolink.jax.all_reduce on them outside of jit (or give gradients to "
        "moolink.jax.Accumulator), or compile it for the CPU (jax.default_device)"
    )


mlir.register_lowering(_primitive, _lower_elsewhere)
mlir.register_lowering(_primitive, _lower, platform="cpu")
mlir.register_lowering(_primitive, _lower, platform="cuda")


def _batch(operands: Any, dims: Any, *, call: _Call) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def in_front(x: Any, d: Any) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    arrays = [in_front(x, d) for x, d in zip(operands[:-2], dims[:-2], strict=True)]
    epoch, chain = operands[-2:]
    if dims[-2] is not None:
        epoch = jnp.max(epoch, axis=dims[-2])
    if dims[-1] is not None:
        chain = jnp.sum(chain, axis=dims[-1])
    results = _primitive.bind(*arrays, epoch, chain, call=call)
    return results, [0] * len(arrays) + [None]


batching.primitive_batchers[_primitive] = _batch

_OWN = re.compile(r"moolink\.(\w+): (.*)", re.DOTALL)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raises moolink's errors for those in which JAX wraps errors of :func:`all_reduce`.

    JAX raises the errors of programs that it runs in the background when their results are used,
    so wait for them (``jax.block_until_ready``) inside.

    Raises:
        moolink.GroupChanged, moolink.TimeoutError, moolink.Closed, moolink.Error, ValueError: as
            the group's ``all_reduce`` does.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # of a program that ran before
        found = _OWN.search(str(error))
        if found is None:
            raise
        kind = ValueError if found[1] == "ValueError" else getattr(errors, found[1], errors.Error)
        raise kind(found[2]) from error
