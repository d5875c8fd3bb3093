"""A launcher's settings before it starts a job: the group's name, and the token's path."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from moolink import tokens
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
    """Returns variables that give the processes of this machine the token's path."""
    return _variables(token_path(job))


def write_token(text: str | None, folder: str) -> dict[str, str]:
    """Writes a token that came from the launcher; returns variables with its path."""
    if text is None:
        return _variables(None)
    path = os.path.join(folder, "token")
    tokens.write(path, tokens.parse(text, "the launcher's token"))
    return _variables(path)


def _variables(path: str | None) -> dict[str, str]:
    insecure = "1" if path is None else ""
    return {tokens.FILE_VARIABLE: path or "", tokens.INSECURE_VARIABLE: insecure}


def token_text(security: Mapping[str, str]) -> str | None:
    """Returns the text of the token that `local_security` names, for other machines."""
    path = security[tokens.FILE_VARIABLE]
    return "".join(f"{key.text()}\n" for key in tokens.read(path)) if path else None
