import json
import os
import pathlib
import subprocess
import sys

from moolink.cli import doctor
from moolink.cli.main import main


def test_the_report_is_complete_and_readable_by_programs(capsys):
    status = main(["doctor", "--json"])
    findings = {item["topic"]: item for item in json.loads(capsys.readouterr().out)}
    assert status == any(item["state"] == "failed" for item in findings.values())
    assert {"moolink", "core", "machine", "memfd", "pidfd", "CUDA", "numpy"} <= findings.keys()
    assert findings["numpy"]["state"] == "ok"
    assert all(item["text"] for item in findings.values())


def test_a_failed_check_gives_its_reason_and_the_exit_status(monkeypatch, capsys):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(doctor.os, "eventfd", refuse)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " eventfd " in line]
    assert line.startswith("failed")
    assert "Too many open files" in line


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
    assert "unknown command 'medicate'" in capsys.readouterr().err


def test_sources_that_come_before_the_package_are_a_failure(tmp_path, monkeypatch, capsys):
    assert "moolink here" not in {finding.topic for finding in doctor.examine()}
    (tmp_path / "moolink").mkdir()
    (tmp_path / "moolink" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "moolink here" in x]
    assert line.startswith("failed")
    assert f"{tmp_path / 'moolink'} comes before" in line
    assert "has no compiled core" in line
