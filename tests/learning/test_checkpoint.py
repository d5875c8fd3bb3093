"""Checkpoints survive full disks, kills and damage, and say which file is bad."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

import moolink
from examples.common import checkpoint
from tests.waiting import PROCESS_LIMIT

ROOT = Path(__file__).resolve().parents[2]


def tree(version):
    return {
        "version": version,
        "parameters": {"weight": np.full((64, 64), version, np.float32)},
        "state": {"count": 3, "mean": [np.arange(5), np.zeros(())], "rate": 1e-3},
    }


def read_quietly(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return checkpoint.load(directory)


def test_what_is_saved_comes_back(tmp_path):
    saved = {
        "none": None,
        "numbers": [1, -2.5, True, 2**40],
        "pair": (1, "two"),
        "by_number": {0: np.array([1, 2], np.int64), 1: {"x": np.zeros((2, 0), np.uint8)}},
        "scalar": np.array(1.5, np.float32),
        "text": "größe",
    }
    checkpoint.save(tmp_path, saved)
    loaded = read_quietly(tmp_path)
    np.testing.assert_equal(loaded, saved)
    assert isinstance(loaded["pair"], tuple)
    assert loaded["scalar"].dtype == np.float32
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.NAME]


def test_there_need_not_be_one(tmp_path):
    assert checkpoint.load(tmp_path / "nowhere") is None


def test_refuses_what_it_cannot_hold(tmp_path):
    with pytest.raises(TypeError, match=r"tree\.state\.x is a object"):
        checkpoint.save(tmp_path, {"state": {"x": object()}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_one_is_named_and_the_previous_one_is_read(tmp_path, keep):
    checkpoint.save(tmp_path, tree(1))
    path = checkpoint.save(tmp_path, tree(2))
    size = path.stat().st_size
    os.truncate(path, int(keep * size) if isinstance(keep, float) else keep)
    with pytest.warns(RuntimeWarning, match=f"{path} .*going on from .*previous"):
        assert checkpoint.load(tmp_path)["version"] == 1


def test_a_damaged_byte_is_noticed(tmp_path):
    checkpoint.save(tmp_path, tree(1))
    path = checkpoint.save(tmp_path, tree(2))
    data = bytearray(path.read_bytes())
    data[data.find(np.float32(2).tobytes() * 8) + 100] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert checkpoint.load(tmp_path)["version"] == 1


def test_a_damaged_one_does_not_take_the_place_of_the_previous_one(tmp_path):
    checkpoint.save(tmp_path, tree(1))
    path = checkpoint.save(tmp_path, tree(2))
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:500] + bytes([whole[500] ^ 1]) + whole[501:]):
        path.write_bytes(damaged)
        checkpoint.save(tmp_path, tree(3))
        assert read_quietly(tmp_path)["version"] == 3
        path.unlink()
        assert read_quietly(tmp_path)["version"] == 1


def test_if_none_can_be_read_the_error_names_all(tmp_path):
    checkpoint.save(tmp_path, tree(1))
    checkpoint.save(tmp_path, tree(2))
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (tmp_path / name).write_bytes(b"no zip")
    with pytest.raises(moolink.FileError) as caught:
        checkpoint.load(tmp_path)
    assert checkpoint.NAME in str(caught.value)
    assert checkpoint.PREVIOUS in str(caught.value)


def test_a_full_disk_leaves_the_old_one(tmp_path):
    """The kernel refuses the write, by a limit on the size of files."""
    checkpoint.save(tmp_path, tree(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"was not written: .*untouched: .*checkpoint.npz"):
            checkpoint.save(tmp_path, tree(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert read_quietly(tmp_path)["version"] == 1
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.NAME]
    checkpoint.save(tmp_path, tree(3))
    assert read_quietly(tmp_path)["version"] == 3


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import numpy as np
        from examples.common import checkpoint
        version = int(sys.argv[2])
        while True:
            version += 1
            array = np.full((256, 1024), version, np.float32)
            checkpoint.save(Path(sys.argv[1]), {"version": version, "array": array})
            print(version, flush=True)
        """
    )
    random, last = np.random.default_rng(0), 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(last)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(int(random.integers(1, 8))):
            last = int(child.stdout.readline())
        child.kill()
        rest = child.communicate(timeout=PROCESS_LIMIT)[0].split()
        last = int(rest[-1]) if rest else last
        loaded = read_quietly(tmp_path)
        assert loaded["version"] >= last
        assert (loaded["array"] == loaded["version"]).all()
        last = loaded["version"]
