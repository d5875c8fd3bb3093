"""XLA's call frame as it is declared by hand is that of the jaxlib that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PROCESS_LIMIT

jax = pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[2]

# Ours, theirs, and the fields of ours with those of theirs.
STRUCTS = [
    ("Extension", "XLA_FFI_Extension_Base", "struct_size type next", ""),
    ("Version", "XLA_FFI_Api_Version", "struct_size extension_start major_version", ""),
    ("Version", "XLA_FFI_Api_Version", "minor_version", ""),
    ("ErrorCreateArgs", "XLA_FFI_Error_Create_Args", "struct_size message code", "code=errc"),
    (
        "Api",
        "XLA_FFI_Api",
        "struct_size api_version internal_api error_create stream_get device_ordinal_get",
        "error_create=XLA_FFI_Error_Create stream_get=XLA_FFI_Stream_Get "
        "device_ordinal_get=XLA_FFI_DeviceOrdinal_Get",
    ),
    ("StreamGetArgs", "XLA_FFI_Stream_Get_Args", "struct_size context stream", "context=ctx"),
    (
        "DeviceOrdinalGetArgs",
        "XLA_FFI_DeviceOrdinal_Get_Args",
        "struct_size context device_ordinal",
        "context=ctx",
    ),
    ("Buffer", "XLA_FFI_Buffer", "struct_size dtype data rank dims", ""),
    ("ByteSpan", "XLA_FFI_ByteSpan", "data size", "data=ptr size=len"),
    ("Arguments", "XLA_FFI_Args", "struct_size size types values", "values=args"),
    ("Results", "XLA_FFI_Rets", "struct_size size types values", "values=rets"),
    ("Attributes", "XLA_FFI_Attrs", "struct_size size types names values", "values=attrs"),
    (
        "CallFrame",
        "XLA_FFI_CallFrame",
        "struct_size extension_start api context stage arguments results attributes",
        "context=ctx arguments=args results=rets attributes=attrs",
    ),
    ("Metadata", "XLA_FFI_Metadata", "struct_size api_version traits", ""),
    ("MetadataExtension", "XLA_FFI_Metadata_Extension", "base metadata", "base=extension_base"),
]
VALUES = {
    "ExtensionType::metadata": "XLA_FFI_Extension_Metadata",
    "AttributeType::string": "XLA_FFI_AttrType_STRING",
    "Stage::execute": "XLA_FFI_ExecutionStage_EXECUTE",
    "Code::aborted": "XLA_FFI_Error_Code_ABORTED",
    "Code::cancelled": "XLA_FFI_Error_Code_CANCELLED",
    "Code::deadline_exceeded": "XLA_FFI_Error_Code_DEADLINE_EXCEEDED",
    "Code::failed_precondition": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "Code::invalid_argument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "Code::unavailable": "XLA_FFI_Error_Code_UNAVAILABLE",
    "Code::unknown": "XLA_FFI_Error_Code_UNKNOWN",
}


def test_offsets_and_numbers(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here to read jaxlib's header with")
    lines = ['#include "bind/xla_ffi.h"', '#include "xla/ffi/api/c_api.h"', "#include <cstddef>"]
    lines.append("namespace ours = moolink::bind::xla;")
    for ours, theirs, fields, renamed in STRUCTS:
        names = dict(pair.split("=") for pair in renamed.split())
        for field in fields.split():
            other = names.get(field, field)
            equal = f"offsetof(ours::{ours}, {field}) == offsetof({theirs}, {other})"
            size = f"sizeof(ours::{ours}::{field}) == sizeof({theirs}::{other})"
            # The table of functions, and what ends in it, is declared as far as it is used.
            lines.append(f'static_assert({equal}, "{ours}::{field}");')
            lines.append(f'static_assert({size}, "{ours}::{field}");')
    for ours, theirs in VALUES.items():
        lines.append(f'static_assert(static_cast<int>(ours::{ours}) == {theirs}, "{ours}");')
    lines.append("static_assert(ours::kMajor == XLA_FFI_API_MAJOR);")
    source = tmp_path / "offsets.cc"
    source.write_text("\n".join(lines) + "\n")
    includes = [f"-I{ROOT / 'cpp'}", f"-I{jax.ffi.include_dir()}"]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", *includes, source]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False
    )
    assert result.returncode == 0, result.stderr
