"""Puts the mutants of tests/sim/mutants/*.toml into copies of the machines' sources.

The build of the simulators calls it (README.md says how an entry is written):
`apply.py files` prints the sources that have mutants, by their paths in cpp/; `apply.py copy FILE
OUTPUT` writes the copy of one with all its mutants; `apply.py names OUTPUT` writes a source with
the names of each simulator's mutants. An entry that does not fit its source ends it with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPP = HERE.parent.parent.parent / "cpp"

KEYS = {"file", "in", "find", "first", "mistake", "replace"}


class WrongEntryError(Exception):
    """An entry that cannot be applied."""


@dataclasses.dataclass
class Edit:
    """One place of a mutant in its source."""

    mutant: str
    file: str
    function: str
    find: str
    replace: str

    def place(self, source: str) -> tuple[int, int]:
        """Returns where in `source` the text begins and ends that this replaces."""
        begin, end = 0, len(source)
        if self.function:
            begin = self._only(source, self.function, 0, end, "the file")
            # It ends with its line, or with the next brace that stands where this line begins.
            line = source[source.rfind("\n", 0, begin) + 1 : source.find("\n", begin)]
            indent = " " * (len(line) - len(line.lstrip(" ")))
            end = source.find("\n" if line.endswith("}") else f"\n{indent}}}", begin)
        where = f"`{self.function}`" if self.function else "the file"
        begin = self._only(source, self.find, begin, end, where)
        return begin, begin + len(self.find)

    def _only(self, source: str, text: str, begin: int, end: int, where: str) -> int:
        times = source.count(text, begin, end)
        if times != 1:
            raise WrongEntryError(
                f"cpp/{self.file}: mutant {self.mutant}: {times} times in {where}, not once: {text}"
            )
        return source.index(text, begin, end)


@dataclasses.dataclass
class Mutant:
    """A mistake that the named simulators must catch."""

    name: str
    rule: str
    simulators: list[str]
    edits: list[Edit]


def replacement(name: str, find: str, mistake: str) -> str:
    """Returns `find` with the mistake in its place if the mutant is the active one."""
    if not find.endswith((";", "}")):
        return f'(mutant("{name}") ? {mistake} : {find})'
    if mistake.endswith((";", "}")):
        return f'{{ if (mutant("{name}")) {{ {mistake} }} else {{ {find} }} }}'
    return f'{{ if (!mutant("{name}")) {{ {find} }} }}'


def mutants(folder: Path = HERE) -> Iterator[Mutant]:
    """Yields the entries of all files; raises WrongEntryError."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
            place = f"{path.name}: mutant {name}"
            if name in names:
                raise WrongEntryError(f"{place} is there twice")
            names.add(name)
            rule, simulators = entry.pop("rule", ""), entry.pop("simulators", [])
            if not rule or not simulators:
                raise WrongEntryError(f"{place} names no rule or no simulator")
            for simulator in simulators:
                if not (folder.parent / simulator / "main.cc").exists():
                    raise WrongEntryError(f"{place}: there is no simulator {simulator}")
            parts = entry.pop("edits", [])
            if entry:
                parts.append(entry)
            edits = [edit(place, name, path.stem, part) for part in parts]
            yield Mutant(name, rule, simulators, edits)


def edit(place: str, name: str, folder: str, part: dict[str, str]) -> Edit:
    """Returns the edit that a table describes."""
    if not part.keys() <= KEYS or not {"file", "find"} <= part.keys():
        raise WrongEntryError(f"{place}: has {sorted(part)}, of {sorted(KEYS)}")
    if part["file"].endswith(".h"):
        raise WrongEntryError(f"{place}: sources without mutants include {part['file']}, too")
    find = part["find"].strip()
    if len(part.keys() & {"mistake", "first", "replace"}) > 1:
        raise WrongEntryError(f"{place}: an entry has one of mistake, first and replace")
    if "replace" in part:
        replace = part["replace"].strip()
    elif "first" in part:
        replace = f'if (mutant("{name}")) {{ {part["first"].strip()} }} {find}'
    else:
        replace = replacement(name, find, part.get("mistake", "").strip())
    if f'mutant("{name}")' not in replace:
        raise WrongEntryError(f"{place}: its text does not ask for it")
    return Edit(name, f"{folder}/{part['file']}", part.get("in", "").strip(), find, replace)


def mutated(source: str, edits: list[Edit], name: str) -> str:
    """Returns a source with all edits; compilers and debuggers show the lines of `name`."""
    places = sorted(((*edit.place(source), edit) for edit in edits), key=lambda place: place[:2])
    text, done = f'#include "mutants/mutant.h"\n#line 1 "{name}"\n', 0
    for begin, end, edit in places:
        if begin < done:
            raise WrongEntryError(f"cpp/{edit.file}: mutant {edit.mutant} overlaps another one")
        text += source[done:begin] + edit.replace
        if edit.replace.count("\n") != edit.find.count("\n"):
            line = source.count("\n", 0, end) + 1
            text += f'\n#line {line} "{name}"\n'
        done = end
    return text + source[done:]


def copy(file: str, output: Path) -> None:
    """Writes the copy of cpp/`file` with its mutants; errors name it relative to here."""
    edits = [edit for mutant in mutants() for edit in mutant.edits if edit.file == file]
    source = (CPP / file).read_text(encoding="utf-8")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(mutated(source, edits, os.path.relpath(CPP / file)), encoding="utf-8")


def names_source(all_mutants: list[Mutant]) -> str:
    """Returns the source of mutants_of(), which mutant.h declares."""
    lines = [
        f'    {{"{simulator}", "{mutant.name}"}},\n'
        for mutant in all_mutants
        for simulator in mutant.simulators
    ]
    return f"""#include "mutants/mutant.h"

namespace moolink::sim {{

std::vector<std::string> mutants_of(std::string_view simulator) {{
  static constexpr std::string_view kNames[][2] = {{
{"".join(lines)}  }};
  std::vector<std::string> names;
  for (const auto& [of, name] : kNames) {{
    if (of == simulator) names.emplace_back(name);
  }}
  return names;
}}

}}  // namespace moolink::sim
"""


def main() -> int:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("files")
    of_copy = commands.add_parser("copy")
    of_copy.add_argument("file")
    of_copy.add_argument("output", type=Path)
    commands.add_parser("names").add_argument("output", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "files":
            print(*sorted({edit.file for mutant in mutants() for edit in mutant.edits}), sep="\n")
        elif options.command == "copy":
            copy(options.file, options.output)
        else:
            options.output.write_text(names_source(list(mutants())), encoding="utf-8")
    except (WrongEntryError, tomllib.TOMLDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
