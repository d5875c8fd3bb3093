"""Brokers and members in processes of their own, with tokens of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moolink import tokens
from tests.waiting import PROCESS_LIMIT

MEMBER = Path(__file__).with_name("member.py")


class Process:
    """A member that is asked by name: `member.members(2)`; errors come as (type, text)."""

    def __init__(self, name: str, group: str, broker: str, token_file: Path) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), name, group, broker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, tokens.FILE_VARIABLE: str(token_file)},
        )

    def __getattr__(self, do: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            print(json.dumps({"do": do, "with": arguments}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
            assert line, f"{self.name} has ended"
            answer = json.loads(line)
            return answer["value"] if "value" in answer else (answer["error"], answer["text"])

        return ask

    def end(self) -> str:
        """Ends it; returns what it has logged."""
        return self.process.communicate(timeout=PROCESS_LIMIT)[1]


@pytest.fixture
def member() -> Iterator[Callable[..., Process]]:
    """Returns what starts a Process; it is ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: Any) -> Process:
            process = Process(*arguments)
            stack.callback(process.process.wait)
            stack.callback(process.process.kill)
            return process

        yield start


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Path]:
    """Token files of one job: "job", of its groups "a" and "b", and of "another" job."""
    token = tokens.new()
    files = {"job": [token], "a": [token.of_group("a")], "b": [token.of_group("b")]}
    files["another"] = [tokens.new()]
    for name, keys in files.items():
        tokens.write(tmp_path / name, keys)
    return {name: tmp_path / name for name in files}


@pytest.fixture
def broker(job: dict[str, Path]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address and process of a broker that holds the job's token."""
    command = [sys.executable, "-m", "moolink.broker", "127.0.0.1:0", "--first"]
    process = subprocess.Popen(
        [*command, "--token-file", str(job["job"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[-1]
        yield address.removeprefix("tcp://"), process
    finally:
        process.kill()
        process.communicate()
