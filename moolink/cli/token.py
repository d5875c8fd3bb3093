"""``moolink-broker token``: makes tokens and groups' keys, and tells them apart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moolink import tokens
from moolink.errors import AuthError

_EPILOG = """\
A file holds one key a line: the first is shown to others, all are accepted. To replace a token, put
the new one below the old one in every file, then above it, then take the old one out; peers read
their file when they start.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs ``moolink-broker token ...``; returns the exit status, 1 if it cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "new":
            return _give([tokens.new()], options.file)
        known = tokens.identity(token_file=options.token_file)
        if not known.keys:
            raise AuthError(f"there is no token: {tokens.INSECURE_VARIABLE} is set")
        if options.command == "group":
            return _give([key.of_group(options.name) for key in known.keys], options.file)
        if options.command == "dashboard":
            print(known.keys[0].dashboard())
            of = f"{known.keys[0].describe()}, from {known.origin}"
            print(f"It is for a broker that was started with {of}.", file=sys.stderr)
            return 0
        print(f"{known.origin}:")
        for key in known.keys:
            print(f"  {key.describe()}")
    except (AuthError, ValueError) as error:
        print(f"moolink-broker token: {error}", file=sys.stderr)
        return 1
    return 0


def _give(keys: list[tokens.Key], file: str | None) -> int:
    if file is None:
        print("\n".join(key.text() for key in keys))
        return 0
    tokens.write(file, keys)
    for key in keys:
        print(f"{file}: {key.describe()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moolink-broker token",
        description="Peers with a job's token may take part in the job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a token for a job")
    group = commands.add_parser(
        "group", help="derive the key of one group, whose holders see and reach that group only"
    )
    group.add_argument("name", metavar="NAME", help="the group's name")
    show = commands.add_parser("show", help="name the keys of a file without telling them")
    dashboard = commands.add_parser(
        "dashboard", help="print the key of the broker's dashboard, with which no peer can join"
    )
    for command in (new, group):
        command.add_argument(
            "--file",
            metavar="FILE",
            help="write it to a new file that only its owner can read, instead of printing it",
        )
    for command in (group, show, dashboard):
        command.add_argument(
            "--token-file",
            metavar="FILE",
            help=f"the token's file (default: ${tokens.FILE_VARIABLE}, or the user's own)",
        )
    return parser
