"""``moolink run``: an embedded broker and N peers of one script on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
from collections.abc import Sequence

from moolink.cli import script
from moolink.errors import AuthError
from moolink.launch.description import Job
from moolink.launch.launching import launch

_EPILOG = """\
Examples:
  moolink run -n 2 train.py --learning-rate 1e-3             two peers of a script of your own
  moolink run -n 2 -m examples.torch.impala --env-id CartPole-v1
  moolink run -n 2 --connect 10.0.0.1:4431 --group pong train.py      at a broker that runs

Each peer finds in its environment:
  MOOLINK_BROKER      HOST:PORT of the broker
  MOOLINK_GROUP       the group's name (unique to this run unless --group is given)
  MOOLINK_ROLE        "peer"
  MOOLINK_PEER_INDEX  0 ... N-1
  MOOLINK_PEER_NAME   a name that no other peer of the broker has, kept over restarts
  MOOLINK_NUM_PEERS   N
  MOOLINK_RUN_DIR     directory in which the run notes that its job has finished
  MOOLINK_RESTARTED   1 in a peer that was restarted, else 0
  MOOLINK_TERMINAL    1 if a live line is shown (text that ends with a carriage return), else 0
  MOOLINK_CORES       cores this peer should use, at least 1
  MOOLINK_TOKEN_FILE  file of the job's token (with --insecure: MOOLINK_INSECURE=1 instead)
and OMP_NUM_THREADS, MKL_NUM_THREADS, OPENBLAS_NUM_THREADS set to its cores unless already set, and
PYTHONFAULTHANDLER=1 unless already set: a peer that crashes prints its Python stacks.

The first peer that fails ends the job, and its exit status is the job's (128 + n for signal n).
With --restart K failed peers are restarted, K times in all, but not once the job has finished.
"""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of ``moolink run``."""

    job: Job
    cores: int | None


def main(argv: Sequence[str]) -> int:
    """Runs the job that `argv` describes and returns its exit status."""
    options = parse(argv)
    try:
        return launch(options.job, cores=options.cores, program="moolink run")
    except (AuthError, OSError) as error:
        print(f"moolink run: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str]) -> RunOptions:
    """Parses the arguments of ``moolink run``; those after the script are the script's."""
    parser = _parser()
    missing = "no script given: moolink run -n 2 script.py ... or -m package.module ..."
    options, target = script.parse(parser, argv, missing)
    if options.peers < 1:
        parser.error(f"-n must be at least 1, got {options.peers}")
    if options.restart < 0:
        parser.error(f"--restart must be at least 0, got {options.restart}")
    if options.cores is not None and options.cores < 1:
        parser.error(f"--cores must be at least 1, got {options.cores}")
    if options.broker is not None and not _is_address(options.broker):
        parser.error(f"--connect takes HOST:PORT, got {options.broker!r}")
    if target[0] != "-m":
        script.require(parser, target[0])
    group = options.group or f"run-{secrets.token_hex(6)}"
    if options.broker is not None and options.group is None:
        note = f"these peers form the group {group}; others join it with --group {group}"
        print(f"moolink run: {note}", file=sys.stderr)
    try:
        job = Job.of_command(
            [sys.executable, *target],
            options.peers,
            restarts=options.restart,
            **(script.of_job(options) | {"group": group}),
        )
    except ValueError as error:
        parser.error(str(error))
    return RunOptions(job, options.cores)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moolink run",
        usage="moolink run [options] (script.py | -m package.module) [arguments of the script]",
        description="Start an embedded broker and N peers of one script on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--peers", type=int, default=1, help="number of peers (default 1)")
    parser.add_argument(
        "--cores", type=int, help="cores to share out among the peers (default: all available)"
    )
    parser.add_argument(
        "--restart", type=int, default=0, metavar="K", help="restart failed peers, K times in all"
    )
    script.add_job_options(parser, "the job", "--connect")
    return parser
