"""`moolink top`: order, filter and keys."""

from __future__ import annotations

import fcntl
import http.server
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from rich.console import Console

from moolink.cli.top import COLUMNS, Size, TopError, View, _screen, read
from tests.dashboard.dashboards import Served


def member(name: str, steps: float | None, state: str = "up") -> dict[str, Any]:
    rates = {} if steps is None else {"steps": steps}
    return {"name": name, "group": "", "host": "h", "state": state, "rates": rates}


def test_sorting_and_filtering() -> None:
    job = {"members": [member("b", 3), member("a", None), member("c", 10, "gone")]}
    view = View()
    assert [m["name"] for m in view.members(job)] == ["a", "b", "c"]
    while COLUMNS[view.column].title != "Steps/s":
        view.press(">")
    assert [m["name"] for m in view.members(job)] == ["c", "b", "a"], "the fastest first"
    view.press("r")
    assert [m["name"] for m in view.members(job)] == ["b", "c", "a"], "unknown ones stay last"
    for key in "/gonX\x7f":
        view.press(key)
    assert [m["name"] for m in view.members(job)] == ["c"]
    view.press("q")
    assert not view.ended, "q is a letter of the filter"
    view.press("\r")
    view.press("q")
    assert view.ended


def job_of(*members: dict[str, Any]) -> dict[str, Any]:
    more = {
        "role": "peer",
        "version": None,
        "pid": 1,
        "why": "",
        "memory": 0,
        "latency": None,
        "age": 1,
    }
    return {
        "broker": {"name": "broker"},
        "uptime": 1,
        "groups": [{"name": "g", "members": [], "epoch": 1, "history": [], "models": []}],
        "members": [more | one for one in members],
    }


def lines(job: dict[str, Any], view: View, size: Size) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=False, width=size.columns)
    console.print(_screen(job, view, None, size))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_names_do_not_control_the_terminal() -> None:
    hostile = member("\x1b[2J", 1, "\x07") | {"host": "\x1b]0;title\x07", "role": "\x1b"}
    text = "\n".join(lines(job_of(hostile), View(), Size(200, 0)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "?[2J" in text


def test_a_narrow_terminal_leaves_columns_out() -> None:
    job = job_of(*(member(f"a-long-name-of-a-member-{i}", 5) for i in range(3)))
    text = lines(job, View(), Size(80, 0))
    header = next(line for line in text if "Name" in line)
    assert "…" not in "".join(text)
    assert header.split() == ["Name", "▲", "State", "Role", "Process", "Version", "Steps/s"]
    assert len(lines(job, View(), Size(1000, 0))[2].split()) == len(COLUMNS) + 3  # ▲, 2 B/s


def test_what_is_wrong_is_said_above_the_members() -> None:
    stuck = member("a", 5, "stuck") | {"why": "its loop has not called moolink for 42 s"}
    job = job_of(stuck, member("b", 5))
    assert lines(job, View(), Size(100, 0))[2].strip() == (
        "a is stuck: its loop has not called moolink for 42 s"
    )


def test_members_of_one_name_are_told_apart() -> None:
    of_groups = [member("x", 5, "stuck") | {"group": group, "why": "it hangs"} for group in "ab"]
    text = lines(job_of(*of_groups), View(), Size(100, 0))
    assert [line.strip() for line in text[2:4]] == [f"{g}/x is stuck: it hangs" for g in "ab"]
    assert [line.split()[0] for line in text[-2:]] == ["a/x", "b/x"]
    view = View()
    view.filter = "b/"
    assert [m["group"] for m in view.members(job_of(*of_groups))] == ["b"]


def test_progress_and_normal_ends() -> None:
    job = job_of(member("a", 5), member("b", None, "left"))
    model = {"name": "m", "version": 3, "awaited": "", "waiting_for": [], "slowest": None}
    model |= {"totals": {"steps": 2e6}, "target": {"steps": 1e7}, "left": 300.0}
    job["groups"][0] |= {"members": ["a"], "models": [model]}
    text = lines(job, View(), Size(200, 0))
    assert "1 member  up 1s" in text[0]
    line = "g  1 member; m: version 3, 2.0M of 10.0M steps, about 5min left"
    assert text[1].strip() == line


def test_more_members_than_rows() -> None:
    job = job_of(*(member(f"m{i:03}", 5) for i in range(100)))
    view = View()
    text = lines(job, view, Size(120, 24))
    assert len(text) <= 24
    assert "(1 to 20 of 100)" in text[-1]
    for _ in range(3):
        view.press("j")
    text = lines(job, view, Size(120, 24))
    assert text[3].split()[0] == "m003"
    for _ in range(200):
        view.press("j")
        lines(job, view, Size(120, 24))
    assert "(81 to 100 of 100)" in lines(job, view, Size(120, 24))[-1]


class Answers(http.server.BaseHTTPRequestHandler):
    """Another server than a dashboard, which keeps the keys that it is sent."""

    answer = b"{}"
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        status = 302 if self.answer.startswith(b"http") else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.answer.decode())
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def other() -> Iterator[str]:
    Answers.keys.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no JSON", b"http://localhost:1/"])
def test_another_server_is_no_dashboard(
    other: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(TopError, match=r"no dashboard at|answers 302"):
        read(other, "K")


@pytest.mark.parametrize("url", ["http://localhost:abc", "http://[", "http:////host", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(TopError, match="no dashboard at"):
        read(url, None)


def test_the_brokers_own_port_is_no_dashboard(served: Served) -> None:
    with pytest.raises(TopError, match="no dashboard at"):
        read("http://" + served.address.removeprefix("tcp://"), None)


def test_a_wrong_key_is_not_printed(other: str) -> None:
    with pytest.raises(TopError) as caught:
        read(other, "SECRET\nX: y")
    assert "SECRET" not in str(caught.value)
    assert Answers.keys == []


def test_the_key_goes_to_no_proxy(
    other: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", other)
    assert read(served.url, "K")["members"] == []
    assert Answers.keys == []


@pytest.mark.parametrize(("end", "status"), [(b"q", 0), (b"\x03", 128 + signal.SIGINT)])
def test_in_a_terminal(served: Served, end: bytes, status: int) -> None:
    served.join("[red]a")
    served.wait_for({"[red]a": "up"})
    terminal, theirs = pty.openpty()
    top = subprocess.Popen(
        [sys.executable, "-m", "moolink", "top", served.url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "30"},
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )
    os.close(theirs)
    shown = b""
    while b"[red]a" not in shown:
        shown += os.read(terminal, 65536)
    os.write(terminal, end)
    rest = b""
    while top.poll() is None:
        try:
            rest += os.read(terminal, 65536)
        except OSError:
            break
    assert top.wait(20) == status
    assert b"Traceback" not in rest
    os.close(terminal)
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert "g  1 member, " in text
