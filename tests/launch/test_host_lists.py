"""Slurm's lists of hosts."""

from __future__ import annotations

import pytest

from moolink.launch.host_lists import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node", ["node"]),
        ("a,b-1.c", ["a", "b-1.c"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[3,04]x", ["r1n3x", "r1n04x", "r2n3x", "r2n04x"]),
    ],
)
def test_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", "a[", "a]", "a[1", "a[[1]]", "a[x]", "a[3-1]", "a[1-999999999]", "a[]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)
