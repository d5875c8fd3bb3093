"""The command line of ``moolink run`` and ``moolink launch``: a job's options, then its script."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from moolink.launch.description import GRACE

# Scripts seldom have these. Many have a `--group` or `--connect`.
_OF_LAUNCHERS = {"-n", "--peers", "--restart", "--restarts", "--cores", "--cores-each", "--hosts"}


def add_job_options(parser: argparse.ArgumentParser, title: str, broker_option: str) -> None:
    """Adds the options of a job."""
    shared = parser.add_argument_group(title)
    shared.add_argument("--group", help="the group's name (default: unique to this job)")
    shared.add_argument(
        broker_option,
        dest="broker",
        metavar="HOST:PORT",
        help="use this running broker; start none",
    )
    shared.add_argument(
        "--token-file",
        metavar="FILE",
        help="the job's token (default: $MOOLINK_TOKEN_FILE, or the user's own, made at first use)",
    )
    shared.add_argument(
        "--insecure",
        action="store_true",
        help="use no token: any process that reaches a port can take part",
    )
    shared.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help=f"time between SIGTERM and SIGKILL when the job is ended (default {GRACE:g})",
    )


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], missing: str
) -> tuple[argparse.Namespace, list[str]]:
    """Returns a command's options, and the script with its arguments, kept verbatim.

    Args:
        missing: the error if no script is given.
    """
    own, target = _split(parser, argv)
    options = parser.parse_args(own)
    if not target:
        parser.error(missing)
    if options.insecure and options.token_file is not None:
        parser.error("give one of --token-file and --insecure")
    _tell_of_late_options(parser, argv, own, target)
    return options, target


def of_job(options: argparse.Namespace) -> dict[str, Any]:
    """Returns those of add_job_options that were given, as arguments of a Job."""
    names = ("group", "broker", "token_file", "grace")
    given = {name: getattr(options, name) for name in names}
    found = {name: value for name, value in given.items() if value is not None}
    return found | ({"insecure": True} if options.insecure else {})


def require(parser: argparse.ArgumentParser, script: str) -> None:
    """Ends the command if there is no such script."""
    if not os.path.exists(script):
        hint = "" if script.endswith(".py") else f" (a module is run with -m {script})"
        parser.error(f"no such script: {script}{hint}")


def _tell_of_late_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], own: list[str], target: list[str]
) -> None:
    """Says that an option of the launcher after the script, where newcomers put it, is the
    script's."""
    if "--" in argv[: len(argv) - len(target)]:
        return  # the user knows where the script's arguments begin
    end = 2 if target[0] == "-m" else 1
    known = {name for action in parser._actions for name in action.option_strings}
    for argument, following in itertools.pairwise([*target[end:], ""]):
        name = _name_of(argument)
        if name in _OF_LAUNCHERS & known and name not in map(_name_of, own):
            print(
                f"{parser.prog}: {argument} is an argument of the script, for it comes after it; "
                f"options of {parser.prog} come before the script: "
                f"{parser.prog} {argument if argument != name else f'{name} {following}'} "
                f"{shlex.join(target[:end])}",
                file=sys.stderr,
            )


def _name_of(option: str) -> str:
    """An option without a value that is written with it: `-n2`, `--peers=2`."""
    if option.startswith("--"):
        return option.partition("=")[0]
    return option[:2] if option[2:].isdigit() else option


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cuts `argv`. argparse's REMAINDER would drop a "--" that belongs to the script."""
    takes_value = {
        name for action in parser._actions if action.nargs != 0 for name in action.option_strings
    }
    index = 0
    while index < len(argv):
        argument = argv[index]
        if argument == "-m":
            return list(argv[:index]), list(argv[index:]) if index + 1 < len(argv) else []
        if argument == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not argument.startswith("-"):
            return list(argv[:index]), list(argv[index:])
        index += 2 if argument in takes_value else 1
    return list(argv), []
