"""Checkpoints that are whole or not there.

A checkpoint is a zip archive in numpy's `.npz` format: each array of the saved tree under the name
of its place, and the rest of the tree as JSON. It holds no pickle, so reading one runs no code. The
archive's comment, the last bytes of the file, is a seal: a line with the format's version, the
file's length, and a checksum (CRC-32C) of all bytes before it. The seal is checked before
anything else is read.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import moolink
from examples.common.options import OptionError, Options
from moolink import files

NAME = "checkpoint.npz"
PREVIOUS = "checkpoint.previous.npz"
_TREE = "tree.json"
_ARRAY, _TUPLE, _ITEMS = "$array", "$tuple", "$items"

_VERSION = 2
_LINE = f"moolink learner {_VERSION}\n".encode()
_SEAL = len(_LINE) + 8 + 4  # bytes: the line, the file's length, the checksum; little-endian
_FOUND = re.compile(rb"moolink learner (\d{1,9})\n(.{8})(.{4})", re.DOTALL)
_MOST_COMMENT = 65535  # bytes of a zip archive's comment at most
_MOST_TOLD = 4  # differences of a network that an error names
_AT_ONCE = 8 << 20  # bytes that are summed together
_DIRECTORY_END = b"PK\x05\x06"  # of a zip archive; 22 bytes with an empty comment


def save(directory: Path, tree: Mapping[str, Any]) -> Path:
    """Replaces the checkpoint in `directory`; the one before stays as the previous one.

    `tree` consists of dicts, lists, tuples, numpy arrays, strings, numbers, bools and None.
    The new file is complete and on the disk before it takes the old one's name: whatever happens
    meanwhile (full disk, kill, power cut), the old one survives. Raises OSError.
    """
    path = directory / NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.written(path, previous=PREVIOUS) as file:
            _write(file, tree)
            _append_seal(file)
    except OSError as error:
        kept = "the one there is untouched" if path.exists() else "there is none yet"
        what = f"checkpoint {path} was not written: {error.strerror or error}; {kept}"
        raise OSError(error.errno, what, str(path)) from error
    return path


def load(directory: Path) -> dict[str, Any] | None:
    """The checkpoint in `directory`, or None if it has none.

    If it is damaged, a warning names it, and the previous one is read in its place. Raises
    moolink.FileError, or OSError, if no file that is there can be read.
    """
    faults = []
    for path in (directory / NAME, directory / PREVIOUS):
        try:
            tree = _read(path)
        except FileNotFoundError:
            continue
        except (OSError, moolink.FileError) as error:
            faults.append(f"checkpoint {path} cannot be read: {error}")
            continue
        for fault in faults:
            warnings.warn(f"{fault}; going on from {path}", RuntimeWarning, stacklevel=2)
        return tree
    if faults:
        raise moolink.FileError(
            "; ".join(faults) + "; remove the files to start anew, or pass --no-resume",
            path=str(directory / NAME),
        )
    return None


def check_can_go_on(options: Options, saved: dict[str, Any]) -> None:
    """Raises OptionError if the checkpoint is that of another job, or of one that is done."""
    playing = options.mode == "evaluate"
    mine, theirs = options.as_dict(), saved["options"]
    for name in ("env_id", "hidden_size", "lstm", "frame_size", "normalize", "optimizer"):
        want, have = mine.get(name), theirs.get(name)
        if have != want and not (playing and name == "optimizer"):
            option = "--" + name.replace("_", "-")
            raise OptionError(
                f"the checkpoint in {options.run_dir} is of {option} {have}, not {want}; "
                "give another --save-dir, or --no-resume to start anew"
            )
    steps = saved["totals"].get("steps", 0)
    if not playing and steps >= options.total_steps:
        raise OptionError(
            f"the checkpoint in {options.run_dir} has learned from {steps:,} steps already; "
            f"give more than --total-steps {options.total_steps}, or --no-resume to start anew"
        )


def parameters(
    options: Options, saved: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The checkpoint's parameters and buffers, for a network with those of `like`.

    Raises moolink.FileError if they are of another network: the environment has changed.
    """
    found: dict[str, np.ndarray] = saved["parameters"]
    mine = {name: tuple(array.shape) for name, array in like.items()}
    theirs = {name: tuple(array.shape) for name, array in found.items()}
    differences = [
        f"{name} is {theirs.get(name, 'not in it')}, here {mine.get(name, 'not there')}"
        for name in sorted(mine | theirs)
        if mine.get(name) != theirs.get(name)
    ]
    if differences:
        path = options.run_dir / NAME
        raise moolink.FileError(
            f"the checkpoint {path} is of another network or environment: "
            f"{'; '.join(differences[:_MOST_TOLD])}; give another --save-dir, or --no-resume to "
            "start anew",
            path=str(path),
        )
    return found


def _write(file: BinaryIO, tree: Mapping[str, Any]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(_encode(tree, "tree", arrays))
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        archive.writestr(_TREE, text)
        archive.comment = bytes(_SEAL)


def _append_seal(file: BinaryIO) -> None:
    """Writes the seal in the place that the archive has for it."""
    length = file.seek(-_SEAL, os.SEEK_END) + _SEAL
    start = _LINE + length.to_bytes(8, "little")
    checksum = files.crc32c(start, _sum(file, length - _SEAL))
    file.seek(-_SEAL, os.SEEK_END)
    file.write(start + checksum.to_bytes(4, "little"))


def _sum(file: BinaryIO, length: int) -> int:
    """The checksum of the file's first bytes."""
    file.seek(0)
    checksum = 0
    while length > 0:
        part = file.read(min(length, _AT_ONCE))
        if not part:
            break  # another program is cutting the file: the checksum will differ
        checksum = files.crc32c(part, checksum)
        length -= len(part)
    return checksum


def _check_seal(file: BinaryIO, path: Path) -> None:
    """Raises moolink.FileError unless each byte of the file is as it was written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(-min(size, _MOST_COMMENT), os.SEEK_END)
    end = file.read()
    seals = list(_FOUND.finditer(end))
    if not seals:
        raise moolink.FileError(f"{path} {_without_seal(file, end, size)}", path=str(path))
    version, length, checksum = seals[-1].groups()
    after = len(end) - seals[-1].end()
    if int(version) != _VERSION:
        what = f"is of version {int(version)}, and this program reads version {_VERSION} only"
    elif after > 0:
        what = f"is longer than it should be: {after} of its {size} bytes come after its end"
    elif int.from_bytes(length, "little") != size:
        what = f"has {size} bytes, and should have {int.from_bytes(length, 'little')}"
    elif files.crc32c(_LINE + length, _sum(file, size - _SEAL)) != int.from_bytes(
        checksum, "little"
    ):
        what = f"is damaged: the checksum of its {size} bytes is wrong"
    else:
        return
    raise moolink.FileError(f"{path} {what}", path=str(path))


def _without_seal(file: BinaryIO, end: bytes, size: int) -> str:
    file.seek(0)
    if file.read(2) != b"PK":
        return f"is no checkpoint of a learner ({size} bytes)"
    if end[-22:].startswith(_DIRECTORY_END):
        return f"is of version 1, and this program reads version {_VERSION} only"
    return f"is cut off after {size} bytes, or its end is damaged"


def _read(path: Path) -> dict[str, Any]:
    with files.naming(path), files.open_data(path) as file:
        _check_seal(file, path)
        try:
            with zipfile.ZipFile(file) as archive:
                tree: dict[str, Any] = _decode(json.loads(archive.read(_TREE)), archive)
                return tree
        except (ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
            # Its checksum is right: another program has written it.
            raise moolink.FileError(f"{path} is not understood: {error}", path=str(path)) from error


def _encode(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            arrays[name] = value
            return {_ARRAY: name}
        case list():
            return [_encode(v, f"{name}.{i}", arrays) for i, v in enumerate(value)]
        case tuple():
            return {_TUPLE: [_encode(v, f"{name}.{i}", arrays) for i, v in enumerate(value)]}
        case Mapping() if all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {key: _encode(v, f"{name}.{key}", arrays) for key, v in value.items()}
        case Mapping() if all(isinstance(key, (str, int)) for key in value):
            return {_ITEMS: [[k, _encode(v, f"{name}.{k}", arrays)] for k, v in value.items()]}
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold")


def _decode(value: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(value, list):
        return [_decode(v, archive) for v in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        with archive.open(value[_ARRAY] + ".npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    if _TUPLE in value:
        return tuple(_decode(v, archive) for v in value[_TUPLE])
    if _ITEMS in value:
        return {key: _decode(v, archive) for key, v in value[_ITEMS]}
    return {key: _decode(v, archive) for key, v in value.items()}
