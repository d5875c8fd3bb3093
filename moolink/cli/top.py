"""``moolink top``: a running job in the terminal, as the broker's dashboard knows it."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import signal
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from moolink.internal.shown import printable
from moolink.rpc import naming

DEFAULT = "http://127.0.0.1:4480"
KEY_VARIABLE = "MOOLINK_DASHBOARD_KEY"
_TIMEOUT = 5.0  # seconds


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follows no redirect: the key is only for the dashboard."""


# No proxy may see the key either.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)


class TopError(Exception):
    """The reason why no page can be shown."""


class Column(NamedTuple):
    """A column of the table of members."""

    title: str
    importance: int  # a narrow terminal omits the columns of lowest importance
    value: Callable[[dict[str, Any]], Any]
    show: Callable[[Any], str] = str
    descending: bool = False  # when it is sorted by at first


def main(argv: Sequence[str]) -> int:
    """Shows the job until `q`; returns 1 if the dashboard does not answer."""
    parser = argparse.ArgumentParser(
        prog="moolink top",
        description="Show the groups and members of a job, as the dashboard of its broker knows "
        "them (moolink-broker --http). Keys: q ends, < and > choose the column to sort by, r turns "
        "the order around, / filters by name, host or state, j and k scroll.",
    )
    parser.add_argument(
        "url", nargs="?", default=DEFAULT, help="the dashboard's URL (default: %(default)s)"
    )
    parser.add_argument(
        "--key",
        default=os.environ.get(KEY_VARIABLE),
        help=f"the dashboard's key, where it asks for one (default: ${KEY_VARIABLE})",
    )
    parser.add_argument("--once", action="store_true", help="print the job once, and end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, for programs")
    options = parser.parse_args(argv)
    if options.json and not options.once:
        parser.error("--json goes with --once")
    url = options.url if "//" in options.url else f"http://{options.url}"
    try:
        job = read(url, options.key)
        if options.json:
            print(json.dumps(job, indent=2))
        elif options.once or not sys.stdin.isatty() or not sys.stdout.isatty():
            whole = None if sys.stdout.isatty() else _WHOLE.columns
            console = _console(whole)
            console.print(_screen(job, View(), None, Size(console.width, 0)))
        else:
            _watch(url, options.key)
    except TopError as error:
        print(f"moolink top: {printable(str(error))}", file=sys.stderr)
        return 1
    except (KeyError, TypeError) as error:
        print(f"moolink top: {url} is of another version of moolink ({error!r})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def read(url: str, key: str | None) -> dict[str, Any]:
    """Returns the job (docs/dashboard.md has the schema).

    Raises:
        TopError: the dashboard does not answer.
    """
    if key and not key.strip().isprintable():
        raise TopError("the key has characters that no key has")
    headers = {"Authorization": f"Bearer {key.strip()}"} if key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/job", headers=headers)
        with _OPENER.open(request, timeout=_TIMEOUT) as answer:
            told: dict[str, Any] = json.load(answer)
        if not isinstance(told, dict) or not {"broker", "groups", "members"} <= told.keys():
            raise ValueError("the answer is not that of a dashboard")
    except urllib.error.HTTPError as error:
        if error.code == 401:
            what = "the key is wrong" if key else "a key is needed"
            raise TopError(
                f"{url}: {what}: `moolink-broker token dashboard --token-file FILE` prints it, for "
                f"the token file that the broker was started with; give it with --key or "
                f"${KEY_VARIABLE}"
            ) from None
        raise TopError(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise TopError(
            f"no dashboard at {url}: {reason}; start the broker with "
            "`moolink-broker --http 127.0.0.1:4480`"
        ) from None
    return told


def _watch(url: str, key: str | None) -> None:
    console = _console()
    from rich.live import Live

    view = View()
    job = read(url, key)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        failed: str | None = None
        asked = time.monotonic()
        while not view.ended:
            size = Size(console.width, console.height)
            live.update(_screen(job, view, failed, size), refresh=True)
            for character in pressed(1.0 - (time.monotonic() - asked)):
                view.press(character)
            if time.monotonic() - asked >= 1.0:
                asked = time.monotonic()
                try:
                    job, failed = read(url, key), None
                except TopError as error:
                    failed = str(error)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Characters are read as they are typed; the function waits for some for that many seconds."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed(timeout: float) -> str:
        if not select.select([descriptor], [], [], max(0.0, timeout))[0]:
            return ""
        return os.read(descriptor, 64).decode(errors="ignore")

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class View:
    """The members that are shown, and their order."""

    def __init__(self) -> None:
        self.column = 0
        self.descending = False
        self.filter = ""
        self.typing = False  # the filter
        self.top = 0  # index of the first member on the screen
        self.ended = False

    def press(self, key: str) -> None:
        """A key was pressed."""
        if self.typing:
            if key in "\r\n\x1b":
                self.typing = False
            elif key in "\x7f\b":
                self.filter = self.filter[:-1]
            elif key.isprintable():
                self.filter += key
        elif key in "qQ\x04":
            self.ended = True
        elif key in "<>":
            self.column = (self.column + (1 if key == ">" else -1)) % len(COLUMNS)
            self.descending = COLUMNS[self.column].descending
        elif key in "rR":
            self.descending = not self.descending
        elif key in "jk":
            self.top += 1 if key == "j" else -1
        elif key == "/":
            self.typing, self.filter = True, ""

    def scroll(self, members: int, room: int) -> None:
        """Keeps the screen within the members, of which `room` fit."""
        self.top = max(0, min(self.top, members - room))

    def members(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """The members to show, in order."""
        wanted = self.filter.lower()
        shown = [
            member
            for member in job["members"]
            if wanted in f"{_label(member)} {member['host']} {member['state']}".lower()
        ]
        read = COLUMNS[self.column].value
        known = sorted((m for m in shown if read(m) is not None), key=read)
        unknown = [member for member in shown if read(member) is None]
        return (known[::-1] if self.descending else known) + unknown


class Size(NamedTuple):
    """The size of the terminal, in characters."""

    columns: int
    rows: int  # 0: no limit


_WHOLE = Size(1000, 0)
_MOST_NOTES = 5
ENDED = ("gone", "left")  # states of members that are no longer there


def _console(width: int | None = None) -> Any:
    try:
        from rich.console import Console
    except ModuleNotFoundError as missing:
        from moolink.internal.extras import install_command

        raise TopError(
            f"{missing.name} is not installed: use --once --json, or {install_command('dashboard')}"
        ) from None

    return Console(highlight=False, width=width)


def _screen(job: dict[str, Any], view: View, failed: str | None, size: Size) -> Any:
    """The job as a screen; the table has the columns and rows that fit."""
    from rich.console import Group
    from rich.text import Text

    broker = job["broker"]
    there = sum(member["state"] not in ENDED for member in job["members"])
    up = _duration(job["uptime"])
    head = _line(Text(f"{broker['name']}  {_several(there, 'member')}  up {up}"))
    if failed is not None:
        head = Text(printable(failed), style="bold red")
    groups = [_group_line(group) for group in job["groups"]]
    members = view.members(job)
    notes = [
        _line(Text(f"{_label(member)} is {member['state']}: {member['why']}", style="yellow"))
        for member in members
        if member["why"] and member["state"] not in ("up", "new", "left")
    ][:_MOST_NOTES]
    taken = 3 + len(groups) + len(notes)
    room = size.rows - taken if size.rows else len(members)
    view.scroll(len(members), max(1, room))
    shown = members[view.top : view.top + max(1, room)]
    foot = "q: quit  < >: sort  r: reverse  /: filter  j k: scroll"
    if view.typing or view.filter:
        foot = f"/{view.filter}"
    if len(shown) < len(members):
        foot += f"  ({view.top + 1} to {view.top + len(shown)} of {len(members)})"
    table = _table(shown, view, size.columns)
    keys = [Text(foot, style="dim")] if size.rows else []
    return Group(head, *groups, *notes, table, *keys)


def _group_line(group: dict[str, Any]) -> Any:
    from rich.text import Text

    line = Text()
    line.append(group["name"], style="bold")
    line.append(f"  {_several(len(group['members']), 'member')}")
    if group["history"]:
        _, steps, mean = group["history"][-1]
        line.append(f", {_number(steps)} steps/s")
        if mean is not None:
            line.append(f", return {_number(mean)}")
    for model in group["models"]:
        line.append(f"; {model['name']}: version {model['version']}{_progress(model)}")
        if model["awaited"]:
            still = _duration(model["still"])
            line.append(f", nothing for {still}: waits for {model['awaited']}", style="yellow")
        elif model["waiting_for"]:
            line.append(f", waits for {', '.join(model['waiting_for'])}", style="yellow")
        if model["slowest"]:
            line.append(f", slowest {model['slowest']}", style="yellow")
    return _line(line)


def _progress(model: dict[str, Any]) -> str:
    """How far the totals are from their target, and the time left."""
    totals, target = model["totals"], model["target"]
    parts = [f"{_number(totals.get(name, 0))} of {_number(target[name])} {name}" for name in target]
    if not parts and "steps" in totals:
        parts = [f"{_number(totals['steps'])} steps in all"]
    if model["left"]:
        parts.append(f"about {_duration(model['left'])} left")
    return "".join(f", {part}" for part in parts)


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _line(text: Any) -> Any:
    """One row of the screen; a text that is too long is cut."""
    from rich.text import Text

    return Text(
        printable(text.plain), text.style, spans=text.spans, no_wrap=True, overflow="ellipsis"
    )


def _table(members: list[dict[str, Any]], view: View, width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    texts = {
        column: [printable(column.show(column.value(member))) for member in members]
        for column in COLUMNS
    }
    chosen = _fitting(texts, width)
    table = Table(box=None, padding=(0, 1), expand=False)
    for column in chosen:
        arrow = (" ▼" if view.descending else " ▲") if column is COLUMNS[view.column] else ""
        justify: Any = "right" if column.descending else "left"
        table.add_column(column.title + arrow, justify=justify, no_wrap=True)
    styles = {"gone": "red", "left": "dim"} | dict.fromkeys(
        ("suspected", "silent", "stuck", "idle"), "yellow"
    )
    for i, member in enumerate(members):
        style = styles.get(member["state"], "")
        # Text, not markup: a peer's name may have brackets in it.
        table.add_row(*(Text(texts[column][i], style=style) for column in chosen))
    return table


def _fitting(texts: dict[Column, list[str]], width: int) -> list[Column]:
    """The columns that fit; the least important ones are left out first."""
    widths = {
        column: 2 + max(len(column.title) + 2, *(len(text) for text in of), 0)
        for column, of in texts.items()
    }
    chosen = list(texts)
    for column in sorted(texts, key=lambda one: one.importance):
        if sum(widths[one] for one in chosen) <= width or len(chosen) <= 2:
            break
        chosen.remove(column)
    return chosen


def _label(member: dict[str, Any]) -> str:
    """A member's name; with its group, if it has shown the key of one."""
    return naming.text(naming.joined(member["group"], member["name"]))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}min" if seconds < 5400 else f"{seconds / 3600:.1f}h"


def _latency(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f}us"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f}%"


def _rate(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda member: member["rates"].get(name)


COLUMNS = (
    Column("Name", 9, _label),
    Column("State", 8, lambda m: m["state"]),
    Column("Role", 4, lambda m: m["role"]),
    Column("Process", 5, lambda m: f"{m['host']}:{m['pid']}"),
    Column("Version", 7, lambda m: m["version"], _number, True),
    Column("Steps/s", 6, _rate("steps"), _number, True),
    Column("Calls/s", 0, _rate("calls"), _number, True),
    Column("Sent B/s", 1, _rate("sent"), _number, True),
    Column("Recv B/s", 1, _rate("received"), _number, True),
    Column("CPU", 3, _rate("cpu"), _percent, True),
    Column("Memory", 2, lambda m: m["memory"], _number, True),
    Column("Latency", 1, lambda m: m["latency"], _latency, True),
    Column("Joined", 0, lambda m: m["age"], _duration, True),
)
