"""What moolink.launch.yaml writes is read as it was by a reader of YAML."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moolink.launch.yaml import documents

yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install 'moolink[test]'")

TEXT = st.text() | st.sampled_from(
    ["yes", "No", "1.0", "0x10", "1e3", "~", "- a", "a: b", " a", "="]
)
SCALARS = TEXT | st.integers() | st.booleans() | st.none()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(TEXT, TREES, max_size=4), min_size=1, max_size=3))
def test_documents_are_read_as_they_were_written(trees: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(documents(trees))) == trees


def test_text_that_needs_no_quotes_has_none() -> None:
    tree = {"kind": "Job", "spec": {"command": ["python", "a b.py", "--rate=1"], "empty": {}}}
    assert documents([tree]) == (
        '---\nkind: Job\nspec:\n  command:\n  - python\n  - a b.py\n  - "--rate=1"\n  empty: {}\n'
    )
