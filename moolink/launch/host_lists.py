"""Slurm's lists of hosts: ``node[01-03,7],gpu1``."""

from __future__ import annotations

import re

_MOST = 65536  # hosts


def expand(text: str) -> list[str]:
    """Returns the hosts that a list names, in its order.

    Raises:
        ValueError: the text is no such list.
    """
    hosts = [host for part in _split(text) for host in _expand_one(part)]
    if not hosts or not all(hosts):
        raise ValueError(f"{text!r} is no list of hosts")
    return hosts


def _split(text: str) -> list[str]:
    """Cuts a list at the commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no list of hosts: its brackets do not match")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth != 0:
        raise ValueError(f"{text!r} is no list of hosts: its brackets do not match")
    return [*parts, text[start:]]


def _expand_one(part: str) -> list[str]:
    """Expands the first brackets, then the rest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers = [number for item in inside.split(",") for number in _range(item)]
    tails = _expand_one(after)
    if len(numbers) * len(tails) > _MOST:
        raise ValueError(f"{part!r} names more than {_MOST} hosts")
    return [before + number + tail for number in numbers for tail in tails]


def _range(item: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
    if match is None:
        raise ValueError(f"[{item}] is no range of numbers in a list of hosts")
    first, last = match[1], match[2] or match[1]
    if not 0 <= int(last) - int(first) < _MOST:
        raise ValueError(f"[{item}] is no range of numbers in a list of hosts")
    # Numbers keep the zeros that fill the first one up: 08-10 is 08, 09, 10.
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
