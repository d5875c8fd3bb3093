"""The tutorials' scripts, run as their readers run them."""

from __future__ import annotations

import ast
import asyncio
import difflib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import moolink
from tests.docs.examples import ROOT, examples_of, run_example
from tests.ports import unused_port
from tests.waiting import PROCESS_LIMIT

PYTHON = [sys.executable, "-u"]


@contextmanager
def started(
    directory: Path, *commands: list[str], **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes in a directory. Nothing of them is left behind, however the test ends."""
    processes = [
        subprocess.Popen(
            [*PYTHON, *command],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()  # `moolink run` ends its peers
        for process in processes:
            process.communicate(timeout=PROCESS_LIMIT)


def save(directory: Path, page: str, names: list[str]) -> None:
    examples = examples_of(f"docs/tutorials/{page}.md")
    assert len(examples) == len(names)
    for name, code in zip(names, examples, strict=True):
        (directory / name).write_text(code)


def test_rpc(tmp_path: Path) -> None:
    save(tmp_path, "rpc", ["one.py", "server.py", "client.py", "errors.py"])
    assert run_example((tmp_path / "one.py").read_text()).stdout == "[0. 2. 4.]\n"
    errors = run_example((tmp_path / "errors.py").read_text()).stdout
    assert re.fullmatch(r".*ZeroDivisionError.*\nNoSuchFunction\n", errors)
    port = unused_port()
    for name in ("server.py", "client.py"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("4433", port))
    with started(tmp_path, ["client.py"], ["server.py"]) as (client, server):
        assert client.communicate(timeout=PROCESS_LIMIT)[0] == "[0, 2, 4, 6, 8]\n"
        server.communicate("\n", timeout=PROCESS_LIMIT)
        assert server.returncode == 0


def two_peers(directory: Path) -> float:
    """Trains as the tutorial does; returns the mean return of the last round."""
    with started(directory, ["-m", "moolink", "run", "-n", "2", "learner.py"]) as (job,):
        output, _ = job.communicate(timeout=PROCESS_LIMIT)
        assert job.returncode == 0, output
    first, second = re.findall(r"mean return of the last round (\S+)", output)
    assert first == second, "the same round ends both"
    return float(first)


def test_two_peers_end_at_one_round(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    save(tmp_path, "two-peers", ["walk.py", "learner.py"])
    path = tmp_path / "learner.py"
    path.write_text(path.read_text().replace("20_000", "4_000"))
    assert -2.5 <= two_peers(tmp_path) <= 1.0


def test_two_peers_start_without_a_launcher(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    save(tmp_path, "two-peers", ["walk.py", "learner.py"])
    path = tmp_path / "learner.py"
    path.write_text(path.read_text().replace("20_000", "400"))
    with started(tmp_path, ["learner.py"]) as (alone,):
        output, _ = alone.communicate(timeout=PROCESS_LIMIT)
        assert alone.returncode == 0
        assert "mean return of the last round" in output
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0].removeprefix("tcp://")
        environment = {"MOOLINK_BROKER": address, "MOOLINK_GROUP": "walk"}
        with started(tmp_path, ["learner.py"], ["learner.py"], **environment) as peers:
            for peer in peers:
                output, _ = peer.communicate(timeout=PROCESS_LIMIT)
                assert peer.returncode == 0
                assert "mean return of the last round" in output


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_two_peers_learn(tmp_path: Path) -> None:
    """A run now and then does not find the goal."""
    pytest.importorskip("torch")
    save(tmp_path, "two-peers", ["walk.py", "learner.py"])
    assert max(two_peers(tmp_path) for _ in range(3)) > 0.5


@contextmanager
def actors_and_replay(directory: Path, updates: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The tutorial's learner, for `updates` updates, and its two actors."""
    save(directory, "actors-and-replay", ["learner.py", "actor.py"])
    port = unused_port()
    for name in ("learner.py", "actor.py"):
        path = directory / name
        path.write_text(path.read_text().replace("4434", port).replace("4_000", updates))
    with started(directory, ["learner.py"], ["actor.py", "1"], ["actor.py", "2"]) as processes:
        yield processes


def versions_and_returns(text: str) -> list[tuple[int, int]]:
    """The version and the return in each line of an actor's output."""
    found = re.findall(r"weights (\d+): return (\d+)", text)
    return [(int(version), int(mean)) for version, mean in found]


def test_actors_follow_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    # The learner goes on until both actors have followed it, however late one starts.
    with actors_and_replay(tmp_path, "1_000_000") as (_, *actors):
        for actor in actors:
            assert actor.stdout is not None
            versions: list[int] = []
            while len({*versions}) < 3:
                line = actor.stdout.readline()
                assert line, "the actor ended"
                versions += [version for version, _ in versions_and_returns(line)]
            assert versions == sorted(versions), "they never go back"


def test_the_learner_ends(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with actors_and_replay(tmp_path, "300") as (learner, *_):
        said = learner.communicate(timeout=PROCESS_LIMIT)[0]
        assert re.fullmatch(r"learned from \d+ transitions\n", said)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_actors_learn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with actors_and_replay(tmp_path, "4_000") as (learner, *actors):
        said = learner.communicate(timeout=300)[0]
        assert re.fullmatch(r"learned from \d+ transitions\n", said)
        for actor in actors:
            actor.terminate()
        lines = [actor.communicate(timeout=PROCESS_LIMIT)[0] for actor in actors]
    best = max(mean for text in lines for _, mean in versions_and_returns(text))
    assert best > 150, "an untrained policy makes about 20"


def debugged(directory: Path, commands: list[str]) -> str:
    """The output of pdb with the page's script, as a reader drives it."""
    save(directory, "debugging", ["line.py"])
    with started(directory, ["-m", "pdb", "line.py"]) as (debugger,):
        return debugger.communicate("\n".join([*commands, ""]), timeout=PROCESS_LIMIT)[0]


def test_a_lone_script_under_pdb(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    page = (ROOT / "docs/tutorials/debugging.md").read_text()
    commands = re.findall(r"^    \(Pdb\) (.*)$", page, re.MULTILINE)
    assert commands[:2] == ["break 21", "continue"]
    more = ["continue", "continue", "p step.version", "clear 1", "continue", "quit"]
    said = debugged(tmp_path, [*commands, *more])
    assert "-> step.reduce(" in said
    assert re.search(r"\(0, \d+\.\d+\)", said), said
    assert "tensor([[" in said, "the gradients"
    assert "(Pdb) 2\n" in said, "rounds are applied between two stops"
    assert "ends at version 10" in said


def test_a_peer_of_several_under_pdb(tmp_path: Path) -> None:
    """One that stands at a breakpoint does not keep the others from training."""
    pytest.importorskip("torch")
    save(tmp_path, "debugging", ["line.py"])
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0].removeprefix("tcp://")
        environment = {"MOOLINK_BROKER": address, "MOOLINK_GROUP": "line"}
        stopped, other = ["-m", "pdb", "line.py"], ["line.py"]
        with started(tmp_path, stopped, **environment) as (debugger,):
            assert debugger.stdin is not None
            assert debugger.stdout is not None
            debugger.stdin.write("break 21\ncontinue\np 'stands'\n")
            debugger.stdin.flush()
            while "stands" not in (line := debugger.stdout.readline()):
                assert line, "pdb ended"
            with started(tmp_path, other, **environment) as (peer,):
                debugger.stdin.write("clear 1\ncontinue\nquit\n")
                debugger.stdin.flush()
                assert "ends at version 10" in peer.communicate(timeout=PROCESS_LIMIT)[0]


def test_a_resumed_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    save(tmp_path, "checkpoints", ["learner.py", "by_hand.py"])
    page = (ROOT / "docs/tutorials/checkpoints.md").read_text()
    commands = re.findall(r"^    moolink (run .*)$", page, re.MULTILINE)
    assert len(commands) == 2

    def versions(command: str) -> list[str]:
        with started(tmp_path, ["-m", "moolink", *command.split()]) as (job,):
            output, _ = job.communicate(timeout=PROCESS_LIMIT)
            assert job.returncode == 0, output
        return sorted(re.findall(r"(begins at version \d+|ends at version \d+)", output))

    first, second = commands
    assert versions(first) == ["begins at version 0"] * 2 + ["ends at version 50"] * 2
    assert versions(second) == ["begins at version 50"] * 2 + ["ends at version 100"] * 2
    assert versions(second) == ["begins at version 100"] * 2 + ["ends at version 100"] * 2


def test_a_script_resumed_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    *_, code = examples_of("docs/tutorials/checkpoints.md")
    assert run_example(code, tmp_path).stdout == "10\n"
    assert run_example(code, tmp_path).stdout == "15\n", "it was saved at version 5"


def ppo(directory: Path, command: list[str], steps: str) -> list[str]:
    """Trains as the page does; returns the steps of each line."""
    save(directory, "ppo", ["ppo.py", "peers.py"])
    with started(directory, [*command, steps], OMP_NUM_THREADS="1") as (job,):
        output, _ = job.communicate(timeout=PROCESS_LIMIT)
        assert job.returncode == 0, output
    return re.findall(r"(\d+) steps: \d+ an episode", output)


def test_a_ppo_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert ppo(tmp_path, ["ppo.py"], "1024") == ["512", "1024"]


def test_the_ppo_on_two_peers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines = ppo(tmp_path, ["-m", "moolink", "run", "-n", "2", "peers.py"], "2048")
    assert {"512", "1024"} <= {*lines}
    assert len(lines) >= 4, "two rollouts of each"


def test_the_ppo_on_peers_has_fifteen_lines_more() -> None:
    one, several = examples_of("docs/tutorials/ppo.md")
    changes = list(difflib.ndiff(one.splitlines(), several.splitlines()))
    added = [line[2:] for line in changes if line.startswith("+ ") and line.strip() != "+"]
    assert len(added) <= 15
    page = (ROOT / "docs/tutorials/ppo.md").read_text()
    (shown,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert re.findall(r"^\+(.+)$", shown, re.MULTILINE) == added


def test_the_cells_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """As Jupyter runs them: in one namespace and one event loop, where cells may await."""
    pytest.importorskip("torch")
    namespace: dict[str, object] = {"__name__": "__main__"}

    async def run() -> None:
        for number, cell in enumerate(examples_of("docs/tutorials/notebooks.md")):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(cell, f"cell {number}", "exec", flags, dont_inherit=True)
            if inspect.iscoroutine(result := eval(code, namespace)):
                await result

    asyncio.run(run())
    *calls, first, second = capsys.readouterr().out.splitlines()
    assert calls == ["42.0", "8.0", "9.0"]
    assert first.startswith("version 10: loss ")
    assert second.startswith("version 20: loss ")


def test_torch_and_jax(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    save(tmp_path, "torch-and-jax", ["in_torch.py", "in_jax.py"])
    with moolink.Broker(first=True) as broker:
        address = broker.listen("127.0.0.1:0")[0].removeprefix("tcp://")
        environment = {"MOOLINK_BROKER": address, "MOOLINK_GROUP": "line"}
        with started(tmp_path, ["in_torch.py"], ["in_jax.py"], **environment) as peers:
            in_torch, in_jax = (peer.communicate(timeout=PROCESS_LIMIT)[0] for peer in peers)
    assert in_torch.partition(" ")[2] == in_jax.partition(" ")[2]
    weights = [float(x) for x in re.findall(r"-?\d+\.\d+", in_torch)]
    assert weights == pytest.approx([1, -2, 3], abs=1e-3)
