"""moolib's interface on moolink; see :mod:`moolink.compat.moolib`."""

from typing import TYPE_CHECKING

from moolink.compat import moolib as _moolib
from moolink.compat.moolib import __all__, __version__  # noqa: F401

if TYPE_CHECKING:
    from moolink.compat.moolib import *  # noqa: F403


def __getattr__(name: str) -> object:  # One by one: some import torch, which a broker does without.
    return getattr(_moolib, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
