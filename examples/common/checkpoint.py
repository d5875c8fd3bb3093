"""Checkpoints that are whole or not there.

A checkpoint is a zip archive in numpy's `.npz` format: each array of the saved tree under the name
of its place, and the rest of the tree as JSON. It holds no pickle, so reading one runs no code, and
every member has a checksum.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.options import OptionError, Options

NAME = "checkpoint.npz"
PREVIOUS = "checkpoint.previous.npz"
_TREE = "tree.json"
_ARRAY, _TUPLE, _ITEMS = "$array", "$tuple", "$items"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and says what to do."""


def save(directory: Path, tree: Mapping[str, Any]) -> Path:
    """Replaces the checkpoint in `directory`; the one before stays as the previous one.

    `tree` consists of dicts, lists, tuples, numpy arrays, strings, numbers, bools and None.
    The new file is complete and on the disk before it takes the old one's name: whatever happens
    meanwhile (full disk, kill, power cut), the old one survives. Raises CheckpointError.
    """
    path = directory / NAME
    temporary = directory / f".{NAME}.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                _write(file, tree)
                file.flush()
                os.fsync(file.fileno())
            _keep_previous(directory)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} was not written: {error.strerror or error}; "
            + ("the one there is untouched" if path.exists() else "there is none yet")
        ) from error
    return path


def load(directory: Path) -> dict[str, Any] | None:
    """The checkpoint in `directory`, or None if it has none.

    An unreadable one is named in a warning and the previous one is read in its place. Raises
    CheckpointError if no file that is there can be read.
    """
    faults = []
    for path in (directory / NAME, directory / PREVIOUS):
        try:
            tree = _read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            faults.append(f"checkpoint {path} ({_size(path)} bytes) cannot be read: {error}")
            continue
        for fault in faults:
            warnings.warn(f"{fault}; going on from {path}", RuntimeWarning, stacklevel=2)
        return tree
    if faults:
        raise CheckpointError(
            "; ".join(faults) + "; remove the file to start anew, or pass --no-resume"
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


def _keep_previous(directory: Path) -> None:
    # A second name for the old file, put in place by one rename: NAME never vanishes.
    path, link = directory / NAME, directory / f".{PREVIOUS}.{os.getpid()}.tmp"
    if path.exists():
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
        except OSError:  # not every file system has hard links
            shutil.copyfile(path, link)
        os.replace(link, directory / PREVIOUS)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _write(file: Any, tree: Mapping[str, Any]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        arrays: dict[str, np.ndarray] = {}
        text = json.dumps(_encode(tree, "tree", arrays))
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        archive.writestr(_TREE, text)


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        tree: dict[str, Any] = _decode(json.loads(archive.read(_TREE)), archive)
        return tree


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
