"""Where a run's files are. Each run has a folder of its own: `runs/ENV/LEARNER/TIME`.

The group's leader alone writes, so the peers of a job need one folder. The first leader makes it
when the job begins, not before, so that a start that is refused leaves nothing. It tells the others
with the state that every member gets from the leader: a later leader goes on there. A folder
is locked while a process writes to it, so that another job does not go on with a run under way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moolink
from examples.common import checkpoint
from examples.common.options import ATARI_OPTIONS, OptionError, Options
from moolink import files
from moolink.launch import place

OPTIONS = "options.json"
_PATH_OF_RUN = re.compile(r"runs(/(?!\.)[\w.-]+){3}")  # as another peer tells it
# Options of the network and of the environments, which an evaluation takes from the run's.
_PLAYED = ("env_id", "hidden_size", "lstm", "frame_size", "normalize", "precision", *ATARI_OPTIONS)


class RunFolder:
    """The folder of this process's run.

    Attributes:
        path: None until a new run has one.
        saved: the checkpoint to go on from, or None.
    """

    def __init__(self, options: Options) -> None:
        """Finds the checkpoint to go on from. Makes nothing.

        Raises:
            OptionError: the checkpoint in `--save-dir` is of another job, or of one that is done.
            moolink.FileError: it cannot be read.
        """
        self._options = options
        self.path = options.save_dir
        self.saved: dict[str, Any] | None = None
        self._is_given, self._lock = options.save_dir is not None, -1
        self._why_new = ""
        if self.path is None:
            self._find()
        elif (found := self._load(self.path)) is not None:
            checkpoint.check_can_go_on(options, found)
            self.saved = found

    def make(self) -> Path:
        """Makes the folder of a run that this process leads, and locks it. Returns it.

        Where it cannot be made, each file that is written there says so, and the job goes on.
        """
        while self.path is None:
            path = self._options.run_dir / time.strftime("%Y%m%d-%H%M%S")
            try:
                path.mkdir(parents=True)
            except FileExistsError:  # another job's of this second
                continue
            except OSError:
                pass
            self._go_to(path)
        with contextlib.suppress(OSError):  # also file systems without locks
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock < 0:
                self._lock = os.open(self.path, os.O_RDONLY)  # to the end of the process
                fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits while another process looks
        return self.path

    def told(self, path: str | None) -> None:
        """Takes the folder in which the group's leader writes, unless `--save-dir` is given."""
        if not self._is_given and path is not None and _PATH_OF_RUN.fullmatch(path):
            self._go_to(Path(path))

    def for_others(self) -> str | None:
        """What the leader tells them: None for a folder of its own choice."""
        return None if self._is_given else self.make().as_posix()

    def begins(self, steps: int) -> str:
        """Says where a run begins or goes on, at this step."""
        path = self.make()
        if self.saved is not None and self.saved["totals"].get("steps", 0) == steps:
            return f"resumed from {path} at step {steps:,}"
        return (
            f"writes to {path} from step {steps:,}" if steps else f"new run {path}{self._why_new}"
        )

    def write_options(self) -> None:
        """Writes the options as text. Raises OSError."""
        with files.written(self.make() / OPTIONS) as file:
            file.write((json.dumps(self._options.as_dict(), indent=2) + "\n").encode())

    def _find(self) -> None:
        """Looks for the newest run of these options."""
        for path in with_checkpoint(self._options.run_dir):
            theirs = read_options(path)
            if checkpoint.other_job(self._options, theirs) is not None:
                continue  # of another network: as though it were not there
            if _is_in_use(path) and not self._is_of_restarted_job(theirs):
                self._why_new = f" ({path.name} is in use)"
            elif (found := self._load(path)) is not None:
                if checkpoint.is_done(self._options, found):
                    self._why_new = f" ({path.name} has all its steps)"
                else:
                    self._go_to(path)
                    self.saved = found
            return

    def _load(self, path: Path) -> dict[str, Any] | None:
        """The checkpoint in a folder, if it is to go on."""
        if self._options.resume:
            try:
                return checkpoint.load(path)
            except moolink.FileError as error:
                what = f"{error}; {checkpoint.remedy(self._options)}"
                raise moolink.FileError(what, path=error.path) from error
        # `--no-resume` is for the job's first start, not for that after a failure.
        found = checkpoint.load(path) if place().restarted else None
        return found if found and self._is_of_restarted_job(found["options"]) else None

    def _is_of_restarted_job(self, theirs: Mapping[str, Any]) -> bool:
        """Whether this process was started again, and the run is that of its job."""
        return place().restarted and theirs.get("group") == self._options.group

    def _go_to(self, path: Path) -> None:
        self.path = self._options.save_dir = path


def with_checkpoint(directory: Path) -> list[Path]:
    """The runs in a learner's folder that have a checkpoint and their options; the newest first."""
    names = (checkpoint.NAME, checkpoint.PREVIOUS)
    runs = [path.parent for path in directory.glob(f"*/{OPTIONS}")]
    return sorted((run for run in runs if any((run / x).exists() for x in names)), reverse=True)


def read_options(run: Path) -> dict[str, Any]:
    """The options of a run. Raises moolink.FileError if the file is not as it was written."""
    path = run / OPTIONS
    try:
        found = json.loads(files.read_text(path, "a run's options"))
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise moolink.FileError(f"{path} is not a run's options: {found}", path=str(path))
    return found


def played(options: Options, given: Path | None) -> dict[str, Any]:
    """The options that an evaluation takes from the run that it plays: that in the folder `given`,
    else the newest one of this learner and environment.

    Raises:
        OptionError: there is no such folder.
    """
    newest = next(iter(with_checkpoint(options.run_dir)), None)
    run = given or newest
    if given is not None and not given.exists():
        raise OptionError(f"no folder {given}: give the --save-dir of a job")
    if run is None or not (run / OPTIONS).exists():
        return {}
    saved = read_options(run)
    return {"save_dir": run, **{k: saved[k] for k in _PLAYED if k in saved and hasattr(options, k)}}


def _is_in_use(path: Path) -> bool:
    """Whether a process of this host, or of one that shares the file system, writes to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # file systems without locks
        return False
    finally:
        os.close(descriptor)
    return False
