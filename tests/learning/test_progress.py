"""What a learner says in a terminal, in a pipe, and under a launcher that has a terminal."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from examples.common.progress import Terminal, progress_line
from tests.processes import ROOT
from tests.waiting import PROCESS_LIMIT

ROW = {"steps": 1_234_560, "mean_return": -20.314, "steps_per_second": 3_300.4}


def test_a_line_has_the_totals_and_the_time_left_within_75_columns():
    line = progress_line(ROW, 2_000_000, "2 peers", 252.0)
    assert line == "1,234,560/2,000,000 steps | return -20.31 | 3,300/s of 2 peers | 4:12 left"
    longest = progress_line(ROW | {"steps": 39_999_999}, 40_000_000, "16 peers", 500_000.0)
    assert longest == "40.00/40 M steps | return -20.31 | 3,300/s of 16 peers | 138:53:20 left"
    assert max(map(len, (line, longest))) <= 75
    unknown = progress_line(ROW | {"mean_return": None}, 2_000_000, "1 peer", math.inf)
    assert "| no episode yet |" in unknown
    assert unknown.endswith("| ? left")


@pytest.mark.parametrize(("leads", "said"), [(True, "a\rb\r"), (False, "")])
def test_a_launcher_on_a_terminal_gets_updates(capsys, monkeypatch, leads, said):
    monkeypatch.setenv("MOOLINK_TERMINAL", "1")
    terminal = Terminal(100)
    for text in "ab":
        terminal.progress(10, text, leads=leads)
    assert capsys.readouterr().out == said


def test_a_pipe_gets_lines_of_the_leader(capsys):
    terminal = Terminal(100)
    terminal.progress(10, "a", leads=True)
    terminal.progress(20, "b", leads=False)
    assert capsys.readouterr().out == "a\n"


PROGRAM = """
from examples.common.progress import Terminal, progress_line
with Terminal(2_000_000) as terminal:
    terminal.say("new run")
    for steps in range(0, 2_000_001, 100_000):
        row = {"steps": steps, "mean_return": 1.5, "steps_per_second": 3300.0}
        text = progress_line(row, 2_000_000, "2 peers", 252.0)
        terminal.progress(steps, text, leads=True)
    terminal.say("done")
"""


def test_a_terminal_of_80_columns_has_one_line_that_changes_in_place():
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=theirs, cwd=ROOT, env=environment
    )
    os.close(theirs)
    output = b""
    try:
        while data := os.read(own, 65536):
            output += data
    except OSError:  # it has closed its end
        pass
    finally:
        os.close(own)
    assert done.wait(PROCESS_LIMIT) == 0
    text = output.decode()
    assert "new run" in text
    assert "100 %" in text
    drawn = re.split(r"\r|\n", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    assert max(map(len, drawn)) <= 80
    lines = [line for line in text.split("\n") if "steps |" in line.rpartition("\x1b[2K")[2]]
    assert len(lines) <= 3, "the progress stays on the screen's last line"
