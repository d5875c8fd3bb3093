"""``moolink launch``: a job of one script or of a file, run here or elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence

from moolink.cli import schedulers, script
from moolink.errors import Error
from moolink.launch.description import Job
from moolink.launch.launching import launch
from moolink.launch.shares import parse_hosts

_EPILOG = """\
The job is a TOML file, or one script whose processes are its only role. Each process finds its
place in its environment, as under 'moolink run', and its role in MOOLINK_ROLE:
moolink.launch.place() reads it. A process that fails is started again as often as its role's
restarts say; after that it ends the job, unless its role is elastic.
"""


@dataclasses.dataclass(frozen=True)
class Runner:
    """A way to run a job.

    Attributes:
        option: by which it is chosen, as in the parsed options.
        add_options: adds the options that are its own.
        run: runs a job and returns its exit status.
    """

    option: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Job, argparse.Namespace], int]


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on several hosts, by SSH")
    group.add_argument(
        "--hosts",
        metavar="HOST[:COUNT],...",
        type=lambda text: text.split(","),
        help="run the processes there, COUNT on each (default: as many on each); user@HOST works",
    )
    group.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="with options: 'ssh -F FILE' (default: ssh)"
    )
    group.add_argument("--python", help="interpreter on the hosts (default: this one's path)")
    group.add_argument("--directory", help="working directory there (default: this one)")
    group.add_argument(
        "--broker-host", metavar="HOST", help="run the broker on this one of them (default: here)"
    )
    group.add_argument(
        "--lost-after",
        metavar="SECONDS",
        type=float,
        default=10.0,
        help="a host that is not heard of for so long is lost (default 10)",
    )


def _run_on_hosts(job: Job, options: argparse.Namespace) -> int:
    """Runs the job on hosts, or on this machine if there are none."""
    return launch(
        job,
        hosts=options.hosts or (),
        ssh=shlex.split(options.ssh),
        python=options.python,
        directory=options.directory,
        broker_host=options.broker_host,
        listen=options.listen,
        lost_after=options.lost_after,
    )


# All ways to run a job; without the option of one of them, it runs on this machine, or on the hosts
# that its file names.
RUNNERS = [
    Runner("hosts", _add_host_options, _run_on_hosts),
    Runner("slurm", schedulers.add_slurm_options, schedulers.run_by_slurm),
    Runner("kubernetes", schedulers.add_kubernetes_options, schedulers.print_manifests),
]


def main(argv: Sequence[str]) -> int:
    """Runs the job that `argv` describes and returns its exit status."""
    parser = _parser()
    missing = "no job given: moolink launch job.toml, or moolink launch -n 2 script.py ..."
    options, target = script.parse(parser, argv, missing)
    chosen = [runner for runner in RUNNERS if getattr(options, runner.option)]
    if len(chosen) > 1:
        names = " and ".join("--" + runner.option.replace("_", "-") for runner in chosen)
        parser.error(f"give one of {names}")
    try:
        job = _job(parser, options, target)
        return (chosen[0].run if chosen else _run_on_hosts)(job, options)
    except ValueError as error:
        parser.error(str(error))
    except (Error, OSError) as error:
        print(f"moolink launch: {error}", file=sys.stderr)
        return 1


def _job(parser: argparse.ArgumentParser, options: argparse.Namespace, target: list[str]) -> Job:
    """The job of a file or of a script, with the command line's options."""
    shared = script.of_job(options)
    if target[0].endswith(".toml"):
        if len(target) > 1:
            parser.error(f"arguments after {target[0]}: those of a role are in its command")
        for name in ("n", "restarts", "cores_each", "gpus_each", "env"):
            if getattr(options, name) is not None:
                parser.error(f"{_spelled(parser, name)} is for scripts: {target[0]} says it")
        try:
            job = Job.from_toml(target[0])
        except OSError as error:
            parser.error(str(error))
        if options.insecure:
            shared["token_file"] = None
        elif options.token_file is not None:
            shared["insecure"] = False
        return dataclasses.replace(job, **shared)
    if target[0].endswith(".py") and not options.hosts:
        script.require(parser, target[0])
    count = options.n
    if count is None:
        hosts = parse_hosts(options.hosts or (), "--hosts")
        count = max(1, sum(share.count or 1 for share in hosts))
    return Job.of_command(
        target,
        count,
        restarts=options.restarts or 0,
        cores=options.cores_each,
        gpus=options.gpus_each or 0,
        env=dict(options.env or ()),
        **shared,
    )


def _spelled(parser: argparse.ArgumentParser, name: str) -> str:
    return next(
        action.option_strings[-1] for action in parser._actions if action.dest == name
    )  # as --help shows it


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moolink launch",
        usage="moolink launch [options] (job.toml | script.py ... | -m package.module ...)",
        description="Start a job's broker and the processes of its roles, and see to them until "
        "the job has ended.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    processes = parser.add_argument_group("the processes of one script")
    processes.add_argument(
        "-n", "--peers", dest="n", type=int, help="how many (default: 1, or as the hosts say)"
    )
    processes.add_argument(
        "--restart", dest="restarts", type=int, metavar="K", help="start failed ones again, K times"
    )
    processes.add_argument(
        "--cores", dest="cores_each", type=int, help="cores of each (default: its share)"
    )
    processes.add_argument("--gpus", dest="gpus_each", type=int, help="GPUs of each (default: 0)")
    processes.add_argument(
        "--env", action="append", type=_variable, metavar="NAME=VALUE", help="may be repeated"
    )
    script.add_job_options(parser, "the job; these win over the options in its file", "--broker")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where the broker listens (default: a free port, on loopback or, with hosts, on all "
        "interfaces)",
    )
    for runner in RUNNERS:
        runner.add_options(parser)
    return parser
