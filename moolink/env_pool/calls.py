"""The calls that a worker can make of an environment, beside stepping and resetting it.

Each function gets the environment and a name, and travels pickled by its own name.
"""

from __future__ import annotations

from typing import Any


def call(env: Any, name: str, /, *positional: Any, **keywords: Any) -> Any:
    """Calls the method `name`, of the outermost wrapper that has it; or gets the attribute."""
    attribute = get(env, name)
    return attribute(*positional, **keywords) if callable(attribute) else attribute


def get(env: Any, name: str) -> Any:
    """Gets the attribute `name`, of the outermost wrapper that has it; raises AttributeError."""
    getter = getattr(env, "get_wrapper_attr", None)
    return getattr(env, name) if getter is None else getter(name)


def get_if_there(env: Any, name: str) -> tuple[bool, Any]:
    """Tells whether the environment has the attribute, and gets it."""
    try:
        return True, get(env, name)
    except AttributeError:
        return False, None


def has(env: Any, name: str) -> bool:
    """Tells whether the environment has the attribute."""
    return get_if_there(env, name)[0]


def assign_outermost(env: Any, name: str, value: Any) -> None:
    """Sets the attribute `name` of the object that create_env has made."""
    setattr(env, name, value)


def assign(env: Any, name: str, value: Any) -> None:
    """Sets the attribute `name`, where it is already if a wrapper has it."""
    setter = getattr(env, "set_wrapper_attr", None)
    if setter is None:
        setattr(env, name, value)
    else:
        setter(name, value)


def is_wrapped(env: Any, name: str, wrapper: type) -> bool:
    """Tells whether a `wrapper` is around the environment; `name` is only for errors."""
    while env is not None:
        if isinstance(env, wrapper):
            return True
        env = getattr(env, "env", None)
    return False
