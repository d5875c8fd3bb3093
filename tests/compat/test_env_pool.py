"""EnvPool as moolib's programs make it: by a fork, so that any function makes an environment."""

from __future__ import annotations

import subprocess
import sys

from tests.compat.conftest import PACKAGE
from tests.processes import ROOT
from tests.waiting import PROCESS_LIMIT

PROGRAM = """
import sys
sys.path.insert(0, {package!r})
import moolib
import torch

START = 3

class Counter:
    def __init__(self, start):
        self.start = start

    def reset(self):
        self.n = self.start
        return {{"n": torch.tensor([self.n])}}

    def step(self, action):
        self.n += int(action)
        return {{"n": torch.tensor([self.n])}}, float(self.n), self.n >= 5

def main():
    start = START
    if {busy}:
        rpc = moolib.Rpc()  # its threads forbid a fork
    pool = moolib.EnvPool(lambda: Counter(start), num_processes=2, batch_size=4, num_batches=1)
    for wrong in (torch.zeros(4), torch.zeros(5).long()):
        try:
            pool.step(0, wrong)
        except RuntimeError as error:
            print(type(error).__mro__[1].__name__)
    try:
        pool.step(7, torch.zeros(4).long())
    except RuntimeError as error:
        print(type(error).__mro__[1].__name__)
    pool.step(0, torch.zeros(4, dtype=torch.int64)).result()
    outputs = pool.step(0, torch.arange(4)).result()
    print(outputs["n"].flatten().tolist(), outputs["reward"].tolist(), outputs["done"].tolist())

main()
"""


def output_of(busy: bool) -> list[str]:
    program = PROGRAM.format(package=str(PACKAGE), busy=busy)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PROCESS_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EXPECTED = [
    "TypeError",
    "ValueError",
    "IndexError",
    "[3, 4, 3, 3] [3.0, 4.0, 5.0, 6.0] [False, False, True, True]",
]


def test_a_local_function_makes_the_environments() -> None:
    assert output_of(busy=False) == EXPECTED


def test_without_a_fork_the_workers_are_a_fresh_programs() -> None:
    assert output_of(busy=True) == EXPECTED
