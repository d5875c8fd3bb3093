"""`moolink launch --kubernetes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moolink.cli.launch import main

JOB = """
name = "walk"

[[role]]
name = "learner"
command = "-m walk.learner"
count = 2
"""


def test_it_prints_manifests_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    options = ["--kubernetes", "--image", "walk:1", "--namespace", "rl", "--secret", "ours"]
    assert main([*options, str(path)]) == 0
    text = capsys.readouterr().out
    assert "kind: Job" in text
    assert "namespace: rl" in text
    assert "secretName: ours" in text
    assert "  - python\n" in text


def test_what_is_missing_or_too_much_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    for options, words in (
        (["--kubernetes"], "--kubernetes needs --image"),
        (["--kubernetes", "--image", "a b"], "image is 'a b', which Kubernetes does not take"),
        (["--kubernetes", "--image", ""], "image is '', which Kubernetes does not take"),
        (["--kubernetes", "--image", "a", "--secret", "My_key"], "secret is 'My_key', which"),
        (["--kubernetes", "--image", "a", "--namespace", "a.b"], "namespace is 'a.b', which"),
        (["--kubernetes", "--slurm", "time=1"], "give one of --slurm and --kubernetes"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*options, str(path)])
        assert words in capsys.readouterr().err
