"""``moolink replay``: serves tables that a TOML file describes, and keeps a checkpoint of them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moolink.internal import logs
from moolink.internal.signals import not_ignored

if TYPE_CHECKING:
    from moolink.replay import Limiter, Replay, Selector, Table

_SELECTORS = ("Uniform", "Prioritized", "Fifo", "Lifo", "MinHeap", "MaxHeap")
_LIMITERS = ("MinSize", "SampleToInsertRatio")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moolink replay",
        description="Serves the tables of a replay to moolink.ReplayClient.",
        epilog="TABLES is a TOML file with a [[table]] each, whose keys are the options of "
        "moolink.replay.Table; see docs/replay.md.",
    )
    parser.add_argument("tables", metavar="TABLES", help="the tables, a TOML file")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where clients connect (default: a free port of this machine only)",
    )
    parser.add_argument(
        "--connect",
        metavar="HOST:PORT",
        default=os.environ.get("MOOLINK_BROKER"),
        help="a broker, through which clients find the server by name (default: $MOOLINK_BROKER)",
    )
    parser.add_argument("--peer", metavar="NAME", default="replay", help="this peer's name")
    parser.add_argument("--name", default="replay", help="the replay's name at the peer")
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="restored at the start if it is there, written at the end and every --every seconds",
    )
    parser.add_argument("--every", metavar="SECONDS", type=float, default=300.0)
    parser.add_argument(
        "--no-previous",
        action="store_true",
        help="do not keep the checkpoint before the last one as FILE.previous (default: keep it, "
        "which takes the disk space of a second one)",
    )
    parser.add_argument(
        "--spill",
        metavar="DIRECTORY",
        help="keep the steps in a file in this directory: for tables larger than memory",
    )
    parser.add_argument("--token-file", metavar="FILE", help="the job's token")
    parser.add_argument("--insecure", action="store_true", help="ask for no token")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM, except one that was ignored at the start. Returns the exit
    status, 1 if it cannot begin or cannot write its last checkpoint."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.every > 0:
        parser.error(f"--every must be above 0 seconds, got {options.every:g}")
    # Blocked in every thread that is started from here on, so that the wait below takes them.
    signals = not_ignored((signal.SIGINT, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    import moolink
    from moolink.replay import ReplayServer

    try:
        replay = _open(read_tables(options.tables), options.checkpoint, options.spill)
        token_file, insecure = options.token_file, options.insecure
        rpc = moolink.Rpc(options.peer, token_file=token_file, insecure=insecure)
        server = ReplayServer(rpc, replay, options.name)
        addresses = rpc.listen(options.listen)
        if options.connect:
            rpc.connect(options.connect)
    except (moolink.Error, ValueError, OSError) as error:
        print(f"moolink replay: {error}", file=sys.stderr)
        return 1
    reachable = " ".join(address for address in addresses if address.startswith("tcp://"))
    print(f"moolink replay {options.peer!r} listens on {reachable}", flush=True)
    with rpc, replay, server:
        received = None
        while received is None:
            received = signal.sigtimedwait(signals, options.every)
            if received is not None:
                server.close()  # the last checkpoint has all that clients were told is in
            saved = options.checkpoint is None or _save(
                replay, options.checkpoint, not options.no_previous
            )
        return 0 if saved else 1


def _save(replay: Replay, path: str, keep_previous: bool) -> bool:
    try:
        replay.checkpoint(path, keep_previous=keep_previous)
    except OSError as error:
        logs.logger.error("no checkpoint was written: %s", error)
        return False
    return True


def read_tables(path: str) -> list[Table]:
    """The tables of a TOML file.

    Raises:
        FileError: the file is not understood; the message names the line, or table and option.
        OSError: it cannot be read.
    """
    from moolink import FileError, files

    described = files.read_toml(path)
    tables = described.pop("table", None)
    if (
        described
        or not isinstance(tables, list)
        or not tables
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise FileError(f"{path}: expected one [[table]] or several, and nothing else", path=path)
    made = [_table(path, table) for table in tables]
    names = [table.name for table in made]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FileError(f"{path}: two tables have the name {twice[0]!r}", path=path)
    return made


def _table(path: str, options: dict[str, Any]) -> Table:
    from moolink import FileError
    from moolink.replay import Table

    where = f"{path}: table {options.get('name', '?')!r}"
    given = dict(options)
    try:
        for which in ("sampler", "remover"):
            if which in given:
                given[which] = _selector(given[which])
        if "limiter" in given:
            given["limiter"] = _limiter(given["limiter"])
        return Table(**given)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}", path=path) from error


def _selector(given: Any) -> Selector | None:
    """A name, a table of a name and options, or "none" for no remover."""
    from moolink import replay

    if given == "none":
        return None
    if not isinstance(given, str | dict):
        raise ValueError(f'a selector is a name or a table, such as "Fifo", not {given!r}')
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name not in _SELECTORS:
        raise ValueError(f"a selector is one of {', '.join(_SELECTORS)}, not {name!r}")
    selector: Selector = getattr(replay, name)(**options)
    return selector


def _limiter(given: Any) -> Limiter:
    from moolink import replay

    if not isinstance(given, dict):
        raise ValueError(f'a limiter is a table, such as {{name = "MinSize"}}, not {given!r}')
    options = dict(given)
    name = options.pop("name", None)
    if name not in _LIMITERS:
        raise ValueError(f"a limiter is one of {', '.join(_LIMITERS)}, not {name!r}")
    limiter: Limiter = getattr(replay, name)(**options)
    return limiter


def _open(tables: list[Table], checkpoint: str | None, spill: str | None) -> Replay:
    from moolink import FileError
    from moolink.replay import Replay
    from moolink.replay.checkpoint import previous_of

    if checkpoint is not None:
        if _is_there(checkpoint):
            return Replay.restore(checkpoint, tables, spill=spill)
        if _is_there(previous := previous_of(checkpoint)):
            # Two checkpoints of tables that begin empty would take its place.
            raise FileError(
                f"there is no checkpoint {checkpoint}, but the previous one {previous}: move it to "
                f"{checkpoint} to go on from it, or remove it to begin with empty tables",
                path=checkpoint,
                previous=previous,
            )
    return Replay(tables, spill=spill)


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True  # or an error: a checkpoint that cannot be seen may be there
