"""``moolink replay``: tables of a TOML file, served by a program of its own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import moolink
from moolink.cli.replay import read_tables
from moolink.replay import (
    Fifo,
    MinSize,
    Prioritized,
    ReplayClient,
    SampleToInsertRatio,
    Table,
    Uniform,
)
from tests import processes, waiting

TABLES = """
[[table]]
name = "train"
max_size = 1000
sampler = {name = "Prioritized", exponent = 0.6}
limiter = {name = "SampleToInsertRatio", samples_per_insert = 4, min_size = 2, error_buffer = 20}

[[table]]
name = "queue"
max_size = 10
sampler = "Fifo"
remover = "none"
limiter = {name = "MinSize", min_size = 3}
max_times_sampled = 1
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.toml"
    path.write_text(TABLES)
    return path


def test_tables_of_a_file(tables: Path) -> None:
    assert read_tables(str(tables)) == [
        Table("train", 1000, Prioritized(0.6), Fifo(), SampleToInsertRatio(4, 2, 20)),
        Table("queue", 10, Fifo(), None, MinSize(3), 1),
    ]
    tables.write_text('[[table]]\nname = "t"\nmax_size = 3\n')
    assert read_tables(str(tables)) == [Table("t", 3, Uniform())]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", "expected one"),
        ("[[table]", "tables.toml: Expected"),
        ('[[table]]\nname = "t"\nmax_size = 0', "table 't': max_size must be from 1"),
        ('[[table]]\nname = "t"\nmax_size = 1\nsize = 2', "table 't': .*'size'"),
        ('[[table]]\nname = "t"\nmax_size = 1\nsampler = "Best"', "one of Uniform, .*not 'Best'"),
        ('[[table]]\nname = "t"\nmax_size = 1\nlimiter = {name = "No"}', "one of MinSize"),
        ('[[table]]\nname = "t"\nmax_size = 1\nlimiter = "MinSize"', "a limiter is a table"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, error: str, tables: Path) -> None:
    tables.write_text(text)
    with pytest.raises(ValueError, match=error):
        read_tables(str(tables))


@pytest.mark.parametrize("spill", [False, True])
def test_a_server_keeps_its_tables_over_a_restart(
    spill: bool, tables: Path, tmp_path: Path
) -> None:
    command: list[object] = ["-m", "moolink.cli.main", "replay", tables]
    command += ["--checkpoint", tmp_path / "kept"]
    command += ["--spill", tmp_path] if spill else []
    with moolink.Rpc("client") as rpc, processes.killed_at_the_end() as started:
        client = ReplayClient(rpc, server="replay")
        for life in range(2):
            server = processes.start_python(*command)
            started.append(server)
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("moolink replay 'replay' listens on tcp://127.0.0.1:")
            rpc.connect(line.split()[-1])
            if life == 0:
                client.insert({"x": 5}, table="train")
            assert client.stats()["tables"]["train"]["size"] == 1
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0


def test_a_damaged_checkpoint_is_one_line_that_names_the_one_before_it(
    tables: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    command: list[object] = ["-m", "moolink.cli.main", "replay", tables, "--checkpoint", kept]

    def serve_once() -> None:
        with processes.killed_at_the_end() as started:
            started.append(processes.start_python(*command))
            assert started[0].stdout is not None
            started[0].stdout.readline()
            started[0].send_signal(signal.SIGTERM)
            assert started[0].wait(20) == 0

    for _ in range(2):
        serve_once()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "kept.previous", "tables.toml"]
    whole = kept.read_bytes()
    for data in (b"", whole[:100], whole[:-1] + b"\0", whole + b"\0"):
        kept.write_bytes(data)
        with processes.killed_at_the_end() as started:
            started.append(processes.start_python(*command))
            out, errors = started[0].communicate()
            assert started[0].returncode == 1
            assert out == ""
            assert errors.count("\n") == 1
            assert errors.startswith(f"moolink replay: {kept} ")
            assert f"the previous checkpoint is {kept}.previous: " in errors
    (tmp_path / "kept.previous").rename(kept)
    serve_once()


@pytest.mark.parametrize("option", [[], ["--no-previous"]])
def test_a_server_without_its_checkpoint_does_not_replace_the_one_before_it(
    option: list[str], tables: Path, tmp_path: Path
) -> None:
    kept, previous = tmp_path / "kept", tmp_path / "kept.previous"
    previous.write_bytes(b"a checkpoint")
    command = ("-m", "moolink.cli.main", "replay", tables, *option, "--checkpoint", kept)
    with processes.killed_at_the_end() as started:
        started.append(processes.start_python(*command))
        out, errors = started[0].communicate()
        assert (started[0].returncode, out, errors.count("\n")) == (1, "", 1)
    assert f"there is no checkpoint {kept}, but the previous one {previous}: move it" in errors
    assert "or remove it" in errors
    assert previous.read_bytes() == b"a checkpoint"
    assert not kept.exists()


def test_a_server_that_cannot_begin_says_why(tables: Path) -> None:
    cases: list[tuple[list[object], str]] = [
        (["nowhere.toml"], "No such file"),
        ([tables, "--spill", "nowhere"], "cannot make a file to spill to in nowhere: No such file"),
    ]
    for arguments, why in cases:
        with processes.killed_at_the_end() as started:
            command = ("-m", "moolink.cli.main", "replay", *arguments)
            started.append(processes.start_python(*command))
            _, errors = started[0].communicate()
            assert started[0].returncode == 1
            assert f"moolink replay: [Errno 2] {why}" in errors


def test_a_client_that_waits_waits_on_for_the_next_server(tables: Path, tmp_path: Path) -> None:
    command = ["-m", "moolink.cli.main", "replay", tables, "--checkpoint", tmp_path / "kept"]
    sampled: list[int] = []
    with moolink.Rpc("client") as rpc, processes.killed_at_the_end() as started:
        client = ReplayClient(rpc, server="replay")
        address = "127.0.0.1:0"
        waits = threading.Thread(
            target=lambda: sampled.append(len(client.sample(1, table="queue")))
        )
        for life in range(2):
            started.append(processes.start_python(*command, "--listen", address))
            assert started[-1].stdout is not None
            address = started[-1].stdout.readline().split()[-1].removeprefix("tcp://")
            if life == 0:
                rpc.connect(address)
                waits.start()
                waiting.until(
                    lambda: client.stats()["tables"]["queue"]["waiting_samples"] == 1, "a sample"
                )
                started[-1].send_signal(signal.SIGTERM)
                assert started[-1].wait(20) == 0
        waiting.until(lambda: bool(rpc.peers()) and rpc.peers()[0]["connected"], "the next one")
        client.extend({"x": np.arange(3)}, table="queue")
        waits.join(waiting.TIMEOUT)
    assert sampled == [1]


def test_a_checkpoint_that_cannot_be_written_ends_nothing(tables: Path, tmp_path: Path) -> None:
    command = ("-m", "moolink.cli.main", "replay", tables, "--every", "0.1", "--checkpoint")
    with moolink.Rpc("client") as rpc, processes.killed_at_the_end() as started:
        server = processes.start_python(*command, tmp_path / "nowhere" / "kept")
        started.append(server)
        assert server.stdout is not None
        assert server.stderr is not None
        rpc.connect(server.stdout.readline().split()[-1])
        for _ in range(2):
            assert "no checkpoint was written: [Errno 2]" in server.stderr.readline()
        client = ReplayClient(rpc, server="replay")
        client.insert({"x": 5}, table="train")
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 1


def test_seconds_between_checkpoints_are_above_zero(tables: Path) -> None:
    with processes.killed_at_the_end() as started:
        command = ("-m", "moolink.cli.main", "replay", tables, "--every", "0")
        started.append(processes.start_python(*command))
        _, errors = started[0].communicate()
        assert started[0].returncode == 2
        assert "--every must be above 0" in errors
