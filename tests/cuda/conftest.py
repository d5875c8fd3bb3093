"""What needs a CUDA device is skipped, with the reason, where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import moolink
from tests.rpc.conftest import pair, start
from tests.waiting import formed

__all__ = ["pair", "start"]

# Before JAX is imported: it would take three quarters of the device for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@functools.cache
def missing() -> str:
    """Why there is no CUDA device here; empty: there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no CUDA driver: {error}"
    if status := driver.cuInit(0):
        return f"the CUDA driver does not work: cuInit returned {status}"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if count.value else "the CUDA driver finds no device"


def require_device() -> None:
    """Skips the test if there is no device."""
    if reason := missing():
        pytest.skip(reason)


def framework(name: str) -> ModuleType:
    """The framework, if it can use a device; otherwise the test is skipped."""
    require_device()
    module = pytest.importorskip(name)
    if name == "torch" and not module.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    if name == "jax":
        try:
            module.local_devices(backend="cuda")
        except RuntimeError as error:
            pytest.skip(f"this JAX has no CUDA: {error}")
        module.config.update("jax_enable_x64", True)
    if name == "cupy":
        try:
            module.cuda.runtime.getDeviceCount()
        except module.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"this CuPy finds no device: {error}")
    return module


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch, able to use a device."""
    return framework("torch")


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, able to use a device."""
    return framework("cupy")


@pytest.fixture(scope="session")
def jax() -> Any:
    """JAX, able to use a device, with 64-bit types."""
    return framework("jax")


@pytest.fixture
def two(broker_address: str) -> Iterator[list[moolink.Group]]:
    """Two members of a group, in this process."""
    require_device()
    with contextlib.ExitStack() as stack:
        groups = []
        for name in ("a", "b"):
            rpc = stack.enter_context(moolink.Rpc(name, timeout=20))
            rpc.connect(broker_address)
            groups.append(stack.enter_context(moolink.Group(rpc, "group")))
        formed(groups)
        yield groups


def both(groups: list[moolink.Group], start: Callable[[moolink.Group, int], Any]) -> list[Any]:
    """The results of an operation that each member starts with its rank."""
    futures = [start(group, rank) for rank, group in enumerate(groups)]
    return [future.result(20) for future in futures]
