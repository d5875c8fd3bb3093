import json

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


def test_an_unknown_command_is_refused(capsys):
    assert main(["medicate"]) == 2
    assert "unknown command 'medicate'" in capsys.readouterr().err
