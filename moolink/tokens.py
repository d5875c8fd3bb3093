"""Tokens and groups' keys, with which a peer proves its identity, and their files.

A token is 32 random bytes, as text ``moolink-token:`` and 64 hexadecimal digits. It is the key of a
whole job. The key of a group is derived from it: ``moolink-group-key:``, digits, ``:``, the group's
name. A file holds one key a line: the first is shown to others, all are accepted, so that a new one
can be spread while the old one is in use.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moolink import files
from moolink.errors import AuthError
from moolink.internal import logs

__all__ = ["Key", "new", "parse", "read", "write"]  # for users

TOKEN_PREFIX = "moolink-token:"
GROUP_PREFIX = "moolink-group-key:"
FILE_VARIABLE = "MOOLINK_TOKEN_FILE"
INSECURE_VARIABLE = "MOOLINK_INSECURE"

_MOST_BYTES = 65536  # of a token file
_told_insecure = False


class Key(NamedTuple):
    """A token, or a group's key: for ``Rpc(token=)`` and ``Broker(token=)``.

    Attributes:
        secret: 32 bytes.
        group: the name of the group that it is the key of; "": a token, the key of a whole job.
    """

    secret: bytes
    group: str = ""

    def __repr__(self) -> str:
        """For tracebacks and logs: contains no secret."""
        return f"<{self.describe()}>"

    def text(self) -> str:
        """Returns its line in a token file."""
        digits = self.secret.hex()
        return f"{GROUP_PREFIX}{digits}:{self.group}" if self.group else TOKEN_PREFIX + digits

    def of_group(self, name: str) -> Key:
        """Derives the key of a group from a token.

        Raises:
            ValueError: this is a group's key, or `name` is no name.
        """
        if self.group:
            raise ValueError(f"this is the key of group {self.group!r}, from which none is derived")
        check_group_name(name)
        return Key(_hkdf(self.secret, f"moolink group {name}".encode(), 32), name)

    def dashboard(self) -> str:
        """Derives the key of the job's dashboard, as text. It shows the job and does not admit
        peers: over HTTP it can be overheard."""
        return _hkdf(self.secret, f"moolink dashboard {self.group}".encode(), 16).hex()

    def describe(self) -> str:
        """Returns its public id, and its job or group: two keys of one id are the same."""
        key_id = _hkdf(self.secret, b"moolink key id", 8).hex()
        return f"key {key_id} of " + (f"group {self.group!r}" if self.group else "the whole job")


class Identity(NamedTuple):
    """An Rpc's identity: its keys (none: insecure), and their origin."""

    keys: list[Key]
    origin: str


def _hkdf(secret: bytes, info: bytes, length: int) -> bytes:
    """HKDF-SHA256 without salt, of at most 32 bytes; as in cpp/crypto/keyring.cc."""
    extracted = hmac.digest(b"", secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")[:length]


def new() -> Key:
    """Returns a new token."""
    return Key(secrets.token_bytes(32))


def check_group_name(name: str) -> None:
    """Raises ValueError unless a group can have this name."""
    if not 0 < len(name.encode()) <= 1024 or re.search(r"[\x00-\x1f\x7f-\x9f]", name):
        raise ValueError(f"{name!r} is no group's name: 1 to 1024 bytes, no control characters")
    if name != name.strip():
        raise ValueError(f"group {name!r} can have no key: its name begins or ends in space")


def parse(text: str, origin: str) -> list[Key]:
    """Returns the keys that `text` holds, one a line; `origin` names it in errors.

    Raises:
        AuthError: it holds none, or something else. The text itself is not repeated.
    """
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key = _parse_line(stripped)
        if key is None:
            raise AuthError(
                f"line {number} of {origin} is no token ({TOKEN_PREFIX}<64 hexadecimal digits>) "
                f"and no group's key ({GROUP_PREFIX}<64 digits>:<group>): make one with "
                "`moolink-broker token new`; the path of a file is given as token_file"
            )
        keys.append(key)
    if not keys:
        raise AuthError(
            f"there is no token in {origin}: make one with `moolink-broker token new --file FILE`"
        )
    if len({key.group for key in keys}) > 1:
        raise AuthError(
            f"the keys in {origin} are not all of the whole job, or of one group: a peer of "
            "several groups holds the job's token, or is an Rpc in each"
        )
    return keys


def _parse_line(line: str) -> Key | None:
    match = re.fullmatch(rf"{TOKEN_PREFIX}([0-9a-f]{{64}})", line)
    if match:
        return Key(bytes.fromhex(match[1]))
    match = re.fullmatch(rf"{GROUP_PREFIX}([0-9a-f]{{64}}):(.+)", line)
    if match:
        try:
            check_group_name(match[2])
        except ValueError:
            return None
        return Key(bytes.fromhex(match[1]), match[2])
    return None


def read(path: str | os.PathLike[str]) -> list[Key]:
    """Returns the keys of a token file.

    Raises:
        AuthError: it cannot be read, is another user's, or can be read by others; or as
            :func:`parse`.
    """
    name = os.fspath(path)
    if name.lstrip().startswith((TOKEN_PREFIX, GROUP_PREFIX)):  # not repeated: it is a secret
        raise AuthError("the path of the token file is itself a token: give the path of its file")
    try:
        # Opened first, then looked at: the file that is checked is the one that is read. A pipe
        # without a writer would block the opener.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            # Also a pipe: the user who puts one at this path would choose the token.
            if stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                _check_owner(name, status)
            text = files.contents(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise AuthError(f"the token file {name} {error}") from None
        raise AuthError(f"cannot read the token file {name}: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise AuthError(f"the token file {name} is larger than {_MOST_BYTES} bytes: is it one?")
    return parse(text.decode("utf-8", "replace"), f"the token file {name}")


def _check_owner(name: str, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthError(
            f"the token file {name} belongs to user {status.st_uid}, who knows its contents: make "
            "one of your own with `moolink-broker token new --file FILE`"
        )
    if status.st_mode & 0o077:
        raise AuthError(
            f"the token file {name} can be read or written by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): run `chmod 600 {name}`, and make a new token if "
            "another user may have read it"
        )


def write(path: str | os.PathLike[str], keys: list[Key]) -> None:
    """Makes a token file that only its owner can read, whole or not at all.

    Raises:
        AuthError: there is such a file already, or it cannot be made.
    """
    target = Path(path)
    try:
        with files.written(target, mode=0o600, replace=False) as file:
            file.write("".join(key.text() + "\n" for key in keys).encode())
    except FileExistsError as error:
        raise AuthError(f"there is a file {target} already: remove it first") from error
    except OSError as error:
        raise AuthError(f"cannot make the token file {target}: {error.strerror}") from error


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's own token lies: in $XDG_CONFIG_HOME, by default ~/.config."""
    folder = environ.get("XDG_CONFIG_HOME", "")
    # A path that is not absolute is to be ignored (XDG Base Directory Specification).
    base = Path(folder) if folder.startswith("/") else Path.home() / ".config"
    return base / "moolink" / "token"


def own(environ: Mapping[str, str] = os.environ) -> tuple[list[Key], Path]:
    """Returns the user's own token, made if there is none yet, and its file.

    Raises:
        AuthError: it can neither be read nor made.
    """
    try:
        path = default_path(environ)
    except RuntimeError as error:  # no home folder
        raise AuthError(f"this user has no home folder for a token: {_WITHOUT_HOME}") from error
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write(path, [new()])
            logs.logger.info("made this user's token, %s", path)
    except (AuthError, OSError) as error:
        if not os.path.exists(path):  # no other process has just made it either
            raise AuthError(
                f"cannot make this user's token {path} ({error}): {_WITHOUT_HOME}"
            ) from error
    return read(path), path


_WITHOUT_HOME = (
    f"set XDG_CONFIG_HOME to a folder that can be written, or {FILE_VARIABLE} to a token file made "
    "with `moolink-broker token new --file FILE`"
)


def identity(
    token: str | os.PathLike[str] | Key | Identity | None = None,
    token_file: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Identity:
    """Returns a peer's identity, as asked, or by default; see moolink.Rpc.

    Raises:
        AuthError: the token cannot be read or made, is none, or others may read its file.
        ValueError: the arguments contradict one another.
    """
    if (token is not None) + (token_file is not None) + insecure > 1:
        raise ValueError("give one of token, token_file and insecure=True")
    if isinstance(token, Identity):
        return token
    if isinstance(token, Key):
        return Identity([token], "the token given as token")
    if isinstance(token, str):
        return Identity(parse(token, "the token given as token"), "the token given as token")
    if token is not None and not isinstance(token, os.PathLike):
        raise TypeError(f"token is text or a path, not {type(token).__name__}")
    path = token_file if token is None else token
    if path is None and not insecure:
        path = environ.get(FILE_VARIABLE) or None
        insecure = says_insecure(environ)
    if insecure:
        _warn_insecure()
        return Identity([], "")
    if path is not None:
        return Identity(read(path), f"the token file {os.fspath(path)}")
    keys, own_path = own(environ)
    return Identity(keys, f"the token file {own_path}")


def says_insecure(environ: Mapping[str, str]) -> bool:
    """Whether the environment wants peers without a token: `moolink run --insecure` does."""
    return not environ.get(FILE_VARIABLE) and environ.get(INSECURE_VARIABLE, "") not in ("", "0")


def _warn_insecure() -> None:
    """Warns, once a process, of the consequences."""
    global _told_insecure
    if _told_insecure:
        return
    _told_insecure = True
    logs.logger.warning(
        "this peer is insecure: it shows no token and asks for none, and any process that reaches "
        "its port may call every function that it defines"
    )
