"""The description of a job: its roles, and the options that all of them share."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from moolink import files, tokens
from moolink.errors import FileError

GRACE = 10.0  # seconds: to save a checkpoint of some GB; a second signal ends the job at once
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,38}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS = re.compile(r"\[?[^\s\[\]]+\]?:\d{1,5}")


@dataclasses.dataclass(frozen=True)
class Role:
    """Processes of a job that run the same command.

    Args:
        name: of letters, digits and ``-``, unique in the job; ``broker`` is taken.
        command: the program and its arguments. A first word that is ``-m`` or ends in ``.py`` is
            run by Python: the one that runs the launcher, or the one given for the hosts.
        count: how many processes run it.
        env: environment variables that they get besides the launcher's.
        restarts: how many times failed processes of this role are started again, all together.
        cores: cores of each process; ``None``: they share those of their machine.
        gpus: GPUs of each process, which it finds in ``CUDA_VISIBLE_DEVICES``.
        elastic: whether the job goes on without them: their ends never end the job, and the job
            does not wait for them.
        hosts: where they run when the job is launched on hosts: ``HOST`` or ``HOST:COUNT``, each
            with a user before it or not (``user@HOST``). Empty: on those given for the job.

    Raises:
        ValueError: an argument is invalid. The message names the role and the key.
    """

    name: str
    command: Sequence[str]
    count: int = 1
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    cores: int | None = None
    gpus: int = 0
    elastic: bool = False
    hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Checks all, and makes copies that cannot be changed."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"role {self.name!r}: name must be 1 to 40 letters, digits and '-' between them"
            )
        if self.name == "broker":
            raise ValueError("role 'broker': name is taken: every job has a broker")
        self._set("command", _strings(self._key("command"), self.command))
        if not self.command or not self.command[0]:
            raise ValueError(f"{self._key('command')} is empty: give the program and its arguments")
        if self.command[0] == "-m" and len(self.command) == 1:
            raise ValueError(f"{self._key('command')} has no module after -m")
        _whole(self._key("count"), self.count, 1)
        _whole(self._key("restarts"), self.restarts, 0)
        _whole(self._key("gpus"), self.gpus, 0)
        if self.cores is not None:
            _whole(self._key("cores"), self.cores, 1)
        _boolean(self._key("elastic"), self.elastic)
        self._set("env", _variables(self._key("env"), self.env))
        self._set("hosts", _strings(self._key("hosts"), self.hosts))

    def argv(self, python: str) -> list[str]:
        """The command with `python` before it where it is a script or a module."""
        is_python = self.command[0] == "-m" or self.command[0].endswith(".py")
        return [python, *self.command] if is_python else list(self.command)

    def _key(self, key: str) -> str:
        return f"role {self.name!r}: {key}"

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)  # frozen for others


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that a job is, wherever it runs.

    Args:
        name: of letters, digits and ``-``; the job's name in places that have names for jobs.
        roles: at least one.
        group: name of the group; ``None``: one that no other job has.
        token_file: file of the job's token; ``None``: ``$MOOLINK_TOKEN_FILE``, or the user's own.
        insecure: whether peers show no token and ask for none.
        broker: ``HOST:PORT`` of a running broker; ``None``: one is started with the job.
        grace: seconds between SIGTERM and SIGKILL when the job is ended. The job ends as soon as
            all processes have ended. A second signal to the launcher kills them at once.

    Raises:
        ValueError: an argument is invalid. The message names the key.
    """

    name: str
    roles: Sequence[Role]
    group: str | None = None
    token_file: str | None = None
    insecure: bool = False
    broker: str | None = None
    grace: float = GRACE

    def __post_init__(self) -> None:
        """Checks all, and makes copies that cannot be changed."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"job: name is {self.name!r}; it must be 1 to 40 letters, digits and '-' between"
            )
        object.__setattr__(self, "roles", tuple(self.roles))
        if not self.roles or not all(isinstance(role, Role) for role in self.roles):
            raise ValueError("job: roles must be one Role or several")
        names = [role.name for role in self.roles]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"job: two roles have the name {twice[0]!r}")
        for key in ("group", "token_file", "broker"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"job: {key} is {value!r}; it must be text")
        if self.group is not None:
            tokens.check_group_name(self.group)
        _boolean("job: insecure", self.insecure)
        if self.insecure and self.token_file is not None:
            raise ValueError("job: give one of token_file and insecure")
        if self.broker is not None and not _ADDRESS.fullmatch(self.broker):
            raise ValueError(f"job: broker is {self.broker!r}; it must be HOST:PORT")
        if isinstance(self.grace, bool) or not isinstance(self.grace, int | float):
            raise ValueError(f"job: grace is {self.grace!r}; it must be a number of seconds")
        if not 0 <= self.grace < float("inf"):
            raise ValueError(f"job: grace is {self.grace!r}; it must be at least 0 seconds")

    @property
    def count(self) -> int:
        """How many processes the roles have together."""
        return sum(role.count for role in self.roles)

    @classmethod
    def of_command(
        cls,
        command: Sequence[str],
        count: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
        cores: int | None = None,
        gpus: int = 0,
        name: str = "job",
        **options: Any,
    ) -> Job:
        """A job of one role, ``peer``.

        Args:
            command: as in :class:`Role`, as are ``count`` to ``gpus``.
            count: how many peers.
            env: environment variables.
            restarts: how many times failed peers are started again, all together.
            cores: cores of each peer.
            gpus: GPUs of each peer.
            name: of the job.
            options: the others of :class:`Job`.
        """
        role = Role("peer", command, count, env or {}, restarts, cores, gpus)
        return cls(name, [role], **options)

    @classmethod
    def from_toml(cls, path: str) -> Job:
        """Reads a job from a TOML file: the job's keys, and a table ``[[role]]`` for each role.

        Raises:
            FileError: the file is not understood. The message names the line, or role and key.
            OSError: it cannot be read.
        """
        given = files.read_toml(path)
        try:
            return cls._of_tables(given)
        except ValueError as error:
            raise FileError(f"{path}: {error}", path=path) from error

    @classmethod
    def _of_tables(cls, given: dict[str, Any]) -> Job:
        tables = given.pop("role", None)
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ValueError("job: there is no table [[role]], with the keys name and command")
        _only_fields("job", given, cls, without=("roles",))
        return cls(**({"name": "job"} | given), roles=[_role(table) for table in tables])


def _role(table: dict[str, Any]) -> Role:
    where = f"role {table.get('name', '?')!r}"
    _only_fields(where, table, Role)
    for key in ("name", "command"):
        if key not in table:
            raise ValueError(f"{where}: {key} is missing")
    if isinstance(table["command"], str):
        try:
            table = table | {"command": shlex.split(table["command"])}
        except ValueError as error:
            raise ValueError(f"{where}: command: {error}") from error
    return Role(**table)


def _only_fields(
    where: str, given: Mapping[str, Any], kind: type[Any], without: Sequence[str] = ()
) -> None:
    known = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: {key} is no key of it; there are {', '.join(known)}")


def _strings(where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{where} is {value!r}; it must be a list of strings")
    for item in value:
        if not isinstance(item, str) or "\0" in item:
            raise ValueError(f"{where} has {item!r} in it; it must be a list of strings")
    return tuple(value)


def _variables(where: str, value: Any) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}; it must be a table of strings")
    for name, text in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"{where} has {name!r} in it, which is no name of a variable")
        if not isinstance(text, str) or "\0" in text:
            raise ValueError(f"{where}: {name} is {text!r}; it must be a string")
    return dict(value)


def _whole(where: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where} is {value!r}; it must be a whole number, at least {least}")


def _boolean(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}; it must be true or false")
