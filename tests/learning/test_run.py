"""The end of a peer's run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from examples.common import checkpoint
from examples.common.run import Run
from tests.learning.stubs import Counting, options
from tests.processes import ROOT


def test_a_signal_makes_a_peer_leave_the_group_before_it_saves(tmp_path):
    done = []
    rpc = SimpleNamespace(get_name=lambda: "peer")
    group = SimpleNamespace(rpc=rpc, close=lambda: done.append("left"))
    accumulator = SimpleNamespace(model_version=lambda: 3)

    def snapshot():
        done.append("saves")
        return {"parameters": {"w": np.ones(2)}, "optimizer": {}}

    run = Run(options(save_dir=tmp_path), Counting(2))
    run.totals, run._leads = {"steps": 5}, True
    with pytest.raises(SystemExit), run.joined(group, accumulator, snapshot):
        os.kill(os.getpid(), signal.SIGTERM)
        run.idle()
    assert done[:2] == ["left", "saves"]
    assert checkpoint.load(tmp_path)["totals"] == {"steps": 5}
    assert not run.curve.csv_path.exists(), "the next leader's"


def test_the_process_ends_after_a_signal_without_the_interpreters_end():
    code = """
import atexit, sys
from examples.common.options import ImpalaOptions
from examples.common.job import Left
from examples.common.run import main
atexit.register(print, "the interpreter's end")
sys.argv[1:] = ["--env-id", "CartPole-v1"]
def train(options):
    print("left")
    raise Left(143)
main(ImpalaOptions, train, train)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (143, "left\n"), done.stderr
