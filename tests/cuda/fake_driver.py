"""Programs in processes of their own, whose CUDA driver is the fake one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cuda.conftest import missing
from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]

# An array that says it lies on a device, as the fake driver's memory does.
FAKE_ARRAY = """
    import ctypes, itertools, threading
    import numpy as np
    import moolink
    from moolink import _core

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int),
                    ("device_id", ctypes.c_int), ("ndim", ctypes.c_int), ("code", ctypes.c_uint8),
                    ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                    ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                    ("byte_offset", ctypes.c_uint64)]

    class Managed(ctypes.Structure):
        _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class DeviceArray:
        def __init__(self, array, device=(2, 1)):
            self.array, self.device, self.streams = array, device, []

        def __dlpack_device__(self):
            return self.device

        def __dlpack__(self, *, stream=None):
            self.streams.append(stream)
            array = self.array
            self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            steps = [step // array.itemsize for step in array.strides]
            self.strides = (ctypes.c_int64 * array.ndim)(*steps)
            kind = {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
            self.managed = Managed(
                Tensor(array.ctypes.data, *self.device, array.ndim, kind, 8 * array.itemsize, 1,
                       ctypes.addressof(self.shape), ctypes.addressof(self.strides), 0), None, None)
            return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    server = moolink.Rpc("server", timeout=20)
    client = moolink.Rpc("client", timeout=20)
    client.connect(server.listen("127.0.0.1:0")[0])
    server.define("echo", lambda value: value)
    """


def run_with_fake_driver(*programs: str, ipc: bool = False) -> None:
    build = ROOT / os.environ.get("MOOLINK_BUILD_DIR", "build/dev")
    fake = build / "tests" / "cpp" / "fake_cuda"
    if not (fake / "libcuda.so.1").exists():
        pytest.fail(f"{fake}/libcuda.so.1 is not built: run `make test-cpp` first")
    text = "".join(map(textwrap.dedent, (FAKE_ARRAY, *programs)))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake), "MOOLINK_CUDA_IPC": str(int(ipc))}
    subprocess.run([sys.executable, "-c", text], check=True, env=environment, timeout=PROCESS_LIMIT)


@pytest.fixture(autouse=True)
def no_device() -> None:
    if not (reason := missing()):
        pytest.skip("there is a CUDA device, for which the other tests are")
    assert reason
