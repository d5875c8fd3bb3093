"""What moolink launch --kubernetes writes, against the schemas of Kubernetes' own interface."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import moolink
from moolink import tokens
from moolink.launch.description import Job, Role
from moolink.launch.kubernetes import Options, manifests

yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install 'moolink[test]'")

LEARNER = Role("learner", ("learner.py",), count=2, cores=4, gpus=1, restarts=3)
ACTOR = Role("actor", ("python", "actor.py", "$(HOME)"), count=8, env={"SEED": "7"}, elastic=True)
JOB = Job("walk", (LEARNER, ACTOR), grace=20.0)
OPTIONS = Options("registry.example/walk:1")
VERSIONS = ("1.28", "1.37")


def read(text: str) -> dict[tuple[str, str], Any]:
    """Reads objects by kind and name."""
    made = list(yaml.safe_load_all(text))
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """The environment of a container, by the variables' names."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("job", "options"),
    [
        (JOB, OPTIONS),
        (JOB, Options("walk:1", namespace="rl", secret="ours", with_token=True)),
        (Job("walk", (LEARNER, ACTOR), insecure=True), OPTIONS),
        (Job("walk", (ACTOR,), broker="broker.example:4431"), OPTIONS),
    ],
)
def test_every_object_is_valid(job: Job, options: Options, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in yaml.safe_load_all(manifests(job, options)):
        kubernetes_validate.validate(each, version, strict=True)


def test_roles_become_an_indexed_job_and_a_deployment_behind_a_broker() -> None:
    made = read(manifests(JOB, OPTIONS))
    assert list(made) == [
        ("Service", "walk-broker"),
        ("Deployment", "walk-broker"),
        ("Job", "walk-learner"),
        ("Deployment", "walk-actor"),
    ]
    service, broker, learner, actor = (each["spec"] for each in made.values())
    assert service["selector"] == broker["template"]["metadata"]["labels"]
    assert broker["selector"]["matchLabels"] == service["selector"]
    probes = broker["template"]["spec"]["containers"][0]
    assert probes["livenessProbe"]["tcpSocket"] == {"port": "moolink"}
    assert (learner["completionMode"], learner["completions"]) == ("Indexed", 2)
    assert (learner["parallelism"], learner["backoffLimit"]) == (2, 3)
    assert actor["replicas"] == 8
    assert learner["template"]["spec"]["terminationGracePeriodSeconds"] == 20


def test_pods_get_their_command_resources_and_place() -> None:
    made = read(manifests(JOB, OPTIONS))
    (learner,) = made["Job", "walk-learner"]["spec"]["template"]["spec"]["containers"]
    (actor,) = made["Deployment", "walk-actor"]["spec"]["template"]["spec"]["containers"]
    assert learner["command"] == ["python", "learner.py"]
    assert learner["resources"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "1"}
    assert variables(learner)["MOOLINK_CORES"] == "4"
    assert variables(learner)["MOOLINK_BROKER"] == "walk-broker:4431"
    assert variables(learner)["MOOLINK_PEER_NAME"] == "learner-$(MOOLINK_PEER_INDEX)"
    assert "resources" not in actor
    assert actor["command"][-1] == "$$(HOME)", "the program's own text, not Kubernetes' variable"
    assert variables(actor)["SEED"] == "7"
    assert variables(actor)["MOOLINK_PEER_NAME"]["fieldRef"] == {"fieldPath": "metadata.name"}


@pytest.mark.parametrize("text", ["echo $$", "$(HOME)", "$$(HOME)", "$HOME", "a$", "$(HOME"])
def test_kubernetes_leaves_a_programs_text_as_it_is(text: str) -> None:
    role = Role("actor", ["sh", "-c", text], env={"TEXT": text})
    (_, _, made) = yaml.safe_load_all(manifests(Job("walk", [role], insecure=True), OPTIONS))
    (actor,) = made["spec"]["template"]["spec"]["containers"]
    assert expanded(actor["command"][-1]) == text
    assert expanded(variables(actor)["TEXT"]) == text


def expanded(text: str) -> str:
    """As Kubernetes does, in a container whose environment has HOME."""
    return re.sub(r"\$\$|\$\(HOME\)", lambda found: "$" if found[0] == "$$" else "/home", text)


def test_the_environment_of_a_role_does_not_change_its_place() -> None:
    role = Role("actor", ["x"], env={"MOOLINK_GROUP": "other", "MOOLINK_PEER_INDEX": "9"})
    (_, _, made) = yaml.safe_load_all(manifests(Job("walk", [role], insecure=True), OPTIONS))
    (actor,) = made["spec"]["template"]["spec"]["containers"]
    names = [each["name"] for each in actor["env"]]
    assert len(names) == len(set(names))
    assert variables(actor)["MOOLINK_GROUP"] == "walk"
    assert "fieldRef" in variables(actor)["MOOLINK_PEER_INDEX"], "the pod's own"


def test_no_pod_runs_as_root_or_with_a_key_to_the_cluster() -> None:
    made = read(manifests(JOB, OPTIONS))
    pods = [each["spec"]["template"]["spec"] for each in made.values() if each["kind"] != "Service"]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in [*pod["initContainers"], *pod["containers"]]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_token_is_a_reference_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    tokens.write(path, [key := tokens.new()])
    job = Job("walk", (LEARNER,), token_file=str(path))
    text = manifests(job, OPTIONS)
    assert key.text() not in text
    assert "kubectl create secret generic walk-token --from-file=token=" in text
    text = manifests(job, Options("walk:1", with_token=True))
    assert read(text)["Secret", "walk-token"]["stringData"] == {"token": f"{key.text()}\n"}
    with pytest.raises(moolink.AuthError, match="cannot read the token file"):
        manifests(Job("walk", (LEARNER,), token_file="gone"), Options("walk:1", with_token=True))


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        (Job("Walk", (LEARNER,)), OPTIONS, r"the job 'Walk' cannot .* lower-case"),
        (Job("w", (Role("Actor", ("a",)),)), OPTIONS, r"the role 'Actor' .* rename it"),
        (Job("w" * 30, (Role("a" * 30, ("a",)),)), OPTIONS, "too many for Kubernetes"),
        (Job("w", (LEARNER,), insecure=True), Options("i", with_token=True), "has no token"),
    ],
)
def test_what_kubernetes_would_refuse_is_an_error(job: Job, options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manifests(job, options)
