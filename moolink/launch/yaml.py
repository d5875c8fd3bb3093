"""YAML as people write it, from dicts, lists, text, numbers and booleans."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Text that every YAML reader takes for text without quotes; the rest is quoted as in JSON.
_PLAIN = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.-]*( [A-Za-z0-9/_.-]+)*")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# Words that YAML 1.1 does not read as text.
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def documents(trees: Sequence[Mapping[str, Any]]) -> str:
    """Returns a stream of documents, one for each tree."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(tree)) for tree in trees)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            lines = list(_lines(inner))
            yield f"- {lines[0]}"
            yield from (f"  {line}" for line in lines[1:])
    else:
        yield _scalar(value)


def _entry(key: str, value: Any) -> Iterator[str]:
    nested = isinstance(value, Mapping | list | tuple) and bool(value)
    if not nested:
        yield f"{key} {_scalar(value)}"
        return
    yield key
    # Lists stand under their key, as kubectl prints them.
    indent = "  " if isinstance(value, Mapping) else ""
    yield from (f"{indent}{line}" for line in _lines(value))


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON writes characters beyond 16 bits as two, which YAML does not put together again.
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
