"""Where the log goes, and what a line of it tells."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from unittest import mock

import pytest

import moolink
from moolink.accumulate import parting
from moolink.accumulate.left_out_rounds import LeftOutRounds
from moolink.accumulate.parameter_sync import ParameterSync
from moolink.env_pool import channel, supervisor
from moolink.errors import StateError
from tests.waiting import PROCESS_LIMIT


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged after ``set_logging``, which comes after every import."""
    taken: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            taken.append(record.getMessage())

    other = logging.Logger("other")
    other.addHandler(Keep())
    moolink.set_logging(types.SimpleNamespace(getLogger=lambda name=None: other))
    yield taken
    moolink.set_logging(logging)


def test_set_logging_reaches_the_end_of_a_job(lines: list[str]) -> None:
    parting.take_news(mock.Mock(side_effect=StateError("from parting")))
    assert lines == ["from parting"]


def test_set_logging_reaches_the_accumulator(lines: list[str]) -> None:
    LeftOutRounds().add(7, mock.MagicMock())
    assert len(lines) == 1
    assert "round 7" in lines[0]


def test_set_logging_reaches_the_env_pool(lines: list[str]) -> None:
    pool = mock.MagicMock()
    news = channel.Recreated(3, "step()", "a traceback")
    pool._links[0].receive_available.return_value = [news]
    supervisor.Supervisor._listen_to_worker(pool, 0)
    assert lines == ["environment 3 raised in step() and was made anew:\na traceback"]


def test_set_logging_reaches_parameter_sync(lines: list[str]) -> None:
    refused = mock.Mock(side_effect=moolink.PeerLost("it closed"))
    ParameterSync._reply(mock.MagicMock(), refused, "peer", 5, None)
    assert lines == ["parameters of version 5 could not be sent: it closed"]


def test_lines_of_a_program_that_configures_nothing_have_time_level_and_process() -> None:
    run = _run("logs.logger.warning('about %s', 'this')")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} WARNING moolink\[\d+\] about this\n", run
    )


def test_a_program_that_configures_logging_gets_each_line_once() -> None:
    configure = "import logging; logging.basicConfig(format='%(message)s')\n"
    assert _run(f"{configure}logs.logger.warning('once')") == "once\n"


def _run(program: str) -> str:
    """What it writes to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", f"from moolink.internal import logs\n{program}"],
        stderr=subprocess.PIPE,
        env=os.environ,
        text=True,
        check=True,
        timeout=PROCESS_LIMIT,
    )
    return done.stderr
