"""moolib's interface on moolink; see :mod:`moolink.compat.moolib`."""

from moolink.compat import moolib as _moolib
from moolink.compat.moolib import *  # noqa: F403
from moolink.compat.moolib import __all__, __version__  # noqa: F401


def __getattr__(name: str) -> object:
    return getattr(_moolib, name)
