"""The options of ``moolink launch`` for Slurm and for Kubernetes."""

from __future__ import annotations

import argparse
import sys

from moolink.launch.description import Job


def add_slurm_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a job that Slurm runs."""
    group = parser.add_argument_group("by Slurm, from a login node")
    group.add_argument(
        "--slurm",
        metavar="NAME=VALUE,...",
        action="append",
        help="submit each process with these options of srun (partition=gpu,time=60); may be "
        "repeated; --listen and --python are those of the login node and of the nodes",
    )


def run_by_slurm(job: Job, options: argparse.Namespace) -> int:
    """Runs the job by Slurm."""
    from moolink.launch import slurm

    return slurm.launch(job, options.slurm, listen=options.listen, python=options.python)


def add_kubernetes_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a job that Kubernetes runs."""
    group = parser.add_argument_group("by Kubernetes")
    group.add_argument(
        "--kubernetes",
        action="store_true",
        help="run nothing; print the job's manifests, for kubectl apply -f -",
    )
    group.add_argument("--image", help="the container image of all pods (needed)")
    group.add_argument("--namespace", help="of all objects (default: kubectl's)")
    group.add_argument(
        "--secret", metavar="NAME", help="the Secret with the token (default: JOB-token)"
    )
    group.add_argument(
        "--with-token", action="store_true", help="print that Secret, too: the output is secret"
    )


def print_manifests(job: Job, options: argparse.Namespace) -> int:
    """Prints the job's manifests.

    Raises:
        ValueError: there is no image, or Kubernetes takes not all that the job says.
    """
    from moolink.launch import kubernetes

    if options.image is None:
        raise ValueError("--kubernetes needs --image: the container image of all pods")
    chosen = kubernetes.Options(
        options.image, options.namespace, options.secret, options.with_token
    )
    sys.stdout.write(kubernetes.manifests(job, chosen))
    return 0
