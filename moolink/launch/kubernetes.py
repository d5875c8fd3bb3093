"""A job as objects of Kubernetes: ``moolink launch --kubernetes``.

The broker is a Deployment behind a Service. A role is an indexed Job, or, if it is elastic, a
Deployment. The token comes from a Secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moolink import tokens
from moolink.internal.processes import THREAD_VARIABLES
from moolink.launch import yaml
from moolink.launch.description import Job, Role

PORT = 4431
_USER = 1000
_TOKEN_FOLDER = "/run/moolink"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_IMAGE = re.compile(r"[\w\[][\w.:/@\[\]-]*", re.ASCII)
_LONGEST = 63 - len("-broker") - len("-4294967295-abcde")  # added to make the names of pods
_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Options:
    """The options that the description of a job does not have.

    Args:
        image: the container image of all pods: moolink and the programs of the roles.
        namespace: of all objects; by default the one that ``kubectl`` uses.
        secret: the name of the Secret with the token, under the key ``token``; by default the
            job's name and ``-token``.
        with_token: whether to write that Secret, too. The output is a secret then.
    """

    image: str
    namespace: str | None = None
    secret: str | None = None
    with_token: bool = False


def manifests(job: Job, options: Options) -> str:
    """Returns the objects of a job as YAML, for ``kubectl apply -f -``.

    Raises:
        ValueError: a name is none that Kubernetes takes, or the options contradict the job.
        moolink.AuthError: the token is to be written, and cannot be read.
    """
    _check(job, options)
    head = [f"# The job {job.name}, made by moolink launch --kubernetes. Start it with:"]
    if not job.insecure and not options.with_token:
        secret = _secret(job, options)
        head.append(f"#   kubectl create secret generic {secret} --from-file=token=TOKEN_FILE")
    head.append("#   kubectl apply -f THIS_FILE")
    return "\n".join([*head, yaml.documents(objects(job, options))])


def objects(job: Job, options: Options) -> list[dict[str, Any]]:
    """Returns the objects themselves, in the order in which they are made."""
    made: list[dict[str, Any]] = []
    if options.with_token:
        made.append(_token(job, options))
    if job.broker is None:
        made += [_broker_service(job), _broker(job, options)]
    made += [_role(job, role, options) for role in job.roles]
    if options.namespace is not None:
        for each in made:
            each["metadata"]["namespace"] = options.namespace
    return made


def _check(job: Job, options: Options) -> None:
    for key, pattern, remedy in (
        ("image", _IMAGE, "write REGISTRY/NAME:TAG"),
        ("namespace", _LABEL, "take up to 63 lower-case letters, digits and '-'"),
        ("secret", _SECRET, "take lower-case letters, digits, '-' and '.'"),
    ):
        value = getattr(options, key)
        if value is not None and not pattern.fullmatch(value):
            raise ValueError(f"{key} is {value!r}, which Kubernetes does not take: {remedy}")
    for kind, name in [("job", job.name), *(("role", role.name) for role in job.roles)]:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the {kind} {name!r} cannot be run by Kubernetes, which takes names of lower-case "
                "letters, digits and '-' that begin with a letter: rename it"
            )
    for role in job.roles:
        if len(f"{job.name}-{role.name}") > _LONGEST:
            raise ValueError(
                f"the names {job.name!r} and {role.name!r} have more than {_LONGEST - 1} letters "
                "together, too many for Kubernetes: make one shorter"
            )
    if job.insecure and (options.with_token or options.secret is not None):
        raise ValueError("an insecure job has no token: leave out --with-token and --secret")


def _secret(job: Job, options: Options) -> str:
    return options.secret or f"{job.name}-token"


def _labels(job: Job, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "moolink",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def _object(api: str, kind: str, job: Job, component: str, **parts: Any) -> dict[str, Any]:
    metadata = {"name": f"{job.name}-{component}", "labels": _labels(job, component)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}


def _token(job: Job, options: Options) -> dict[str, Any]:
    keys = tokens.identity(token_file=job.token_file).keys
    text = "".join(f"{key.text()}\n" for key in keys)
    made = _object("v1", "Secret", job, "token", type="Opaque", stringData={"token": text})
    made["metadata"]["name"] = _secret(job, options)
    return made


def _broker_service(job: Job) -> dict[str, Any]:
    ports = [{"name": "moolink", "port": PORT, "targetPort": "moolink"}]
    spec = {"selector": _labels(job, "broker"), "ports": ports}
    return _object("v1", "Service", job, "broker", spec=spec)


def _broker(job: Job, options: Options) -> dict[str, Any]:
    probe = {"tcpSocket": {"port": "moolink"}, "periodSeconds": 5}
    container = {
        "name": "broker",
        "image": options.image,
        "command": ["moolink-broker", f"0.0.0.0:{PORT}"],
        "ports": [{"name": "moolink", "containerPort": PORT}],
        "env": _environment(_security(job)),
        "readinessProbe": probe,
        "livenessProbe": probe | {"initialDelaySeconds": 20, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two brokers would each have half of the members
        "selector": {"matchLabels": _labels(job, "broker")},
        "template": _pod(job, "broker", container, options, grace=1.0),
    }
    return _object("apps/v1", "Deployment", job, "broker", spec=spec)


def _role(job: Job, role: Role, options: Options) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": role.name,
        "image": options.image,
        "command": [_literal(argument) for argument in role.argv("python")],
        "env": _peer_environment(job, role),
    }
    if resources := _resources(role):
        container["resources"] = resources
    template = _pod(job, role.name, container, options, job.grace)
    spec: dict[str, Any]
    if role.elastic:
        spec = {
            "replicas": role.count,
            "selector": {"matchLabels": _labels(job, role.name)},
            "template": template,
        }
        return _object("apps/v1", "Deployment", job, role.name, spec=spec)
    template["spec"]["restartPolicy"] = "Never"  # the Job counts restarts, not the node
    condition = {"type": "DisruptionTarget", "status": "True"}
    evicted = {"action": "Ignore", "onPodConditions": [condition]}
    spec = {
        "completionMode": "Indexed",
        "completions": role.count,
        "parallelism": role.count,
        "backoffLimit": role.restarts,
        "podFailurePolicy": {"rules": [evicted]},  # a preempted peer does not use up a restart
        "template": template,
    }
    return _object("batch/v1", "Job", job, role.name, spec=spec)


def _pod(
    job: Job, component: str, container: dict[str, Any], options: Options, grace: float
) -> dict[str, Any]:
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    # Environment workers and arrays share memory; a container's default is 64 MB of it.
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # SIGTERM does nothing to the first process of a namespace
        "terminationGracePeriodSeconds": math.ceil(grace),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if not job.insecure:
        mounts.append({"name": "token", "mountPath": _TOKEN_FOLDER})
        spec["initContainers"] = [_copies_token(options.image, container["securityContext"])]
        volumes += [
            {"name": "token", "emptyDir": {"medium": "Memory"}},
            {"name": "secret", "secret": {"secretName": _secret(job, options)}},
        ]
    container["volumeMounts"] = mounts
    spec["containers"] = [container]
    spec["volumes"] = volumes
    return {"metadata": {"labels": _labels(job, component)}, "spec": spec}


def _copies_token(image: str, security: Mapping[str, Any]) -> dict[str, Any]:
    """A Secret's file belongs to root and others may read it; a token file must be the user's."""
    return {
        "name": "token",
        "image": image,
        "command": ["sh", "-c", f"umask 077 && cp /run/secret/token {_TOKEN_FOLDER}/token"],
        "securityContext": security,
        "volumeMounts": [
            {"name": "secret", "mountPath": "/run/secret", "readOnly": True},
            {"name": "token", "mountPath": _TOKEN_FOLDER},
        ],
    }


def _security(job: Job) -> dict[str, str]:
    if job.insecure:
        return {tokens.INSECURE_VARIABLE: "1"}
    return {tokens.FILE_VARIABLE: f"{_TOKEN_FOLDER}/token"}


def _peer_environment(job: Job, role: Role) -> list[dict[str, Any]]:
    cores = {} if role.cores is None else {"MOOLINK_CORES": str(role.cores)}
    fixed = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **dict.fromkeys(THREAD_VARIABLES if cores else (), str(role.cores)),
        **{name: _literal(value) for name, value in role.env.items()},
        # These win over the role's own, as under every launcher.
        **_security(job),
        **cores,
        "MOOLINK_BROKER": job.broker or f"{job.name}-broker:{PORT}",
        "MOOLINK_GROUP": _literal(job.group or job.name),
        "MOOLINK_ROLE": role.name,
        "MOOLINK_NUM_PEERS": str(role.count),
    }
    for name in ("MOOLINK_PEER_INDEX", "MOOLINK_PEER_NAME"):
        fixed.pop(name, None)  # the pod's own follow
    if role.elastic:
        return [*_environment(fixed), _field("MOOLINK_PEER_NAME", "metadata.name")]
    # A name that the pod's successor has, too; it refers to the variable before it.
    return [
        *_environment(fixed),
        _field("MOOLINK_PEER_INDEX", f"metadata.annotations['{_INDEX}']"),
        {"name": "MOOLINK_PEER_NAME", "value": f"{role.name}-$(MOOLINK_PEER_INDEX)"},
    ]


def _environment(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(text: str) -> str:
    """Keeps Kubernetes from taking $(...) for a variable of its own, and $$ for one $."""
    return text.replace("$", "$$")


def _resources(role: Role) -> dict[str, Any]:
    wanted: dict[str, str] = {}
    if role.cores is not None:
        wanted["cpu"] = str(role.cores)
    if role.gpus:
        wanted["nvidia.com/gpu"] = str(role.gpus)
    return {"requests": wanted, "limits": wanted} if wanted else {}
