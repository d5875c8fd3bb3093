"""`moolink run` tells its broker and its peers where the token lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moolink import tokens
from tests.waiting import PROCESS_LIMIT

SCRIPT = """
import os, moolink
with moolink.Rpc(os.environ["MOOLINK_PEER_NAME"]) as rpc:
    rpc.connect(os.environ["MOOLINK_BROKER"])
    with moolink.Group(rpc, os.environ["MOOLINK_GROUP"]) as group:
        while not group.update():
            pass
        print("token", os.environ["MOOLINK_TOKEN_FILE"], "insecure", os.environ["MOOLINK_INSECURE"])
"""


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "moolink", "run", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )


def test_a_named_token_is_that_of_broker_and_peers(tmp_path: Path) -> None:
    path = tmp_path / "job"
    tokens.write(path, [tokens.new()])
    done = run(tmp_path, "--token-file", os.path.relpath(path))
    assert done.returncode == 0, done.stderr
    assert f"token {path} insecure" in done.stdout


def test_insecure_is_passed_on_and_said(tmp_path: Path) -> None:
    done = run(tmp_path, "--insecure")
    assert done.returncode == 0, done.stderr
    assert "token  insecure 1" in done.stdout
    assert "this peer is insecure" in done.stderr


def test_a_token_that_cannot_be_read_is_said_once_and_starts_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--token-file", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("moolink run: cannot read the token file")
