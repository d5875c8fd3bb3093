"""The mutants of the simulators: each fits its source, and a simulator must catch it."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.sim.mutants import apply

CPP = pathlib.Path(__file__).parents[2] / "cpp"

SOURCE = """\
int Table::take() {
  if (left_ == 0) return 0;
  count(1);
  return left_--;
}

bool Table::empty() const { return left_ == 0; }

void Table::clear() {
  count(1);
  left_ = 0;
}
"""

ENTRY = {"rule": "R.", "simulators": ["replay"], "file": "table.cc", "find": "left_--"}


def toml(name: str, entry: dict[str, Any]) -> str:
    return "\n".join(
        [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entry.items()), ""]
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """An empty folder of entries, beside a simulator `replay`."""
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "main.cc").touch()
    (tmp_path / "mutants").mkdir()
    return tmp_path / "mutants"


def mutated(folder: pathlib.Path, **entries: dict[str, Any]) -> list[str]:
    """The lines of SOURCE with these entries, without what is put before it."""
    text = "".join(toml(name, {**ENTRY, **entry}) for name, entry in entries.items())
    (folder / "replay.toml").write_text(text)
    edits = [edit for mutant in apply.mutants(folder) for edit in mutant.edits]
    first, line, *rest = apply.mutated(SOURCE, edits, "../table.cc").splitlines()
    assert (first, line) == ('#include "mutants/mutant.h"', '#line 1 "../table.cc"')
    return rest


def test_every_mutant_fits_its_source() -> None:
    mutants = list(apply.mutants())
    edits = [edit for mutant in mutants for edit in mutant.edits]
    for file in {edit.file for edit in edits}:
        source = (CPP / file).read_text()
        assert apply.mutated(source, [edit for edit in edits if edit.file == file], file) != source
    assert len(mutants) >= 140


def test_a_simulator_names_what_the_entries_say(simulation: Any) -> None:
    wanted = {mutant.name for mutant in apply.mutants() if "replay" in mutant.simulators}
    assert set(simulation("replay").mutants()) == wanted


def test_an_unknown_mutant_is_refused(simulator: Any) -> None:
    done = subprocess.run([simulator("replay"), "--mutant", "no_such"], check=False)
    assert done.returncode == 2


def test_expressions_and_statements(folder: pathlib.Path) -> None:
    entries = {
        "a": {"mistake": "left_"},
        "b": {"in": "Table::take()", "find": "count(1);"},
        "c": {"in": "Table::clear() {", "find": "count(1);", "mistake": "count(2);"},
        "d": {"in": "bool Table::empty()", "find": "left_ == 0", "mistake": "true"},
        "e": {"find": "left_ = 0;", "first": "return;"},
    }
    assert mutated(folder, **entries) == [
        "int Table::take() {",
        "  if (left_ == 0) return 0;",
        '  { if (!mutant("b")) { count(1); } }',
        '  return (mutant("a") ? left_ : left_--);',
        "}",
        "",
        'bool Table::empty() const { return (mutant("d") ? true : left_ == 0); }',
        "",
        "void Table::clear() {",
        '  { if (mutant("c")) { count(2); } else { count(1); } }',
        '  if (mutant("e")) { return; } left_ = 0;',
        "}",
    ]


def test_an_entry_says_its_mistake_in_one_way(folder: pathlib.Path) -> None:
    with pytest.raises(apply.WrongEntryError, match="one of mistake, first and replace"):
        mutated(folder, a={"mistake": "left_", "first": "return 0;"})


def test_later_lines_keep_their_numbers(folder: pathlib.Path) -> None:
    replace = 'mutant("a")\n    ? 0\n    : left_--'
    assert mutated(folder, a={"replace": replace})[3:8] == [
        '  return mutant("a")',
        "    ? 0",
        "    : left_--",
        '#line 4 "../table.cc"',
        ";",
    ]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"find": "left_ == 1"}, "cpp/replay/table.cc: mutant a: 0 times in the file"),
        ({"find": "count(1);"}, "cpp/replay/table.cc: mutant a: 2 times in the file"),
        ({"in": "Table::clear() {"}, "0 times in `Table::clear() {`"),
        ({"in": "Table::wipe()"}, "mutant a: 0 times in the file, not once: Table::wipe"),
        ({"simulators": []}, "mutant a names no rule or no simulator"),
        ({"rule": ""}, "mutant a names no rule or no simulator"),
        ({"simulators": ["reply"]}, "there is no simulator reply"),
        ({"file": "table.h"}, "sources without mutants include table.h"),
        ({"replace": "left_"}, "its text does not ask for it"),
        ({"instead": "left_"}, "instead"),
    ],
)
def test_wrong_entries(folder: pathlib.Path, entry: dict[str, Any], complaint: str) -> None:
    with pytest.raises(apply.WrongEntryError, match="mutant a") as error:
        mutated(folder, a=entry)
    assert complaint in str(error.value)


def test_two_mutants_of_one_text(folder: pathlib.Path) -> None:
    with pytest.raises(apply.WrongEntryError, match="mutant b overlaps another one"):
        mutated(folder, a={}, b={"find": "left_--;"})


def test_two_entries_of_one_name(folder: pathlib.Path) -> None:
    (folder / "group.toml").write_text(toml("a", ENTRY))
    with pytest.raises(apply.WrongEntryError, match="mutant a is there twice"):
        mutated(folder, a={})
