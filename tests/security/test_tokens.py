"""Token files: made for their owner alone, and refused if others could have read them."""

from __future__ import annotations

import logging
import os
import re
import select
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import moolink
from moolink import files, tokens
from tests.waiting import PROCESS_LIMIT

TOKEN = ["-m", "moolink.broker", "token"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        check=False,
    )


def test_a_token_and_a_groups_key_survive_their_text() -> None:
    key = tokens.new()
    assert tokens.parse(key.text() + "\n", "a test") == [key]
    group = key.of_group("pong: the 2nd")
    assert tokens.parse(f"# rotation\n\n  {group.text()}\n", "a test") == [group]
    assert group.secret != key.secret
    assert group.describe() != key.of_group("pong").describe()
    with pytest.raises(ValueError, match="none is derived"):
        group.of_group("pong")
    with pytest.raises(ValueError, match="no group's name"):
        key.of_group("a\nb")
    with pytest.raises(ValueError, match="no group's name"):
        key.of_group("a\x85b")
    odd = key.of_group("one line\u2028of \u2029text")
    assert tokens.parse(odd.text() + "\r\n", "a test") == [odd]
    with pytest.raises(ValueError, match="ends in space"):  # a file's lines are stripped
        key.of_group("pong ")


def test_derived_keys_are_those_of_the_core() -> None:
    """The same numbers as in tests/cpp/crypto/keyring_test.cc."""
    key = tokens.Key(bytes([7]) * 32)
    core = Path(__file__).parents[1] / "cpp" / "crypto" / "keyring_test.cc"
    job, group = re.findall(
        r'std::string\("(?:moolink1:)?([0-9a-f]{16})(?::pong)?"\)', core.read_text()
    )
    assert key.describe() == f"key {job} of the whole job"
    assert key.of_group("pong").describe() == f"key {group} of group 'pong'"


LONG_NAME = f"{tokens.GROUP_PREFIX}{'0' * 64}:{'x' * 2000}"


@pytest.mark.parametrize(
    "text", ["", "\n# none\n", "secret", "moolink-token:12", "a\nb", LONG_NAME]
)
def test_what_is_no_token_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(moolink.AuthError, match="token new") as caught:
        tokens.read(path)
    assert str(path) in str(caught.value)
    assert not text.strip() or text not in str(caught.value)


def test_keys_of_several_groups_are_refused() -> None:
    key = tokens.new()
    text = "\n".join(k.text() for k in (key.of_group("a"), key.of_group("b")))
    with pytest.raises(moolink.AuthError, match="an Rpc in each"):
        tokens.parse(text, "a test")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "token"
    tokens.write(path, [tokens.new()])
    path.chmod(mode)
    with pytest.raises(moolink.AuthError, match=f"chmod 600 {path}"):
        moolink.Rpc(token_file=path)
    path.chmod(0o600)
    moolink.Rpc(token_file=path).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    tokens.write(path, [tokens.new()])
    os.chown(path, 12345, -1)
    with pytest.raises(moolink.AuthError, match="belongs to user 12345"):
        tokens.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_pipe_of_another_user_is_refused(tmp_path: Path) -> None:
    """Else who can write to the folder would choose the token."""
    path = tmp_path / "token"
    os.mkfifo(path)
    path.chmod(0o666)
    os.chown(path, 12345, -1)
    both_ends = os.open(path, os.O_RDWR)
    try:
        os.write(both_ends, tokens.new().text().encode())
        with pytest.raises(moolink.AuthError, match="belongs to user 12345"):
            tokens.read(path)
    finally:
        os.close(both_ends)


def test_a_token_comes_through_a_pipe_when_its_writer_is_ready() -> None:
    key = tokens.new()
    reading, writing = os.pipe()

    def write_later() -> None:
        os.write(writing, key.text()[:20].encode())
        while select.select([reading], [], [], 0)[0]:
            pass  # until the first piece is taken
        os.write(writing, key.text()[20:].encode())
        os.close(writing)

    writer = threading.Thread(target=write_later)
    writer.start()
    try:
        assert tokens.read(f"/dev/fd/{reading}") == [key]
    finally:
        writer.join()
        os.close(reading)


def test_a_token_comes_through_a_named_pipe_whose_writer_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, path, waits = tokens.new(), tmp_path / "pipe", threading.Event()
    os.mkfifo(path, 0o600)
    poll = select.poll

    def polled() -> select.poll:
        waits.set()  # the reader has opened the pipe
        return poll()

    monkeypatch.setattr(select, "poll", polled)

    def write_later() -> None:
        waits.wait()
        path.write_text(key.text())

    writer = threading.Thread(target=write_later)
    writer.start()
    assert tokens.read(path) == [key]
    writer.join()


def test_a_named_pipe_that_nobody_writes_to_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIPE_SECONDS", 0.05)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(moolink.AuthError, match="is a pipe whose writer wrote nothing"):
        tokens.read(tmp_path / "pipe")


def test_a_pipe_whose_writer_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_SECONDS", 0.05)
    reading, writing = os.pipe()
    try:
        with pytest.raises(moolink.AuthError, match="writer wrote nothing"):
            tokens.read(f"/dev/fd/{reading}")
        os.write(writing, b"moolink")
        with pytest.raises(moolink.AuthError, match="writer did not end"):
            tokens.read(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)


def test_a_folder_is_no_token_file(tmp_path: Path) -> None:
    with pytest.raises(moolink.AuthError, match="Is a directory"):
        tokens.read(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(moolink.AuthError, match="No such file"):
        moolink.Rpc(token_file=tmp_path / "none")
    with pytest.raises(moolink.AuthError, match="No such file"):
        moolink.Broker(token_file=tmp_path / "none")


def test_a_file_is_made_for_its_owner_whatever_the_umask_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        tokens.write(path, [tokens.new()])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = path.read_text()
    with pytest.raises(moolink.AuthError, match="already"):
        tokens.write(path, [tokens.new()])
    assert path.read_text() == first
    assert os.listdir(tmp_path) == ["token"]


def test_processes_that_start_at_once_make_one_token(tmp_path: Path) -> None:
    script = "from moolink import tokens; print(tokens.own()[0][0].text())"
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "new" / "config")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    texts = {process.communicate(timeout=PROCESS_LIMIT)[0] for process in started}
    assert len(texts) == 1
    assert texts.pop().startswith(tokens.TOKEN_PREFIX)
    folder = tmp_path / "new" / "config" / "moolink"
    assert os.listdir(folder) == ["token"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_is_explained() -> None:
    for folder in ("/proc/none", "/dev/null"):
        done = run("-c", "import moolink; moolink.Rpc()", XDG_CONFIG_HOME=folder)
        assert done.returncode == 1
        assert "AuthError: cannot make this user's token" in done.stderr
        assert tokens.FILE_VARIABLE in done.stderr
        assert "token new --file" in done.stderr


def test_a_home_that_cannot_be_looked_into_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", forbidden)  # root would not be forbidden anything
        with pytest.raises(moolink.AuthError, match=tokens.FILE_VARIABLE):
            tokens.own({"XDG_CONFIG_HOME": str(tmp_path)})


def test_which_token_is_used(tmp_path: Path) -> None:
    argument, named, own = tmp_path / "argument", tmp_path / "named", tmp_path / "moolink" / "token"
    own.parent.mkdir()
    for path in (argument, named, own):
        tokens.write(path, [tokens.new()])
    environ = {"XDG_CONFIG_HOME": str(tmp_path), tokens.FILE_VARIABLE: str(named)}
    key = {path: tokens.read(path) for path in (argument, named, own)}
    assert tokens.identity(token_file=argument, environ=environ).keys == key[argument]
    assert tokens.identity(token=argument, environ=environ).keys == key[argument]
    assert tokens.identity(environ=environ) == (key[named], f"the token file {named}")
    # A named file goes before what the environment says of insecurity.
    environ[tokens.INSECURE_VARIABLE] = "1"
    assert tokens.identity(environ=environ).keys == key[named]
    del environ[tokens.FILE_VARIABLE]
    assert tokens.identity(environ=environ).keys == []
    assert tokens.identity(token_file=argument, environ=environ).keys == key[argument]
    environ[tokens.INSECURE_VARIABLE] = "0"
    assert tokens.identity(environ=environ).keys == key[own]
    with pytest.raises(ValueError, match="one of"):
        tokens.identity(token_file=argument, insecure=True)
    with pytest.raises(TypeError, match="bytes"):
        moolink.Rpc(token=b"x" * 32)  # type: ignore[arg-type]


def test_insecurity_is_said_once() -> None:
    script = (
        "import logging, moolink; logging.basicConfig()\n"
        "for _ in range(3): moolink.Rpc(insecure=True).close()"
    )
    assert run("-c", script).stderr.count("this peer is insecure") == 1


def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.DEBUG, "moolink"):
        keys, _ = tokens.own({"XDG_CONFIG_HOME": str(tmp_path)})
    assert "made this user's token" in caplog.text
    assert keys[0].secret.hex() not in caplog.text
    shown = repr(tokens.Identity(keys, "a test"))
    assert keys[0].describe() in shown
    assert repr(keys[0].secret) not in shown


def test_the_command_makes_derives_and_shows(tmp_path: Path) -> None:
    job, group = str(tmp_path / "job"), str(tmp_path / "pong")
    assert run(*TOKEN, "new", "--file", job).returncode == 0
    assert run(*TOKEN, "group", "pong", "--token-file", job, "--file", group).returncode == 0
    (token,) = tokens.read(job)
    assert tokens.read(group) == [token.of_group("pong")]
    shown = run(*TOKEN, "show", "--token-file", group).stdout
    assert token.of_group("pong").describe() in shown
    assert token.secret.hex() not in shown
    again = run(*TOKEN, "new", "--file", job)
    assert (again.returncode, "already" in again.stderr) == (1, True)
    printed = run(*TOKEN, "new").stdout
    assert tokens.parse(printed, "a test") != [token]
    of_group = run(*TOKEN, "group", "x", **{tokens.FILE_VARIABLE: group})
    assert (of_group.returncode, "none is derived" in of_group.stderr) == (1, True)
