"""Values in the messages of errors: a peer may send any, of any size."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST = 200  # characters


class _Shown(reprlib.Repr):
    """Writes no large str, bytes or array in full."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = 100

    def repr_bytes(self, value: bytes | bytearray, level: int) -> str:
        if len(value) <= self.maxstring:
            return repr(value)
        return f"{repr(value[: self.maxstring])[: self.maxstring]}..."

    repr_bytearray = repr_bytes

    def repr_ndarray(self, value: Any, level: int) -> str:
        if value.nbytes <= 1024:
            return self.repr_instance(value, level)
        return f"an array of shape {value.shape} and dtype {cut(str(value.dtype))}"

    def repr_int(self, value: int, level: int) -> str:
        # Python writes no integers of thousands of digits.
        if value.bit_length() > 1024:
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)


_shown = _Shown()


def shown(value: Any) -> str:
    """repr(), or the beginning of it."""
    return cut(_shown.repr(value))


def printable(text: str) -> str:
    """The text with ? for characters that control a terminal, or that a terminal cannot show."""
    return "".join(each if each.isprintable() else "?" for each in text)


def cut(text: str, most: int = _MOST) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
