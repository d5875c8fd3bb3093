"""Entry point of ``moolink``: picks the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import moolink

USAGE = """\
usage: moolink COMMAND ...

commands:
  run      start an embedded broker and N peers of a script: moolink run -n 2 -m package.module
  launch   start a job: of a file or a script, here or on several hosts: moolink launch job.toml
  replay   serve the tables of a replay: moolink replay tables.toml --listen 0.0.0.0:4432
  top      show a running job: its groups, members and rates (needs moolink-broker --http)
  dump     show how things stand in a process: moolink dump PID
  doctor   say what this machine offers to moolink, what is missing, and why

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
    # Imported here: a command must not pay for the others' imports.
    if command == "run":
        from moolink.cli.run import main as run

        return run(rest)
    if command == "launch":
        from moolink.cli.launch import main as launch

        return launch(rest)
    if command == "replay":
        from moolink.cli.replay import main as replay

        return replay(rest)
    if command == "top":
        from moolink.cli.top import main as top

        return top(rest)
    if command == "dump":
        from moolink.cli.dump import main as dump

        return dump(rest)
    if command == "doctor":
        from moolink.cli.doctor import main as doctor

        return doctor(rest)
    sys.stderr.write(f"moolink: unknown command {command!r}\n\n{USAGE}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
