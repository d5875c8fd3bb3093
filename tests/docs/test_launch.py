"""The descriptions and examples of docs/launch.md are understood and run as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from moolink.launch import Job
from tests.docs.examples import ROOT, examples_of, run_example

PAGE = "docs/launch.md"


def test_the_description_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL)
    path = tmp_path / "job.toml"
    path.write_text(text)
    job = Job.from_toml(str(path))
    assert [role.name for role in job.roles] == ["learner", "evaluator"]


def test_the_call_launches() -> None:
    call, _ = examples_of(PAGE)
    output = run_example(call).stdout
    for line in ("[learner 0] hello from learner-0", "[actor 1] hello from actor-1"):
        assert line in output


def test_a_process_that_is_alone_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("MOOLINK_PEER", "MOOLINK_NUM", "MOOLINK_BROKER")):
            monkeypatch.delenv(name)
    _, place = examples_of(PAGE)
    assert re.fullmatch(r"peer 0 1 \d+ False alone\n", run_example(place).stdout)


def test_the_table_of_a_role_has_all_its_keys() -> None:
    import dataclasses

    from moolink.launch import Role

    text = (ROOT / PAGE).read_text()
    for kind in (Job, Role):
        for field in dataclasses.fields(kind):
            assert field.name == "roles" or re.search(rf"\| .*`{field.name}`.* \|", text), (
                field.name
            )
