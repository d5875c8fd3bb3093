import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import moolink
from moolink import tokens
from moolink.cli import doctor, reach
from moolink.cli.main import main


def test_the_report_is_complete_and_readable_by_programs(capsys):
    status = main(["doctor", "--json"])
    findings = {item["topic"]: item for item in json.loads(capsys.readouterr().out)}
    assert status == any(item["state"] == "failed" for item in findings.values())
    assert {"moolink", "core", "machine", "memfd", "pidfd", "CUDA", "numpy"} <= findings.keys()
    assert findings["numpy"]["state"] == "ok"
    assert all(item["text"] for item in findings.values())
    assert "aiohttp" in findings["extra dashboard"]["text"]


def test_a_failed_check_gives_its_reason_and_the_exit_status(monkeypatch, capsys):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(doctor.os, "eventfd", refuse)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " eventfd " in line]
    assert line.startswith("failed")
    assert "Too many open files" in line
    monkeypatch.undo()
    main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("moolink works here")


def test_the_report_says_what_rdma_goes_through_or_why_there_is_none():
    command = [sys.executable, "-m", "moolink", "doctor", "--json"]

    def finding(**variables):
        env = {**os.environ, **variables}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return {item["topic"]: item for item in json.loads(done.stdout)}["RDMA"]

    devices = pathlib.Path("/sys/class/infiniband")
    found = finding()
    if not devices.is_dir() or not any(devices.iterdir()):
        assert found["state"] == "absent"
        assert "no RDMA" in found["text"]
    off = finding(MOOLINK_VERBS_DEVICE="none")
    assert off["state"] == "absent"
    assert "no RDMA" in off["text"] or "MOOLINK_VERBS_DEVICE" in off["text"]


def test_an_unknown_command_is_refused(capsys):
    assert main(["medicate"]) == 2
    assert "unknown command 'medicate'\n" in capsys.readouterr().err
    assert main(["rnu"]) == 2
    assert "unknown command 'rnu': did you mean 'run'?" in capsys.readouterr().err


def test_sources_that_come_before_the_package_are_a_failure(tmp_path, monkeypatch, capsys):
    assert "moolink here" not in {finding.topic for finding in doctor.examine()}
    (tmp_path / "moolink").mkdir()
    (tmp_path / "moolink" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("failed  moolink here")]
    assert f"{tmp_path / 'moolink'} comes before" in line
    assert "has no compiled core" in line


def test_a_broker_is_reached_by_the_paths_that_it_has(capsys):
    with moolink.Broker(first=True) as broker:
        addresses = broker.listen("127.0.0.1:0")
        tcp = next(a for a in addresses if a.startswith("tcp://")).removeprefix("tcp://")
        assert doctor.main([tcp, "--json"]) == 0
    found = {f["topic"]: f for f in json.loads(capsys.readouterr().out)}
    by_tcp = found[f"{tcp} by tcp"]
    assert by_tcp["state"] == "ok"
    assert re.fullmatch(
        r"peer 'broker', encrypted with \S+; \d+ us a call, \d+\.\d\d GB/s", by_tcp["text"]
    )
    by_shm = found[f"{tcp} by shm"]["text"]
    assert re.fullmatch(r"peer 'broker', not encrypted; \d+ us a call, \d+\.\d\d GB/s", by_shm)
    assert found[f"{tcp} by verbs"]["state"] == "absent"


def test_a_peer_that_is_no_broker_is_named_and_one_that_is_not_there_is_a_failure(capsys):
    with moolink.Rpc("alice") as rpc:
        address = rpc.listen("127.0.0.1:0")[0].removeprefix("tcp://")
        ok, text = reach.measure(address, "tcp", None)
        assert ok
        assert "peer 'alice'" in text
        assert "no broker" in text
    ok, text = reach.measure(address, "tcp", None)
    assert not ok
    assert address in text
    assert "nothing listens on port" in (reach.obstacle(address, None) or "")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("x", "an address is HOST:PORT"),
        ("127.0.0.1:65536", "an address is HOST:PORT"),
        ("no.such.host.invalid:1", "the name 'no.such.host.invalid' is not known here"),
    ],
)
def test_an_obstacle_is_said_once(address, words, capsys):
    assert doctor.main([address, "--json"]) == 1
    findings = [f for f in json.loads(capsys.readouterr().out) if f["topic"] == address]
    assert [f["state"] for f in findings] == ["failed"]
    assert words in findings[0]["text"]


def test_a_firewall_that_drops_is_told_from_a_port_without_a_listener(monkeypatch):
    def drop(*_):
        raise TimeoutError

    monkeypatch.setattr(reach.socket, "create_connection", drop)
    assert "a firewall drops packets sent to port 4431" in reach.obstacle("h:4431", None)


def test_another_token_is_the_reason(tmp_path):
    tokens.write(str(tmp_path / "mine"), [tokens.new()])
    with moolink.Rpc("alice", token=tokens.new()) as rpc:
        address = rpc.listen("127.0.0.1:0")[0].removeprefix("tcp://")
        ok, text = reach.measure(address, "tcp", str(tmp_path / "mine"))
    assert not ok
    assert "give both the same token" in text


def test_a_token_that_cannot_be_read_is_an_obstacle(tmp_path):
    assert "no-token" in reach.obstacle("127.0.0.1:1", str(tmp_path / "no-token"))
