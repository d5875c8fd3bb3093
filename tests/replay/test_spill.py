"""A replay whose steps are in a file on a disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.replay import Fifo, Prioritized, ReplayClient, ReplayServer, Table
from tests import forks, processes, waiting

MB = 1 << 20


def step(i: int) -> dict[str, Any]:
    return {"obs": np.full(1 << 16, i, np.float32), "i": i}


def outcomes(spill: Path | None, checkpoint: Path) -> list[Any]:
    """The results of a program that uses inserts, writers, samples and checkpoints."""
    tables = [Table("t", 60, Prioritized(0.7)), Table("pairs", 50, Fifo())]
    seen: list[Any] = []
    with moolink.Replay(tables, seed=5, spill=spill) as replay:
        replay.extend({"obs": np.arange(90 * 1000.0).reshape(90, 1000)}, table="t")
        with replay.writer(keep=2) as writer:
            for i in range(150):
                writer.append(step(i))
                if len(writer) >= 2:
                    obs, number = writer.history["obs"], writer.history["i"]
                    writer.create_item({"obs": obs[-2:], "i": number[-1]}, table="pairs")
        for _ in range(20):
            batch = replay.sample(16, table="t")
            seen += [batch.data["obs"], batch.keys, batch.probabilities]
            replay.update_priorities(batch.keys, batch.data["obs"].sum(1), table="t")
        seen += [replay.sample(50, table="pairs").data, replay.stats()]
        replay.checkpoint(checkpoint)
    with moolink.Replay.restore(checkpoint, tables, spill=spill) as restored:
        return [*seen, restored.sample(50, table="pairs").data]


def test_it_does_what_one_in_memory_does(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    in_memory = outcomes(None, tmp_path / "checkpoint")
    np.testing.assert_equal(outcomes(spill, tmp_path / "checkpoint"), in_memory)


# Inserts steps of 1 MB until memory is exhausted, or until there are 400.
FILL = """
import resource, sys, numpy as np, moolink
spill = sys.argv[1] or None
used = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line)
resource.setrlimit(resource.RLIMIT_DATA, ((used << 10) + (200 << 20),) * 2)
with moolink.Replay(moolink.replay.Table("t", 1000), spill=spill) as replay:
    try:
        for i in range(400):
            replay.insert({"obs": np.full(1 << 18, i, np.float32)})
    except MemoryError:
        print("no memory")
    batch = replay.sample(8)
    assert (batch.data["obs"] == batch.data["obs"][:, :1]).all()
    print(replay.stats()["tables"]["t"]["size"])
"""


def test_it_holds_more_than_the_memory_that_a_process_may_have(tmp_path: Path) -> None:
    def run(spill: object) -> list[str]:
        with processes.killed_at_the_end() as started:
            started.append(processes.start_python("-c", FILL, spill))
            out, errors = started[0].communicate()
            assert started[0].returncode == 0, errors
            return out.split("\n")

    without = run("")
    assert without[0] == "no memory"
    assert int(without[1]) < 200
    assert run(tmp_path)[0] == "400"


# Inserts until the disk is full, then samples, removes and inserts in the space there is.
FULL = """
import sys, numpy as np, moolink
with moolink.Replay(moolink.replay.Table("t", 1000, moolink.replay.Fifo()), spill=SPILL) as replay:
    try:
        for i in range(1000):
            key = replay.insert({"obs": np.full(1 << 18, i, np.float32)})
    except OSError as full:
        print(full.errno, full)
    print(i, replay.sample(i).data["obs"][:, 0].sum() == 0)
    replay.remove([key])
    replay.insert({"obs": np.zeros(1 << 18, np.float32)})
    print(replay.stats()["tables"]["t"]["size"] == i)
"""


def check_full(lines: list[str], error: int, spill: object) -> None:
    number, message = lines[0].split(" ", 1)
    assert int(number) == error
    assert message.startswith(f"[Errno {error}] cannot spill ")
    assert message.endswith(f" bytes more to {spill}: {os.strerror(error)}")
    count, first_is_sampled = lines[1].split()
    assert int(count) >= 60
    assert first_is_sampled == "True"
    assert lines[2] == "True"


def test_a_file_that_may_grow_no_more_is_an_error_and_no_signal(tmp_path: Path) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({200 * MB},) * 2);"
    program = FULL.replace("SPILL", repr(str(tmp_path)))
    with processes.killed_at_the_end() as started:
        started.append(processes.start_python("-c", limit + program))
        out, errors = started[0].communicate()
        assert started[0].returncode == 0, errors
    check_full(out.splitlines(), errno.EFBIG, tmp_path)


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare not found: install util-linux")
    mount = ["unshare", "--mount", "sh", "-c"]
    small = f"mount -t tmpfs -o size=150m tmpfs {tmp_path}"
    allowed = subprocess.run([*mount, small], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {allowed.stderr.strip()}")
    program = FULL.replace("SPILL", repr(str(tmp_path)))
    done = subprocess.run(
        [*mount, f'{small} && exec "$@"', "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=processes.ROOT,
    )
    assert done.returncode == 0, done.stderr
    check_full(done.stdout.splitlines(), errno.ENOSPC, tmp_path)


def test_nothing_is_left_of_a_killed_process(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np, moolink\n"
        "replay = moolink.Replay(moolink.replay.Table('t', 100), spill=sys.argv[1])\n"
        "replay.extend({'obs': np.zeros((50, 1 << 18), np.float32)})\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    with processes.killed_at_the_end() as started:
        started.append(processes.start_python("-c", program, tmp_path))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "ready\n"
        mapped = Path(f"/proc/{started[0].pid}/maps").read_text()
        assert f"{tmp_path}/moolink-spill-" in mapped
        assert list(tmp_path.iterdir()) == []
        started[0].send_signal(signal.SIGKILL)
        started[0].wait()
    assert list(tmp_path.iterdir()) == []


def test_the_file_ends_with_the_replay(tmp_path: Path) -> None:
    def mapped() -> bool:
        return f"{tmp_path}/moolink-spill-" in Path("/proc/self/maps").read_text()

    replay = moolink.Replay(Table("t", 10), spill=tmp_path)
    replay.insert(step(0))
    assert mapped()
    del replay
    assert not mapped()


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a file to spill to in .*nowhere: No such file"):
        moolink.Replay(Table("t", 10), spill=tmp_path / "nowhere")


def test_a_client_of_the_host_maps_its_batches(tmp_path: Path) -> None:
    with (
        moolink.Rpc("replay") as rpc,
        moolink.Rpc("client") as peer,
        moolink.Replay(Table("t", 100, Fifo()), spill=tmp_path) as replay,
        ReplayServer(rpc, replay),
    ):
        peer.connect(rpc.listen("127.0.0.1:0")[0])
        client = ReplayClient(peer, server="replay", arrays="numpy")
        with client.writer(keep=1) as writer:
            for i in range(3):
                writer.append(step(i))
                writer.create_item({"obs": writer.history["obs"][-1]})
        sent = rpc.stats()["bytes_written"]
        obs = client.sample(4).data["obs"]
        assert rpc.stats()["bytes_written"] - sent < 20_000
        assert not obs.flags.writeable  # it is the server's memory
        assert obs[:, 0].tolist() == [0.0] * 4


def test_a_child_has_no_part_in_the_file(tmp_path: Path) -> None:
    with moolink.Replay(Table("t", 10, Fifo()), spill=tmp_path) as replay:
        replay.insert(step(1))

        def in_child() -> None:
            for use in (
                lambda: replay.insert(step(2)),
                lambda: replay.sample(1),
                lambda: replay.checkpoint(tmp_path / "checkpoint"),
            ):
                with pytest.raises(moolink.Closed):
                    use()

        assert forks.exit_status(forks.start(in_child)) == 0
        assert (replay.sample(1).data["obs"] == 1).all()


def test_a_child_goes_on_alone_with_a_replay_in_memory() -> None:
    with moolink.Replay(Table("t", 10, Fifo(), remover=None)) as replay:
        waits = threading.Thread(target=lambda: replay.sample(1))
        waits.start()
        waiting.until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 1, "a sample")

        def in_child() -> None:
            assert replay.stats()["tables"]["t"]["waiting_samples"] == 0
            replay.insert(step(5))
            assert replay.sample(1).data["i"].tolist() == [5]

        assert forks.exit_status(forks.start(in_child)) == 0
        replay.insert(step(1))
        waits.join(waiting.TIMEOUT)
        assert replay.sample(1).data["i"].tolist() == [1]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_signal_handler_may_fork_during_a_sample(tmp_path: Path, in_file: bool) -> None:
    """The child goes on waiting, or finds its replay closed where steps are in a file."""
    parent, children = os.getpid(), []
    before = signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
    try:
        spill = tmp_path if in_file else None
        with moolink.Replay(Table("t", 10, Fifo(), remover=None), spill=spill) as replay:

            def insert_after_the_fork() -> None:
                counts = replay.stats
                waiting.until(lambda: counts()["tables"]["t"]["waiting_samples"] == 1, "a sample")
                os.kill(parent, signal.SIGUSR1)
                waiting.until(lambda: bool(children), "the fork")
                replay.insert(step(1))

            helper = threading.Thread(target=insert_after_the_fork)
            helper.start()
            try:
                ended = replay.sample(1, timeout=2.0).data["i"].tolist()
            except (moolink.Closed, moolink.TimeoutError) as error:
                ended = type(error)
            if os.getpid() != parent:
                os._exit(0 if ended is (moolink.Closed if in_file else moolink.TimeoutError) else 1)
            helper.join(waiting.TIMEOUT)
            assert ended == [1]
            assert forks.exit_status(children[0]) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_directory_needs_a_name() -> None:
    with pytest.raises(ValueError, match="spill is an empty text: name a directory"):
        moolink.Replay(Table("t", 10), spill="")


def test_a_directory_may_be_bytes(tmp_path: Path) -> None:
    with moolink.Replay(Table("t", 10, Fifo()), spill=os.fsencode(tmp_path)) as replay:
        replay.insert(step(1))
        assert replay.sample(1).data["i"].tolist() == [1]
