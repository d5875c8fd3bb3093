"""Handlers that are methods of the object that holds their Rpc.

``self.rpc.define("f", self.f)`` makes a circle of the object, its Rpc and the method. It lives on,
and the peer with it, until the garbage collector finds it. So such a method is held weakly.
"""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from moolink.errors import Error

_DEPTH = 4  # an object's dict, an attribute, its dict, the Rpc
_MOST = 2000  # objects that are looked at
_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def without_circle(rpc: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler that does not keep the Rpc alive if `function` is a method of its owner."""
    if not inspect.ismethod(function) or inspect.isasyncgenfunction(function):
        return function
    if not _holds(function.__self__, rpc):
        return function
    try:
        method = weakref.WeakMethod(function)
    except TypeError:  # Its class has slots, and none for weak references.
        return function
    return _weak(method, function)


def _weak(
    method: weakref.WeakMethod[types.MethodType], function: types.MethodType
) -> Callable[..., Any]:
    name = function.__qualname__

    def alive() -> Callable[..., Any]:
        if (found := method()) is None:
            raise Error(f"the object whose method {name} was defined is gone: keep it")
        return found

    if inspect.iscoroutinefunction(function):

        async def called_async(*args: Any, **kwargs: Any) -> Any:
            return await alive()(*args, **kwargs)

        return called_async

    def called(*args: Any, **kwargs: Any) -> Any:
        return alive()(*args, **kwargs)

    return called


def _holds(owner: object, rpc: object) -> bool:
    """Whether `rpc` is `owner`, an attribute of it, or of one of its attributes."""
    if owner is rpc:  # a subclass that defines its own methods
        return True
    seen = {id(owner)}
    level = [owner]
    for _ in range(_DEPTH):
        below = []
        for part in gc.get_referents(*level):
            if part is rpc:
                return True
            if isinstance(part, _NOT_FOLLOWED) or id(part) in seen or not gc.is_tracked(part):
                continue
            seen.add(id(part))
            below.append(part)
        if not below or len(seen) > _MOST:
            return False
        level = below
    return False
