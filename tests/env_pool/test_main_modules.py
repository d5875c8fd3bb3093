"""Environments of a main module: of a script, of standard input, of `python -c`."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import moolink
from moolink.env_pool import EnvPool
from tests.env_pool import pool_environments as environments
from tests.processes import wait_until_gone

LONG = 60.0
HERE = pathlib.Path(__file__).parent


def test_what_cannot_be_pickled_is_sent_by_cloudpickle():
    with EnvPool(lambda: environments.Counter(7), 1, 1) as pool:
        assert pool.step(0, np.zeros(1, np.int64)).result(LONG)["state"][0, 0] == 7
    lock = threading.Lock()
    with pytest.raises(moolink.Error, match=r"create_env cannot be sent .* such as open files"):
        EnvPool(lambda: lock, 1, 1)


def test_what_cannot_be_pickled_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(moolink.Error, match=r"create_env cannot be sent .* top level of a module"):
        EnvPool(lambda: environments.Counter(0), 1, 1, 1)


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
from moolink.env_pool import EnvPool
import pool_environments

def create():
    return pool_environments.Counter(0)
{guard}
    pool = EnvPool(create, 2, 4, 1)
    pool.step(0, np.zeros(4, int)).result()
    print("stepped", *[made.pid for made in pool._supervisor._made], flush=True)
    {end}
"""


GUARD = 'if __name__ == "__main__":'


def start_script(folder: pathlib.Path, guard: str, end: str) -> subprocess.Popen:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(folder=str(HERE), guard=guard, end=end))
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_functions_of_the_main_script_work_and_exit_needs_no_close(tmp_path):
    script = start_script(tmp_path, GUARD, "")
    output, errors = script.communicate(timeout=LONG)
    assert (script.returncode, errors) == (0, "")
    wait_until_gone([int(pid) for pid in output.split()[1:]])


def test_a_main_script_without_guard_is_told_about_it(tmp_path):
    script = start_script(tmp_path, "if True:", "")
    _, errors = script.communicate(timeout=LONG)
    assert script.returncode == 1
    assert "put what the script does under `if __name__ == '__main__':`" in errors


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)", "1 / 0"])
def test_no_worker_survives_the_end_of_the_pools_process(tmp_path, end):
    script = start_script(
        tmp_path, GUARD, f"import os, signal; pool.step(0, np.zeros(4, int)); {end}"
    )
    output, _ = script.communicate(timeout=LONG)
    assert script.returncode in (-signal.SIGKILL, 3, 1)
    wait_until_gone([int(pid) for pid in output.split()[1:]])


MAIN_WITHOUT_A_FILE = """
import sys
{without}
import numpy as np
import moolink
from tests.env_pool.pool_environments import Counter

class Mine(Counter):
    def step(self, action):
        return super().step(action + 1)

def create(index):
    return Mine(index)

with moolink.env_pool.EnvPool(create, 2, 2) as pool:
    for _ in range(2):
        outputs = pool.step(0, np.array([1, 2])).result()
    print(outputs["reward"])
"""


def run_without_a_file(how, without=""):
    code = MAIN_WITHOUT_A_FILE.format(without=without)
    arguments, given = (["-"], code) if how == "standard input" else (["-c", code], None)
    return subprocess.run(
        [sys.executable, *arguments],
        input=given,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


@pytest.mark.parametrize("how", ["standard input", "python -c"])
def test_environments_of_a_main_module_without_a_file(how):
    done = run_without_a_file(how)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[2. 3.]\n"


@pytest.mark.parametrize("how", ["standard input", "python -c"])
def test_environments_of_a_main_module_without_a_file_and_no_cloudpickle(how):
    done = run_without_a_file(how, "sys.modules['cloudpickle'] = None")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "defined in a notebook, on standard input or by `python -c`" in last
    assert "Define it at the top level of a module" in last


IN_CHILDREN = """
import concurrent.futures
import multiprocessing
import sys
import numpy as np
import moolink
from tests.env_pool.pool_environments import Counter

class Mine(Counter):
    pass

class Nested(Counter):
    def __init__(self, index):
        super().__init__(index)
        self.pool = moolink.env_pool.EnvPool(Mine, 1, 2)

    def step(self, action):
        for _ in range(2):
            outputs = self.pool.step(0, np.full(2, action)).result()
        return self.observe(action), float(outputs["reward"].sum()), False, False, {}

def total(kind):
    with moolink.env_pool.EnvPool(kind, 2, 2) as pool:
        for _ in range(2):
            outputs = pool.step(0, np.array([1, 2])).result()
        return float(outputs["reward"].sum())

def put(results, kind):
    results.put(total(kind))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    results = context.Queue()
    process = context.Process(target=put, args=(results, Mine), daemon=True)
    process.start()
    print(results.get())
    process.join()
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        print(pool.submit(total, Nested).result())
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pools_in_children_of_multiprocessing_and_in_environments(tmp_path, method):
    path = tmp_path / "script.py"
    path.write_text(IN_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(path), method],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("3.0\n6.0\n", 0), done.stderr
