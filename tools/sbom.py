"""Writes what a build compiles into the extension module: a software bill of materials (CycloneDX
1.6, JSON) and the licences' texts. CMake runs it for a wheel; PEP 770 has the place in the wheel.

    tools/sbom.py --version V --compiler CXX --dlpack FOLDER [--verbs FOLDER] BOM LICENCES
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Component:
    """Something of others' that the extension module has code or layouts of."""

    name: str
    version: str | None
    purl: str
    licence: str  # SPDX
    role: str
    text: str  # of the licence

    def described(self) -> dict[str, object]:
        """Returns the component as CycloneDX has it."""
        version = {"version": self.version} if self.version else {}
        at = f"@{self.version}" if self.version else ""
        return {
            "type": "library",
            "bom-ref": self.purl + at,
            "name": self.name,
            **version,
            "purl": self.purl + at,
            "description": self.role,
            "licenses": [{"expression": self.licence}],
        }


def leading_comment(header: Path) -> str:
    """Returns the text of the comment that a header begins with, which has its licence."""
    found = re.match(r"\s*/\*(.*?)\*/", header.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit(f"{header} begins with no comment")
    return "\n".join(re.sub(r"^ ?\* ?", "", line.strip()) for line in found[1].splitlines()).strip()


def licence_of(distribution: str) -> str:
    """Returns the licence that an installed distribution came with."""
    for file in importlib.metadata.files(distribution) or []:
        if file.name in ("LICENSE", "LICENSE.txt"):
            return file.read_text(encoding="utf-8").strip()
    raise SystemExit(f"{distribution} was installed without its licence")


def macros(compiler: list[str]) -> dict[str, str]:
    """Returns what the compiler and its standard library define."""
    command = [*compiler, "-std=c++20", "-E", "-dM", "-x", "c++", "-include", "version", "-"]
    text = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))


def nanobind() -> list[Component]:
    """Returns nanobind and the hash map in it."""
    spec = importlib.util.find_spec("nanobind")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    version = importlib.metadata.version("nanobind")
    robin_map = folder / "ext/robin_map/include/tsl/robin_map.h"
    return [
        Component(
            "nanobind",
            version,
            "pkg:pypi/nanobind",
            "BSD-3-Clause",
            "binds C++ to Python; compiled in",
            licence_of("nanobind"),
        ),
        Component(
            "robin-map",
            None,
            "pkg:github/tessil/robin-map",
            "MIT",
            f"hash map; the copy in nanobind {version}",
            leading_comment(robin_map),
        ),
    ]


def dlpack(include: Path) -> Component:
    """Returns the tensor layout's header."""
    header = include / "dlpack" / "dlpack.h"
    text = header.read_text(encoding="utf-8")
    major, minor = re.findall(r"#define DLPACK_(?:MAJOR|MINOR)_VERSION (\d+)", text)
    return Component(
        "dlpack",
        f"{major}.{minor}",
        "pkg:github/dmlc/dlpack",
        "Apache-2.0",
        "layout of tensors; a header without functions",
        leading_comment(header),
    )


def verbs(include: Path) -> Component:
    """Returns the header of libibverbs, which is loaded at run time if it is there."""
    version = None
    prefix = (include / "infiniband").resolve().parents[1]
    for description in sorted(prefix.glob("lib*/*/pkgconfig/libibverbs.pc")):
        found = re.search(
            r"^Version: *(.*)$", description.read_text(encoding="utf-8"), re.MULTILINE
        )
        version = found[1] if found else None
    return Component(
        "libibverbs",
        version,
        "pkg:github/linux-rdma/rdma-core",
        "GPL-2.0-only OR Linux-OpenIB",
        "layout of RDMA's structs and inline functions; the library is looked for at run time",
        leading_comment(include / "infiniband" / "verbs.h"),
    )


def standard_library(defined: dict[str, str], compiler: list[str]) -> Component:
    """Returns the C++ standard library: its templates are compiled in, and libc++ whole."""
    if "_LIBCPP_VERSION" in defined:
        number = int(defined["_LIBCPP_VERSION"])
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        text = "Apache License v2.0 with LLVM Exceptions: https://llvm.org/LICENSE.txt"
        licence = "Apache-2.0 WITH LLVM-exception"
        return Component("libc++", version, "pkg:github/llvm/llvm-project", licence, "linked", text)
    return Component(
        "libstdc++",
        defined.get("_GLIBCXX_RELEASE"),
        "pkg:generic/libstdc%2B%2B",
        "GPL-3.0-or-later WITH GCC-exception-3.1",
        f"templates of {Path(compiler[0]).name}'s standard library; the library is the system's",
        "GPL version 3 with the GCC Runtime Library Exception: "
        "https://www.gnu.org/licenses/gcc-exception-3.1.html",
    )


def bill(version: str, components: list[Component], defined: dict[str, str]) -> dict[str, object]:
    """Returns the document. It has no date, so that the same build gives the same bytes."""
    root = f"pkg:pypi/moolink@{version}"
    described = [component.described() for component in components]
    compiler = defined.get("__VERSION__", "").strip('"')  # Clang's begins with its name
    if "__clang__" not in defined:
        compiler = f"GCC {compiler}"
    document: dict[str, object] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": root,
                "name": "moolink",
                "version": version,
                "purl": root,
                "licenses": [{"license": {"id": "MIT"}}],
            },
            "properties": [{"name": "moolink:compiler", "value": compiler}],
        },
        "components": described,
        "dependencies": [{"ref": root, "dependsOn": [one["bom-ref"] for one in described]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {**document, "serialNumber": f"urn:uuid:{serial}"}


def main() -> None:
    """Writes the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True)
    parser.add_argument("--compiler", required=True, type=shlex.split)
    parser.add_argument("--dlpack", required=True, type=Path)
    parser.add_argument("--verbs", type=Path)
    parser.add_argument("bom", type=Path)
    parser.add_argument("licences", type=Path)
    arguments = parser.parse_args()
    defined = macros(arguments.compiler)
    components = [*nanobind(), dlpack(arguments.dlpack)]
    if arguments.verbs:
        components.append(verbs(arguments.verbs))
    components.append(standard_library(defined, arguments.compiler))
    document = bill(arguments.version, components, defined)
    arguments.bom.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    texts = [f"{one.name} ({one.licence})\n\n{one.text}\n" for one in components]
    arguments.licences.write_text(("\n" + "-" * 80 + "\n\n").join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
