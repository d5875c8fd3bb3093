"""The end of a peer's run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import SimpleNamespace

import numpy as np

from examples.common import checkpoint
from examples.common.options import ImpalaOptions
from examples.common.run import Run, main
from tests.learning.stubs import Counting, options


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
    with run.joined(group, accumulator, snapshot):
        os.kill(os.getpid(), signal.SIGTERM)
        run.idle()
    assert done[:2] == ["left", "saves"]
    assert checkpoint.load(tmp_path)["totals"] == {"steps": 5}
    assert not run.curve.csv_path.exists(), "the next leader's"


def test_the_interpreter_does_not_look_at_all_objects_at_its_end(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["impala", "--env-id", "CartPole-v1"])
    assert main(ImpalaOptions, lambda o: None, lambda o: None) == 0
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
