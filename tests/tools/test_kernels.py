"""Each kernel is compiled for each instruction set, with all its functions inlined."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from moolink import _core

EXTENSION = Path(str(_core.__file__))
# A kernel is a function with several copies (cpp/collective/kernel_target.h).
COPY = re.compile(r"\w*collective\w+\.(default|avx2|avx512f)$")
# A compiler may make these of a loop that copies or clears.
MEMORY = {"memcpy", "memmove", "memset"}


def calls_of_kernels() -> dict[str, set[str]]:
    """Each copy of each kernel, with the functions that it calls."""
    symbols = subprocess.run(["nm", "-S", EXTENSION], capture_output=True, text=True, check=True)
    calls = {}
    for fields in map(str.split, symbols.stdout.splitlines()):
        if len(fields) == 4 and COPY.match(fields[3]):
            begin = int(fields[0], 16)
            limits = [f"--start-address={begin}", f"--stop-address={begin + int(fields[1], 16)}"]
            code = subprocess.run(
                ["objdump", "-d", *limits, EXTENSION], capture_output=True, text=True, check=True
            )
            called = re.findall(r"\bcall\s.*<([^@>+]+)", code.stdout)
            calls[fields[3]] = set(called) - MEMORY
    return calls


def test_no_kernel_calls_a_function_for_each_element() -> None:
    """A call for each element makes a kernel 50 times slower: GCC did not inline lambdas."""
    calls = calls_of_kernels()
    if not calls:
        pytest.skip("this compiler or processor has no copies of functions for instruction sets")
    assert {name: called for name, called in calls.items() if called} == {}
