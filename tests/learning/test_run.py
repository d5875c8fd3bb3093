"""The end of a peer's run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from examples.common import checkpoint
from examples.common.options import OptionError
from examples.common.run import Run
from tests.learning.processes import finish, read_until, start
from tests.learning.stubs import Counting, options
from tests.processes import ROOT


def test_after_a_signal_a_peer_writes_its_row_leaves_the_group_and_saves(tmp_path):
    done = []
    rpc = SimpleNamespace(get_name=lambda: "peer")
    group = SimpleNamespace(rpc=rpc, close=lambda: done.append("left"))
    stats = {"contributors": ["peer"], "batch_size": 8, "grad_norm": 1.0}
    accumulator = SimpleNamespace(model_version=lambda: 3, get_gradient_stats=lambda: stats)

    def snapshot():
        done.append("saves")
        return {"parameters": {"w": np.ones(2)}, "optimizer": {}}

    run = Run(options(save_dir=tmp_path), Counting(2))
    run.totals, run._leads = {"steps": 5}, True
    run._start_files()
    run.curve.append = lambda row: done.append(("row", row["steps"]))
    run.curve.plot = lambda title: done.append("plots")
    with pytest.raises(SystemExit), run.joined(group, accumulator, snapshot):
        os.kill(os.getpid(), signal.SIGTERM)
        run.idle()
    assert list(dict.fromkeys(done)) == [("row", 5), "left", "saves", "plots"]
    assert checkpoint.load(tmp_path)["totals"] == {"steps": 5}


def test_seconds_go_on_over_a_resume_and_the_start_does_not_count_as_learning(tmp_path):
    tree = {"totals": {"steps": 5}, "model_version": 3, "seconds": 1000.0}
    o = options(save_dir=tmp_path, max_seconds=0.0)
    state = {"normalizer": Run(o, Counting(2)).normalizer.state()}
    checkpoint.save(tmp_path, tree | {"options": o.as_dict(), "state": state})
    run = Run(o, Counting(2))
    before = time.monotonic() - run.started
    assert 1000.0 + before <= run.seconds <= 1000.0 + time.monotonic() - run.started
    assert run.counters()["time_is_up"] == 0
    run._begin_to_learn(time.monotonic() - 1.0)
    assert run.counters()["time_is_up"] == 1


def test_a_repeatable_run_waits_for_all_its_peers_also_after_a_checkpoint(tmp_path):
    tree = {"totals": {"steps": 5}, "model_version": 3, "seconds": 1.0}
    given = {"deterministic": True, "num_groups": 1, "num_peers": 2}
    o = options(save_dir=tmp_path, **given)
    state = {"normalizer": Run(o, Counting(2)).normalizer.state()}
    checkpoint.save(tmp_path, tree | {"options": o.as_dict(), "state": state})
    names = ["first"]
    group = SimpleNamespace(members=lambda: names)
    accumulator = SimpleNamespace(wait=lambda timeout: None)

    def is_complete(run, steps):
        run.joined(group, accumulator, dict)
        return run._is_complete(SimpleNamespace(totals={"steps": steps}))

    assert not is_complete(Run(o, Counting(2)), 5)
    assert is_complete(Run(o, Counting(2)), 6)  # the job has gone on, and this peer joins it
    names.append("second")
    assert is_complete(Run(o, Counting(2)), 5)


def test_a_peer_of_a_repeatable_run_with_other_rounds_is_told_the_option(tmp_path):
    o = options(save_dir=tmp_path, deterministic=True, num_groups=1)
    run = Run(o, Counting(2))
    with pytest.raises(OptionError, match="give the --batch-size of the others"):
        run._take_settings(o.round_size + 1, 1)


def test_statistics_are_exchanged_while_the_members_are_those_of_the_round(tmp_path):
    """A newcomer at this version has applied no round: the others would wait for it in vain."""
    given = {"deterministic": True, "num_groups": 1, "num_envs": 2, "batch_size": 2}
    run = Run(options(save_dir=tmp_path, normalize=True, **given), Counting(2))
    run.joined(SimpleNamespace(members=lambda: ["first", "second"]), None, dict)
    exchanged = []
    run.normalizer.exchange_in_order = lambda group, name: exchanged.append(name)
    for version, contributors in enumerate((["first"], ["first", "second"]), start=1):
        stats = {"contributors": contributors}
        run._begin_round(SimpleNamespace(version=version, stats=stats))
    run._begin_round(SimpleNamespace(version=3, stats=None))
    assert exchanged == ["normalizer 2"]


def test_only_the_leader_writes_checksums(tmp_path):
    run = Run(options(save_dir=tmp_path, deterministic=True, num_groups=1), Counting(2))
    accumulator = SimpleNamespace(model_version=lambda: 3)
    run.joined(None, accumulator, lambda: {"parameters": {"w": np.ones(2)}})
    noted = []
    run._checksums = SimpleNamespace(note=lambda version, parameters: noted.append(version))
    for leads in (True, False):
        run._leads = leads
        run._note_checksum()
    assert noted == [3]


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


# The main thread computes in C, where no handler of a signal runs, as in XLA's compiler.
BUSY = """
import hashlib, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from examples.common.run import Run, main
from examples.common.options import ImpalaOptions
from tests.learning.processes import finish, read_until, start
from tests.learning.stubs import Counting, options
folder, leads, repetitions = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rpc = SimpleNamespace(get_name=lambda: "peer")
group = SimpleNamespace(rpc=rpc, close=lambda: print("left"))
stats = {"contributors": [], "batch_size": 0, "grad_norm": None}
accumulator = SimpleNamespace(model_version=lambda: 3, get_gradient_stats=lambda: stats)
sys.argv[1:] = ["--env-id", "CartPole-v1"]
def train(_):
    run = Run(options(save_dir=folder), Counting(2))
    run._leads = bool(leads)
    if leads:
        run._start_files()
    snapshot = lambda: {"parameters": {"w": np.ones(2)}, "optimizer": {}}
    with run.joined(group, accumulator, snapshot):
        run.totals = {"steps": 5}
        print("busy", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", repetitions)
        print("done")
        run.idle()
sys.exit(main(ImpalaOptions, train, train))
"""


@pytest.mark.parametrize("slurm", [False, True])
def test_a_signal_ends_a_process_whose_main_thread_does_not_hear_it(tmp_path, slurm):
    environment = {**os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"} if slurm else None
    process = start("-c", BUSY, str(tmp_path), "0", str(2**31 - 1), env=environment)
    read_until(process, "busy")
    process.send_signal(signal.SIGTERM)
    assert finish(process) == "left\nSIGTERM after 5 steps\n"
    assert process.returncode == (128 + signal.SIGTERM if slurm else 0)
    assert checkpoint.load(tmp_path) is None


def test_a_leader_with_unsaved_rounds_is_waited_for(tmp_path):
    process = start("-c", BUSY, str(tmp_path), "1", str(2 * 10**6))
    read_until(process, "busy")
    process.send_signal(signal.SIGTERM)
    assert {"done", "left"} < set(finish(process).splitlines())
    assert process.returncode == 0
    assert checkpoint.load(tmp_path)["totals"] == {"steps": 5}
