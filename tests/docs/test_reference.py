"""The reference has every public name, and each of them has a docstring."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import moolink
from tests.docs.examples import ROOT

PACKAGES = [
    *("env_pool", "group", "replay", "weights", "trajectories", "inference", "launch"),
    "accumulate",
    *("metrics", "reports", "rpc", "tokens", "torch", "jax", "torchrl", "ray"),
]
MODULES = {"moolink.sb3", "moolink.pettingzoo", "moolink.tensordict"}  # documented as a whole
FOR_RAY = {"moolink.ray.NAME", "moolink.ray.Place", "moolink.ray.TensorTransport"}  # Ray makes them
OPTIONAL = ("moolink.torchrl", "moolink.torch", "moolink.jax", "moolink.ray")


def documented() -> set[str]:
    """The names of the pages, without the packages that also export what moolink itself does."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return {
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }


def public() -> set[str]:
    names = {f"moolink.{name}" for name in moolink.__all__ if name != "metrics"}
    for package in PACKAGES:
        module = ROOT / "moolink" / package
        source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        found = re.search(r"__all__ = \[(.*?)\]", source.read_text(), re.DOTALL)
        assert found is not None, package
        exported = set(re.findall(r'"(\w+)"', found[1]))
        names |= {
            f"moolink.{package}.{name}" for name in exported if f"moolink.{name}" not in names
        }
    # Packages have these, too, under a name of moolink itself.
    own = {"moolink.torch.Accumulator", "moolink.jax.Accumulator", "moolink.ray.register"}
    return (names - FOR_RAY) | own


def test_the_reference_has_every_public_name() -> None:
    assert documented() - MODULES == public()


@pytest.mark.parametrize("name", sorted(public()))
def test_a_public_name_has_a_docstring(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if module in OPTIONAL:
        pytest.importorskip(module.rpartition(".")[2], reason=f"needs {module.rpartition('.')[2]}")
    value = getattr(importlib.import_module(module), attribute)
    assert value.__doc__
    for member, what in vars(value).items() if isinstance(value, type) else ():
        if not member.startswith("_") and callable(what) and not isinstance(what, type):
            assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"
