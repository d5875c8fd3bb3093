"""docker/Containerfile: what it must say; and, where a builder and the wheels are, its build."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from moolink.launch import kubernetes
from tests.processes import ROOT

PATH = ROOT / "docker" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """Reads the file: each instruction with its arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", PATH.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(word, rest.strip()) for word, _, rest in (x.partition(" ") for x in text.splitlines())]


def test_it_ends_as_the_user_that_the_pods_have() -> None:
    found = instructions()
    assert {word for word, _ in found} == {"FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR", "CMD"}
    users = [rest for word, rest in found if word == "USER"]
    assert users == [str(kubernetes._USER)]
    assert f"--uid {kubernetes._USER}" in next(rest for _, rest in found if "useradd" in rest)


def test_its_commands_are_ones_of_a_shell() -> None:
    for word, rest in instructions():
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


@pytest.mark.timeout(900)
def test_it_can_be_built() -> None:
    builder = shutil.which("podman") or shutil.which("buildah")
    if builder is None:
        pytest.skip("needs podman or buildah")
    if not list((ROOT / "dist").glob("moolink-*-cp312-abi3-*.whl")):
        pytest.skip("needs the wheels: make wheels")
    command = [builder, "build", "-f", str(PATH), "--build-arg", "EXTRAS=", "-t", "moolink-test"]
    subprocess.run([*command, str(ROOT)], check=True)
