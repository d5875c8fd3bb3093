"""Entry point of ``moolink``: picks the command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import moolink
from moolink.internal.installation import why_no_core, why_stale

COMMANDS = ("run", "launch", "replay", "top", "dump", "doctor")
USAGE = """\
usage: moolink COMMAND ...

commands:
  run      start an embedded broker and N peers of a script: moolink run -n 2 -m package.module
  launch   start a job: of a file or a script, here or on several hosts: moolink launch job.toml
  replay   serve the tables of a replay: moolink replay tables.toml --listen 0.0.0.0:4432
  top      show a running job: its groups, members and rates (needs moolink-broker --http)
  dump     show the state of a process: moolink dump PID
  doctor   show this machine's features for moolink, and why others are missing

'moolink COMMAND --help' explains a command; 'moolink --version' prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command named by `argv` (default: the process's arguments); returns its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(USAGE)
        return 2
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0
    if command == "--version":
        print(f"moolink {moolink.__version__}")
        return 0
    if command in COMMANDS:
        if command != "doctor" and (missing := why_no_core()) is not None:
            sys.stderr.write(f"moolink: {missing}\n")
            return 1
        if command != "doctor" and (stale := why_stale()) is not None:
            sys.stderr.write(f"moolink: {stale}\n")
        # Imported here: a command must not pay for the others' imports.
        return int(importlib.import_module(f"moolink.cli.{command}").main(rest))
    import difflib  # only for this error

    close = difflib.get_close_matches(command, COMMANDS, 1)
    meant = f": did you mean {close[0]!r}?" if close else ""
    sys.stderr.write(f"moolink: unknown command {command!r}{meant}\n\n{USAGE}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
