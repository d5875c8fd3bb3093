"""Errors for wrong arguments of the extension module's functions: they name the argument.

cpp/bind/arguments.cc raises them in place of nanobind's errors, which list signatures.
"""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moolink.internal.keywords import unknown_keyword
from moolink.internal.shown import shown

_LARGE = 1 << 31  # all integer types of the bindings hold the numbers below it


def _converts(convert: Callable[[], object]) -> bool:
    try:
        convert()
    except OverflowError:  # the caller says that it is out of range
        return True
    except Exception:  # noqa: BLE001 - of the user's class
        return False
    return True


# The text for each type in a signature, and whether a value is of it. Other types are not checked.
# Arrays have a number's methods and may be no number; some strs cannot be encoded.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "None": ("None", lambda value: value is None),
    "str": ("a str", lambda value: isinstance(value, str) and _converts(value.encode)),
    "bytes": ("bytes", lambda value: isinstance(value, bytes)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("an integer", lambda value: _converts(lambda: operator.index(value))),
    "float": ("a number", lambda value: not _is_text(value) and _converts(lambda: float(value))),
    "list": ("a list", lambda value: isinstance(value, list)),
    "tuple": ("a tuple", lambda value: isinstance(value, Sequence)),
    "dict": ("a dict", lambda value: isinstance(value, dict)),
    "Mapping": ("a dict", lambda value: isinstance(value, Mapping)),
    "Sequence": ("a list", lambda value: isinstance(value, Sequence) and not _is_text(value)),
    "Callable": ("callable", callable),
    "BaseException": ("an exception", lambda value: isinstance(value, BaseException)),
    "NDArray": ("an array", lambda value: hasattr(value, "__dlpack__")),
}


def refusal(function: Any, given: list[Any], named: dict[str, Any]) -> TypeError:
    """The error for a call of an extension's function with arguments that it does not take.

    Args:
        function: the function or method, an object of nanobind's.
        given: the positional arguments; of a method, the object first.
        named: the keyword arguments.
    """
    owner, has_self, signature = _signature(function)
    if has_self:  # the object may be uninitialized
        given = given[1:]
    if unknown := [name for name in named if not _takes(signature, name)]:
        return TypeError(unknown_keyword(owner, list(signature.parameters), unknown[0]))
    try:
        bound = signature.bind(*given, **named).arguments
    except TypeError as error:
        return TypeError(f"{owner}: {error}")
    for name, value in bound.items():
        wanted = signature.parameters[name].annotation
        if signature.parameters[name].kind in _NAMED and not _fits(value, wanted):
            return TypeError(f"{owner}: {name} must be {_words(wanted)}, got {shown(value)}")
    for name, value in bound.items():
        if isinstance(value, int) and not 0 <= value < _LARGE:
            return TypeError(f"{owner}: {name} is out of range, got {shown(value)}")
    if has_self:
        return TypeError(
            f"{owner} was called for an object of another class, or for one whose class does not "
            "call super().__init__()"
        )
    return TypeError(f"{owner} does not take {', '.join(map(shown, bound.values()))}")


_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def _signature(function: Any) -> tuple[str, bool, inspect.Signature]:
    """The public name of a function of the extension, whether it is a method, and its parameters
    without self; their annotations are syntax trees."""
    text = re.sub(r"= \\=?\d+", "= ...", function.__nb_signature__[0][0])
    (definition,) = ast.parse(f"{text}: ...").body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = len(positional) - len(arguments.defaults)
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            one.arg,
            _NAMED[at >= len(arguments.posonlyargs)],
            default=empty if at < with_default else None,
            annotation=one.annotation,
        )
        for at, one in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            one.arg,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if default is None else None,
            annotation=one.annotation,
        )
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    has_self = bool(positional) and positional[0].arg == "self"
    public = re.sub(r"Core\b", "", function.__qualname__)
    owner = re.sub(r"\.__(init|call)__$", "", public) + "()"
    return owner, has_self, inspect.Signature(parameters[has_self:])


def _takes(signature: inspect.Signature, name: str) -> bool:
    kinds = [one.kind for one in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    known = signature.parameters.get(name)
    return known is not None and known.kind is not inspect.Parameter.POSITIONAL_ONLY


def _fits(value: Any, wanted: ast.expr) -> bool:
    if isinstance(wanted, ast.BinOp):  # A | B
        return _fits(value, wanted.left) or _fits(value, wanted.right)
    known = _TYPES.get(_name(wanted))
    if known is None or not known[1](value):
        return known is None
    item = _item(wanted)
    return item is None or all(_fits(one, item) for one in value)


def _words(wanted: ast.expr) -> str:
    if isinstance(wanted, ast.BinOp):
        return f"{_words(wanted.left)} or {_words(wanted.right)}"
    name, item = _name(wanted), _item(wanted)
    words = _TYPES[name][0] if name in _TYPES else name
    return words if item is None else f"{words} of {_words(item).partition(' ')[2]}s"


def _name(wanted: ast.expr) -> str:
    if isinstance(wanted, ast.Subscript):
        return _name(wanted.value)
    if isinstance(wanted, ast.Attribute):
        return wanted.attr
    return wanted.id if isinstance(wanted, ast.Name) else ast.unparse(wanted)


def _item(wanted: ast.expr) -> ast.expr | None:
    """The type of a list's items, if they are checked; else None."""
    if isinstance(wanted, ast.Subscript) and _name(wanted) in ("list", "Sequence"):
        return wanted.slice if _name(wanted.slice) in ("str", "int", "float") else None
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)
