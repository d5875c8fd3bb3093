"""Installs a wheel into an empty environment without a compiler, and tests it:
tools/check_wheel.py WHEEL PYTHON [EXTRA ...]. Prints the seconds from `pip install` to the first
call."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import numpy as np
import moolink


def main():
    with moolink.Broker(first=True) as broker, moolink.Rpc("a") as a, moolink.Rpc("b") as b:
        address = broker.listen("127.0.0.1:0")[0]
        a.define("double", lambda x: 2 * x)
        for peer in (a, b):
            peer.connect(address)
        x = np.arange(100_000, dtype=np.float32)
        assert np.array_equal(b.sync("a", "double", x), 2 * x)
        print("called", flush=True)
        with moolink.Group(a, "g") as first, moolink.Group(b, "g") as second:
            for group in (first, second):
                group.wait_for_members(2, 20)
            sums = [group.all_reduce("s", np.ones(3)) for group in (first, second)]
            assert all(np.array_equal(one.result(20), 2 * np.ones(3)) for one in sums)
        frameworks(a, b)


def frameworks(a, b):
    try:
        import torch
    except ModuleNotFoundError:
        pass
    else:
        assert torch.equal(b.sync("a", "double", torch.ones(3)), 2 * torch.ones(3))
    try:
        import jax.numpy as jnp
    except ModuleNotFoundError:
        pass
    else:
        assert (b.sync("a", "double", jnp.ones(3)) == 2).all()


if __name__ == "__main__":
    main()
"""
LIMIT = 120  # seconds


def main(wheel: str, python: str, extras: list[str]) -> None:
    """Raises CalledProcessError if something fails."""
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory, "environment")
        subprocess.run([python, "-m", "venv", environment], check=True)
        path = environment / "bin"
        program = Path(directory, "program.py")
        program.write_text(PROGRAM)
        # PATH has only the environment, so no compiler.
        variables = {"PATH": str(path), "HOME": directory}
        variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        named = f"{wheel}[{','.join(extras)}]" if extras else wheel
        began = time.monotonic()
        subprocess.run(
            [path / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", named],
            check=True,
            env=variables,
            cwd=directory,
        )
        with subprocess.Popen(
            [path / "python", program],
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=directory,
        ) as running:
            assert running.stdout is not None
            line = running.stdout.readline()
            seconds = time.monotonic() - began
            status = running.wait(LIMIT)
        if line != "called\n" or status != 0:
            raise SystemExit(f"{wheel} fails with {python}: exit status {status}")
        for command in (["moolink", "--version"], ["moolink-broker", "--help"]):
            run = [path / "python", path / command[0], *command[1:]]
            subprocess.run(run, check=True, env=variables, stdout=subprocess.DEVNULL)
        print(f"{Path(wheel).name} with {python}: {seconds:.1f} s from pip install to a call")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:])
