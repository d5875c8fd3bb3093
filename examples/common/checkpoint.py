"""Checkpoints that are whole or not there.

A checkpoint is a zip archive in numpy's `.npz` format: each array of the saved tree under the name
of its place, and the rest of the tree as JSON. It holds no pickle, so reading one runs no code. The
archive's comment, the last bytes of the file, is a seal of `moolink.files`: a line with the
format's version, the file's length, and a checksum (CRC-32C) of all bytes before it. The seal is
checked before anything else is read.
"""

from __future__ import annotations

import copy
import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import moolink
from examples.common.environments import rules_of
from examples.common.options import ATARI_OPTIONS, OptionError, Options
from moolink import files

NAME = "checkpoint.npz"
PREVIOUS = "checkpoint.previous.npz"
_TREE = "tree.json"
_ARRAY, _TUPLE, _ITEMS = "$array", "$tuple", "$items"

_KIND, _VERSION = "learner", 2
_SEAL = files.seal_size(_KIND, _VERSION)
# A job goes on from a checkpoint of the same
_SAME = ("env_id", "hidden_size", "lstm", "frame_size", "normalize", "optimizer")
_MOST_TOLD = 4  # differences of a network that an error names


def save(directory: Path, tree: Mapping[str, Any]) -> Path:
    """Replaces the checkpoint in `directory`; the one before stays as the previous one, unless it
    is damaged.

    `tree` consists of dicts, lists, tuples, numpy arrays, strings, numbers, bools and None.
    The new file is complete and on the disk before it takes the old one's name: whatever happens
    meanwhile (full disk, kill, power cut), the old one survives. Raises OSError.
    """
    path = directory / NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.written(path, previous=PREVIOUS if _is_whole(path) else None) as file:
            _write(file, tree)
            files.seal(file, _KIND, _VERSION, room=_SEAL)
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
        raise moolink.FileError("; ".join(faults), path=str(directory / NAME))
    return None


def check_can_go_on(options: Options, saved: dict[str, Any]) -> None:
    """Raises OptionError if the checkpoint is that of another job, or of one that is done."""
    if (what := other_job(options, saved["options"])) is not None:
        raise OptionError(f"the checkpoint in {options.run_dir} {what}; {remedy(options)}")
    if options.mode == "train" and is_done(options, saved):
        steps = saved["totals"]["steps"]
        raise OptionError(
            f"the checkpoint in {options.run_dir} has learned from {steps:,} steps already; "
            f"give more than --total-steps {options.total_steps}, or {remedy(options)}"
        )


def other_job(options: Options, theirs: Mapping[str, Any]) -> str | None:
    """Says in what a run of the options `theirs` differs, if these cannot go on from it."""
    mine = options.as_dict()
    for name in _SAME:
        if (name in mine) != (name in theirs):  # another algorithm
            return f"is of {theirs.get('learner', 'another learner')}, not of {mine['learner']}"
        if options.mode == "evaluate" and name == "optimizer":
            continue
        if name in mine and mine[name] != theirs[name]:
            option = "--" + name.replace("_", "-")
            return f"is of {option} {theirs[name]}, not {mine[name]}"
    # What was learned may be played by other rules, but does not go on with them.
    for name in ATARI_OPTIONS if options.mode == "train" and options.is_atari else ():
        option = "--" + name.replace("_", "-")
        if name not in theirs:
            return f"is of an earlier version of this program, without {option}"
        if not _is_same_game(options, theirs, name):
            have, want = (
                "the id's default" if x is None else x for x in (theirs[name], mine[name])
            )
            return f"is of {option} {have}, not {want}"
    return None


def _is_same_game(options: Options, theirs: Mapping[str, Any], name: str) -> bool:
    """Whether the game is the same by both values of an option: one may be the id's default."""
    if theirs[name] == getattr(options, name):
        return True
    others = copy.copy(options)
    setattr(others, name, theirs[name])
    return rules_of(others) == rules_of(options)


def is_done(options: Options, saved: Mapping[str, Any]) -> bool:
    """Whether a job of these options has nothing left to learn."""
    return bool(saved["totals"].get("steps", 0) >= options.total_steps)


def remedy(options: Options) -> str:
    """What to do about a folder that is not for this job."""
    if options.mode == "evaluate":
        return "give the --save-dir of another job"
    return "give another --save-dir, or --no-resume to start anew"


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
            f"{'; '.join(differences[:_MOST_TOLD])}; {remedy(options)}",
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


def _is_whole(path: Path) -> bool:
    try:
        with files.open_data(path) as file:
            files.check_seal(file, path, _KIND, _VERSION)
    except (OSError, moolink.FileError):
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    with files.naming(path), files.open_data(path) as file:
        files.check_seal(file, path, _KIND, _VERSION)
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
