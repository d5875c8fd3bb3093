"""Whether moolink's extension module is there, and built from these sources. Needs no numpy.

The build also runs this file: it prints C++ with the digest of the sources, for the module to keep.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def why_no_core() -> str | None:
    """The reason why there is no module ``moolink._core`` for this Python, and the remedy. None:
    there is one, which may still fail to load."""
    if importlib.util.find_spec("moolink._core") is not None:
        return None
    missing = f"moolink's extension module is not in {_PACKAGE}"
    if others := sorted(path.name for path in _PACKAGE.glob("_core.*.so")):
        return (
            f"{missing} for Python {platform.python_version()} ({sys.executable}), only "
            f"{', '.join(others)}: use the Python that it was built for, or {_remedy()}"
        )
    if elsewhere := _elsewhere():
        return (
            f"{missing}, a folder of sources that comes on sys.path before {elsewhere}, where "
            "moolink is installed: start Python in another folder, or take the folder out of "
            f"PYTHONPATH, or {_remedy()}"
        )
    return f"{missing}: {_remedy()}"


def why_stale() -> str | None:
    """A message if the extension module was built from other C++ sources than this checkout's, with
    the remedy. None: it was built from these, or there is no checkout.

    Reads the modification times of some thirty folders, and the sources only if one of these is
    later than the module's: git replaces files, which changes the time of their folder.
    """
    sources = _PACKAGE.parent / "cpp"
    spec = importlib.util.find_spec("moolink._core")
    if spec is None or spec.origin is None or not (sources / "bind").is_dir():
        return None
    try:
        if _last_change(sources) <= os.stat(spec.origin).st_mtime:
            return None
        core, wanted = importlib.import_module("moolink._core"), digest(sources)
    except (OSError, ImportError):  # files that are being replaced, or a module that does not load
        return None
    if hasattr(core, "sources_digest") and core.sources_digest() == wanted:
        return None
    return (
        f"the extension module {spec.origin} was built from other C++ sources than those in "
        f"{sources}, and may not do what the Python files expect: build it again, or {_remedy()}"
    )


def digest(sources: Path) -> str:
    """SHA-256 of the names and contents of a folder's C++ files: 64 hexadecimal digits."""
    files = [*sources.rglob("[!.]*.cc"), *sources.rglob("[!.]*.h")]
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()} {file.relative_to(sources).as_posix()}"
        for file in sorted(files)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _last_change(folder: Path) -> float:
    """The latest modification time of a folder and of those within it."""
    return max(os.stat(path).st_mtime for path, _, _ in os.walk(folder))


def _remedy() -> str:
    root = _PACKAGE.parent
    if (root / "pyproject.toml").exists():
        return f"install the checkout in place with `pip install -v -e {root}`"
    return "install moolink again"


def _elsewhere() -> str | None:
    """A folder of another moolink that has its extension module."""
    for entry in sys.path:
        folder = Path(entry or os.getcwd()).resolve() / "moolink"
        if folder == _PACKAGE or not folder.is_dir():
            continue
        if importlib.machinery.PathFinder.find_spec("_core", [str(folder)]) is not None:
            return str(folder)
    return None


if __name__ == "__main__":
    print(f'extern const char moolink_sources_digest[] = "{digest(Path(sys.argv[1]))}";')
