"""Check that the code keeps to its layers: part of `make lint`.

C++: a layer includes only itself and the layers below it, and no units (a header with its .cc)
include one another. A class in several sources has few data members that more than one uses. The
machines include nothing with which they could do I/O or start a thread, read no clock and walk no
unordered container. Python: at module level a package of moolink imports
only itself and the packages below it; torch and JAX are imported there by their adapters and
examples only, and what both examples share imports neither.

Prints each offence as path:line, and how many members several sources of their class use, and exits
with status 1 if there is any offence.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

# Each layer with those right below it; what lies below them is allowed, too.
LAYERS: dict[str, tuple[str, ...]] = {
    "base": (),
    "crypto": ("base",),
    "tensor": ("base",),
    "memory": ("tensor",),
    "io": ("base",),
    "wire": ("tensor",),
    "device": ("memory",),
    "transport": ("io", "wire", "device", "crypto"),
    "session": ("wire",),
    "rpc": ("session", "crypto"),
    "group": ("wire",),
    "collective": ("wire",),
    "accumulate": ("group", "collective"),
    "replay": ("base",),
    "runtime/engine": ("io", "memory", "rpc"),
    "runtime/peer": ("runtime/engine", "transport", "group", "collective"),
    "runtime/shared_memory": ("runtime/peer",),
    "runtime/group": ("runtime/shared_memory", "accumulate"),
    "runtime/replay": ("io", "memory", "replay"),
    "bind": ("runtime/group", "runtime/replay"),
}

# Layers of pure machines: (now, event) in, actions out.
MACHINES = {"crypto", "session", "rpc", "group", "collective", "accumulate", "replay"}
NOT_IN_MACHINES = re.compile(
    r"<(sys/.*|unistd\.h|fcntl\.h|poll\.h|pthread\.h|time\.h|ctime|thread|mutex|shared_mutex|"
    r"condition_variable|future|random|iostream|fstream)>"
)
CLOCK = re.compile(r"\b\w*[cC]lock::now\b")
UNORDERED = re.compile(r"\bunordered_(?:multi)?(?:map|set)<.*>\s+(\w+)\s*[;={]")

# The packages in moolink/, each with those right below it. All may import what is in none.
PACKAGES: dict[str, tuple[str, ...]] = {
    "internal": (),
    "reports": (),
    "metrics": ("internal", "reports"),
    "data": ("internal",),
    "rpc": ("data", "metrics"),
    "group": ("rpc",),
    "accumulate": ("group",),
    "torch": ("accumulate",),
    "jax": ("accumulate",),
    "env_pool": ("data", "metrics"),
    "inference": ("rpc",),
    "replay": ("rpc",),
    "trajectories": ("rpc",),
    "weights": ("rpc",),
    "torchrl": ("replay", "weights"),
    "dashboard": ("group",),
    "compat": ("torch", "env_pool"),
    "launch": ("accumulate",),
    "ray": ("launch",),
    "cli": ("launch",),
}

FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "optax"}
# Trees of Python files, and the frameworks they may import at module level.
PYTHON_TREES: dict[str, set[str]] = {
    "moolink": set(),
    "moolink/torch": {"torch"},
    "moolink/compat": {"torch"},
    "moolink/torchrl": {"torch"},
    "moolink/jax": {"jax", "jaxlib"},
    "examples/common": set(),
    "examples/torch": {"torch"},
    "examples/jax": {"jax", "jaxlib", "flax", "optax"},
}
# Here not even inside of functions: both frameworks' learners run this code.
NEVER = {"examples/common"}

# Of the classes in several sources: how many data members more than one of these uses, where there
# are more than MOST_SHARED. A figure may only fall.
SHARED: dict[str, int] = {
    "collective/operation.h Operation": 22,
    "collective/shared_pipeline.h SharedPipeline": 6,
    "device/devices.h Devices": 6,
    "group/roster.h Roster": 14,
    "runtime/group/accumulator_peer.h AccumulatorPeer": 10,
    "runtime/group/group_peer.h GroupPeer": 13,
    "transport/shm/connection.h ShmConnection": 7,
    "transport/tcp/connection.h TcpConnection": 13,
    "transport/tcp/tls.h TlsStream": 21,
}
MOST_SHARED = 3

COMMENT = re.compile(r"//[^\n]*")
CLASS = re.compile(r"^(?:class|struct) (?:MOOLINK_\w+(?:\([^)]*\))? )?(\w+)[^;{]*\{", re.MULTILINE)
# What a declaration of a data member ends with; the name of every other one ends without _.
MEMBER = re.compile(
    r"\b([a-z]\w*_)(?:\[[^]]*\])?\s*(?:MOOLINK_\w+(?:\([^)]*\))?\s*)?(?:=.*|\{\})?$", re.DOTALL
)

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|(<[^>]+>))')


def below(layer: str, layers: Mapping[str, tuple[str, ...]] = LAYERS) -> set[str]:
    """Returns the layers that `layer` may include, itself among them."""
    return {layer}.union(*(below(lower, layers) for lower in layers[layer]))


def layer_of(path: str) -> str:
    """Returns the layer of a file in cpp/, or its first folder where that is none."""
    folders = path.split("/")[:-1]
    return next(
        (name for name in ("/".join(folders[:2]), *folders[:1]) if name in LAYERS), folders[0]
    )


def check_cpp(root: pathlib.Path) -> Iterator[str]:
    """Yields the offences of the files under root/cpp."""
    for path in sorted((root / "cpp").rglob("*")):
        if path.suffix not in {".h", ".cc"}:
            continue
        layer = layer_of(path.relative_to(root / "cpp").as_posix())
        if layer not in LAYERS:
            yield f"{path.relative_to(root)}:1: {layer} is no layer of tools/check_layers.py"
            continue
        allowed = below(layer)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            place = f"{path.relative_to(root)}:{number}"
            quoted, angled = match.groups()
            if quoted is not None:
                if "/" not in quoted:
                    yield f'{place}: includes are written "layer/file.h", not "{quoted}"'
                    continue
                target = layer_of(quoted)
                if target in LAYERS and target not in allowed:
                    yield f"{place}: layer {layer} must not include {quoted}"
                elif target not in LAYERS:
                    yield f"{place}: {quoted} is in no layer; system headers take <>"
            elif layer in MACHINES and NOT_IN_MACHINES.match(angled):
                yield f"{place}: {layer} is a layer of machines, which must not include {angled}"


def check_units(root: pathlib.Path) -> Iterator[str]:
    """Yields each cycle of units, a header with its .cc, that include one another."""
    includes: dict[str, set[str]] = {}
    for path in sorted((root / "cpp").rglob("*")):
        if path.suffix in {".h", ".cc"}:
            unit = path.relative_to(root / "cpp").with_suffix("").as_posix()
            matches = filter(None, map(INCLUDE.match, path.read_text().splitlines()))
            included = {match[1].rpartition(".")[0] for match in matches if match[1]}
            includes.setdefault(unit, set()).update(included - {unit})
    reached: dict[str, set[str]] = {}
    for unit in includes:
        reached[unit], left = set(), [unit]
        while left:
            new = includes.get(left.pop(), set()) - reached[unit]
            reached[unit] |= new
            left += new
    circles = {
        tuple(other for other in includes if other in reached[unit] and unit in reached[other])
        for unit in includes
    }
    for circle in sorted(filter(None, circles)):
        yield f"cpp/{circle[0]}.h:1: these units include one another: {', '.join(circle)}"


def data_members(header: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the classes that a header has outside of others, with their data members."""
    text = COMMENT.sub("", header)
    for match in CLASS.finditer(text):
        depth, statement, names = 1, "", set()
        for char in text[match.end() :]:
            depth += {"{": 1, "}": -1}.get(char, 0)
            if depth == 0:
                break
            if depth > 1:
                continue
            statement += "{}" if char == "}" else char
            if char == ";":
                if member := MEMBER.search(statement[:-1].strip()):
                    names.add(member[1])
                statement = ""
        yield match[1], names


def functions_of(name: str, source: str) -> str:
    """Returns the lines of a source that define functions of the class."""
    head = re.compile(rf"(?:\S.*\b)?{name}::~?\w+\(")
    lines, inside = [], False
    for line in source.splitlines():
        inside = inside or head.match(line) is not None
        if inside:
            lines.append(line)
            inside = not line.startswith("}") and not (line[:1].strip() and line.endswith("}"))
    return "\n".join(lines)


def shared_members(root: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each class in several sources, with the data members that more than one uses."""
    for path in sorted((root / "cpp").rglob("*.h")):
        sources = [source.read_text() for source in sorted(path.parent.glob("*.cc"))]
        for name, members in data_members(path.read_text()):
            parts = [text for source in sources if (text := functions_of(name, source))]
            uses = Counter(
                word for text in parts for word in members & set(re.findall(r"\w+", text))
            )
            if len(parts) > 1:
                yield (
                    f"{path.relative_to(root / 'cpp')} {name}",
                    sorted(word for word, times in uses.items() if times > 1),
                )


def check_shared(shared: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields the classes with more members used by several sources than they may have."""
    for name, members in shared.items():
        most = SHARED.get(name, MOST_SHARED)
        if len(members) > most:
            yield (
                f"cpp/{name.split()[0]}:1: more than {most} members of {name.split()[1]} are used "
                f"by several of its sources: {', '.join(members)}"
            )


def check_machines(root: pathlib.Path) -> Iterator[str]:
    """Yields where a machine reads a clock or walks a container whose order is not its own."""
    for layer in sorted(MACHINES):
        paths = sorted((root / "cpp" / layer).rglob("*.[hc]*"))
        lines = [
            (f"{path.relative_to(root)}:{number}", line)
            for path in paths
            for number, line in enumerate(path.read_text().splitlines(), 1)
        ]
        names = {match[1] for _, line in lines if (match := UNORDERED.search(line))}
        walked = "|".join(sorted(names)) or "(?!)"
        walk = re.compile(rf"\bfor\s*\(.*:\s*({walked})\)|\b({walked})\.c?begin\(")
        for index, (place, line) in enumerate(lines):
            if CLOCK.search(line):
                yield f"{place}: {layer} is a layer of machines, which are told the time"
            # What is collected and then sorted has an order of its own again.
            is_sorted = any("std::sort(" in later for _, later in lines[index : index + 6])
            if (match := walk.search(line)) and not is_sorted:
                name = match[1] or match[2]
                yield f"{place}: {name} is unordered, and machines must not walk such a container"


def check_packages(root: pathlib.Path) -> Iterator[str]:
    """Yields where a package in moolink/ imports, at module level, one that is not below it."""
    for path in sorted((root / "moolink").glob("*/**/*.py")):
        name = path.relative_to(root)
        package = name.parts[1]
        if package not in PACKAGES:
            yield f"{name}:1: {package} is no package of tools/check_layers.py"
            continue
        allowed = below(package, PACKAGES)
        for statement in at_import(ast.parse(path.read_text(), filename=str(name))):
            for imported in imported_modules(statement):
                first = imported.removeprefix("moolink.").split(".")[0]
                if imported != first and first in PACKAGES.keys() - allowed:
                    yield f"{name}:{statement.lineno}: {package} must not import {imported}"


def check_python(root: pathlib.Path) -> Iterator[str]:
    """Yields where a Python tree imports a framework that it may not."""
    for path in sorted({p for tree in PYTHON_TREES for p in (root / tree).rglob("*.py")}):
        name = path.relative_to(root).as_posix()
        # The deepest tree that holds the file says what it may import.
        tree = max((t for t in PYTHON_TREES if name.startswith(f"{t}/")), key=len)
        module = ast.parse(path.read_text(), filename=name)
        everywhere = (node for node in ast.walk(module) if isinstance(node, ast.stmt))
        statements = everywhere if tree in NEVER else at_import(module)
        for statement in statements:
            for imported in imported_modules(statement):
                framework = imported.removeprefix("moolink.").split(".")[0]
                if framework in FRAMEWORKS - PYTHON_TREES[tree]:
                    where = "" if tree in NEVER else " at module level"
                    yield (f"{name}:{statement.lineno}: {tree}/ must not import {imported}{where}")


def at_import(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (found for part in child.orelse for found in (part, *at_import(part)))
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from at_import(child)


def imported_modules(statement: ast.AST) -> list[str]:
    """Returns the absolute names of the modules that an import statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and statement.level == 0:
        if statement.module == "moolink":
            return [f"moolink.{alias.name}" for alias in statement.names]
        return [statement.module]
    return []


def main() -> int:
    """Checks the tree given as argument, by default the one this file lies in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=here)
    root = parser.parse_args().root
    offences = [*check_cpp(root), *check_units(root), *check_machines(root)]
    shared = dict(shared_members(root))
    offences += [*check_shared(shared), *check_packages(root), *check_python(root)]
    for offence in offences:
        print(offence)
    if count := sum(map(len, shared.values())):
        largest = sorted(shared, key=lambda name: -len(shared[name]))[:3]
        names = ", ".join(f"{len(shared[name])} of {name.split()[1]}" for name in largest)
        print(f"members that several sources of their class use: {count}, most: {names}")
    return int(bool(offences))


if __name__ == "__main__":
    sys.exit(main())
