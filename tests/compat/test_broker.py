"""``python -m moolib.broker``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import moolib
import moolib.broker

from tests.compat.conftest import PACKAGE
from tests.processes import ROOT, killed_at_the_end
from tests.waiting import PROCESS_LIMIT, until


def test_its_default_is_every_interface(capsys: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moolib.broker", "--help"],
        env=os.environ | {"PYTHONPATH": str(PACKAGE), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PROCESS_LIMIT,
        check=True,
    )
    assert "(default: 0.0.0.0:4431)" in done.stdout


def test_peers_meet_at_it() -> None:
    with killed_at_the_end() as processes:
        process = subprocess.Popen(
            [sys.executable, "-m", "moolib.broker", "0.0.0.0:0"],
            env=os.environ | {"PYTHONPATH": str(PACKAGE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        processes.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().split()[-1].rsplit(":", 1)[1]
        with moolib.Rpc("member") as rpc, moolib.Group(rpc, "group") as group:
            rpc.connect(f"127.0.0.1:{port}")
            until(lambda: group.update() or group.active(), "the group")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
