"""What a launcher settles before it starts a job: the group's name, and where the token lies."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from moolink.internal import tokens
from moolink.launch.description import Job


def group_of(job: Job) -> str:
    """Returns the job's group: as given, or one that no other job has."""
    return job.group or f"run-{secrets.token_hex(6)}"


def token_path(job: Job) -> str | None:
    """Returns the file of the job's token; ``None``: its peers are to be insecure.

    Raises:
        moolink.AuthError: the token cannot be read or made.
    """
    if job.insecure or (job.token_file is None and tokens.says_insecure(os.environ)):
        return None
    path = job.token_file or os.environ.get(tokens.FILE_VARIABLE)
    if path:
        tokens.read(path)  # a peer's complaint would come later, and from each
    else:
        path = str(tokens.own()[1])
    return os.path.abspath(path)


def local_security(job: Job) -> dict[str, str]:
    """Says to the processes of this machine, in their environment, where the token lies."""
    path = token_path(job)
    if path is None:
        return {tokens.FILE_VARIABLE: "", tokens.INSECURE_VARIABLE: "1"}
    return {tokens.FILE_VARIABLE: path, tokens.INSECURE_VARIABLE: ""}


def token_text(security: Mapping[str, str]) -> str | None:
    """Returns the text of the token that `local_security` names, for other machines."""
    path = security[tokens.FILE_VARIABLE]
    return "".join(f"{key.text()}\n" for key in tokens.read(path)) if path else None
