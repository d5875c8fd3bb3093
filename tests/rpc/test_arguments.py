"""Wrong arguments of the extension module's functions: errors that name the one that is wrong."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import _core
from moolink.internal import arguments

OF_NANOBIND = "incompatible function arguments"


def functions() -> Iterator[tuple[str, Any, type | None]]:
    """All functions of the extension, each with its class."""
    for name, value in vars(_core).items():
        if hasattr(value, "__nb_signature__"):
            yield name, value, None
        elif isinstance(value, type):
            for method, function in vars(value).items():
                if hasattr(function, "__nb_signature__"):
                    yield f"{name}.{method}", function, value


FUNCTIONS = {name: (function, kind) for name, function, kind in functions()}


def called(name: str, given: dict[str, Any]) -> str:
    """The text of the error of a call with these arguments, for an uninitialized object: even a
    function that takes them does not run."""
    function, kind = FUNCTIONS[name]
    _, has_self, _ = arguments._signature(function)
    objects = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nanobind warns of the object
        if has_self:
            assert kind is not None
            objects.append(kind.__new__(kind))
        with pytest.raises(TypeError) as raised:
            function(*objects, **given)
    return str(raised.value)


def test_the_table_has_the_functions_of_the_extension() -> None:
    assert len(FUNCTIONS) > 150
    assert {"RpcCore.listen", "Future.result", "Lent.__init__", "dump"} <= FUNCTIONS.keys()


def valid(wanted: ast.expr) -> Any:
    text = ast.unparse(wanted)
    known = {"str": "x", "int": 1, "float": 1.0, "bool": True, "bytes": b"x"}
    return known.get(text, print if "Callable" in text else [] if "Sequence" in text else None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_a_wrong_type_is_named(name: str) -> None:
    function, _ = FUNCTIONS[name]
    owner, _, signature = arguments._signature(function)
    named = {
        key: one
        for key, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and len(function.__nb_signature__) == 1
    }
    good = {key: valid(one.annotation) for key, one in named.items()}
    for key, one in named.items():
        for wrong in (None, 3.5, object(), []):
            if arguments._fits(wrong, one.annotation):
                continue
            before = {earlier: good[earlier] for earlier in good if earlier != key}
            if any(not arguments._fits(v, named[k].annotation) for k, v in before.items()):
                continue  # no valid value of another argument is known
            text = called(name, {**before, key: wrong})
            assert text.startswith(f"{owner}: {key} must be "), text
            assert OF_NANOBIND not in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_number_of_arguments_is_said(name: str) -> None:
    function, _ = FUNCTIONS[name]
    owner, has_self, signature = arguments._signature(function)
    takes_any = name.endswith(".__exit__")  # its arguments do not matter
    if takes_any or any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values()):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(TypeError) as raised:
            function(*[object()] * (12 + has_self))
    assert str(raised.value) == f"{owner}: too many positional arguments"


# --- as a user meets them


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rpc: rpc.listen(None), "Rpc.listen(): address must be a str, got None"),
        (
            lambda rpc: rpc.listen("127.0.0.1:0", advertise=3),
            "Rpc.listen(): advertise must be a str or None, got 3",
        ),
        (lambda rpc: rpc.listen(), "Rpc.listen(): missing a required argument: 'address'"),
        (
            lambda rpc: rpc.listen(adress="127.0.0.1:0"),
            "Rpc.listen() has no keyword argument 'adress': did you mean 'address'? "
            "It has address, advertise",
        ),
        (lambda rpc: rpc.explain(None), "Rpc.explain(): peer must be a str, got None"),
        (lambda rpc: rpc.set_name([]), "Rpc.set_name(): name must be a str, got []"),
        (lambda rpc: rpc.set_timeout([]), "Rpc.set_timeout(): seconds must be a number, got []"),
        (
            lambda rpc: rpc.set_transports(3.5),
            "Rpc.set_transports(): names must be a list of strs, got 3.5",
        ),
        (
            lambda rpc: rpc.set_transports(["tcp", 3]),
            "Rpc.set_transports(): names must be a list of strs, got ['tcp', 3]",
        ),
        (
            lambda rpc: rpc.set_timeout(np.zeros(3)),
            "Rpc.set_timeout(): seconds must be a number, got array(",
        ),
        (lambda rpc: rpc.listen("\ud800"), "Rpc.listen(): address must be a str, got '\\ud800'"),
        (lambda rpc: moolink.Rpc(arrays=None), "Rpc(): arrays must be a str, got None"),
        (lambda rpc: moolink.Broker(first=None), "Broker(): first must be True or False, got None"),
        (
            lambda rpc: moolink.Broker(rpc).members(None),
            "Broker.members(): group must be a str, got None",
        ),
        (
            lambda rpc: rpc.async_callback("peer", "f", None),
            "Rpc.async_callback(): callback must be callable, got None",
        ),
        (
            lambda rpc: rpc.async_many(None, "f"),
            "Rpc.async_many(): peers must be a list of strs, got None",
        ),
        (
            lambda rpc: rpc.async_("peer", "f").result("soon"),
            "Future.result(): timeout must be a number or None, got 'soon'",
        ),
        (
            lambda rpc: rpc.async_("peer", "f").add_done_callback(None),
            "Future.add_done_callback(): callback must be callable, got None",
        ),
        (lambda rpc: moolink.dump(None), "dump(): too many positional arguments"),
        (lambda rpc: moolink.set_max_threads("4"), "set_max_threads(): count must be an integer, "),
        (lambda rpc: moolink.set_max_threads(-1), "set_max_threads(): count is out of range"),
        (lambda rpc: moolink.empty(3, arrays=None), "empty(): arrays must be a str, got None"),
        (lambda rpc: moolink.empty(None), "shape must be an integer, got None"),
        (lambda rpc: moolink.empty([1.5]), "shape must be an integer, got 1.5"),
        (lambda rpc: moolink.lend(1, 2), "Lent(): on_release must be callable or None, got 2"),
    ],
    ids=range(25),
)
def test_the_error_names_method_argument_and_what_is_expected(
    call: Callable[[moolink.Rpc], Any], text: str
) -> None:
    with moolink.Rpc("peer") as rpc, pytest.raises(TypeError) as raised:
        call(rpc)
    assert str(raised.value).startswith(text)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_an_accumulator_names_what_it_is_given() -> None:
    torch = pytest.importorskip("torch")
    with moolink.Rpc("peer") as rpc, moolink.Group(rpc, "g") as group:
        parameters = [torch.zeros(3, requires_grad=True)]
        with (
            moolink.Accumulator("m", parameters, group=group) as accumulator,
            pytest.raises(TypeError, match=r"version must be an integer, got None"),
        ):
            accumulator.set_model_version(None)  # type: ignore[arg-type]


def test_an_object_whose_class_does_not_initialise_it_is_told_so() -> None:
    class Mine(moolink.Rpc):
        def __init__(self) -> None:
            pass

    with (
        pytest.warns(RuntimeWarning, match="uninitialized"),
        pytest.raises(TypeError, match=r"Rpc\.explain\(\) .*does not call super\(\)\.__init__\(\)"),
    ):
        Mine().explain("peer")


def test_an_error_of_a_handler_with_that_text_is_left_alone() -> None:
    def fail() -> None:
        raise TypeError("sync(): incompatible function arguments")

    with moolink.Rpc("peer") as rpc:
        rpc.define("fail", fail)
        with pytest.raises(moolink.RemoteError, match=OF_NANOBIND):
            rpc.sync("peer", "fail")
