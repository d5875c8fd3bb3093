"""Speed of the whole IMPALA job against what its parts allow.

    python benchmarks/impala.py --env-id ALE/Pong-v5 --frame-size 84 --peers 1 2

Each part is measured alone, on one thread, with the shapes it has in the job: stepping the
environments, inferring actions, and training (loss, gradients, optimiser). The parts take turns, so
that a change of the machine's speed meets all of them, and are measured before and after the job.
If nothing else cost anything, a job on C cores would run at C / (sum of the parts' core-seconds a
step). The job is `moolink run -n PEERS -m examples.torch.impala`, measured after its start.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by path, this file does not see the examples otherwise

import numpy as np  # noqa: E402
import process_tree  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

from examples.common.environments import make_envs  # noqa: E402
from examples.common.memory import keep_freed_memory  # noqa: E402
from examples.common.options import ImpalaOptions, parse  # noqa: E402
from examples.common.run import Run  # noqa: E402
from examples.torch.common import make_net, to_device  # noqa: E402
from examples.torch.impala import Actor, impala_loss, make_optimizer  # noqa: E402
from examples.torch.networks import Net  # noqa: E402

TURN = 0.25  # CPU-seconds of a part's turn


@dataclass
class Options:
    env_id: str = "ALE/Pong-v5"
    """Environment of the learner."""
    frame_size: int = 84
    """Height and width of Atari frames."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the network."""
    peers: tuple[int, ...] = (1, 2)
    """Jobs to run, by their numbers of peers."""
    num_envs: int | None = None
    """Environments of the whole job. Default: the learner's."""
    seconds: float = 40.0
    """Length of the measured part of each job."""
    turns: int = 12
    """Turns of each part, half before and half after the job."""
    json: Path | None = None
    """Write the results here."""
    markdown: Path | None = None
    """Write the table here."""


@dataclass
class Result:
    """Core-seconds are in microseconds of CPU time per agent step; a step is four frames."""

    peers: int
    cores: int
    environment_us: float
    inference_us: float
    training_us: float
    steps_per_second: float
    steps_per_cpu_second: float
    allowed_steps_per_second: float
    ratio: float
    cores_used: float


def job_arguments(options: Options, peers: int) -> list[str]:
    arguments = ["--env-id", options.env_id, "--frame-size", str(options.frame_size)]
    arguments += ["--precision", options.precision]
    if options.num_envs is not None:
        arguments += ["--num-envs", str(options.num_envs // peers)]
    return arguments


def job_options(options: Options, peers: int) -> ImpalaOptions:
    environ = {"MOOLINK_NUM_PEERS": str(peers)}
    return parse(ImpalaOptions, [*job_arguments(options, peers), "--no-resume"], environ)


def make_parts(o: ImpalaOptions) -> dict[str, tuple[Callable[[], object], int]]:
    """Each part: a call, and the agent steps that one call is worth."""
    o.env_threads = 1
    envs = make_envs(o, o.envs_per_group)
    num_envs = envs.num_envs
    net = make_net(Net, envs, o, None)
    optimizer = make_optimizer(net, o)
    actor = Actor(o, envs, net, Run(o, envs))
    group = actor.begin(0)
    while (batch := actor.next_batch(0)) is None:
        actor.go_on(group)
    whole, memory = batch.unroll.data(slice(num_envs)), actor.net.no_memory(num_envs)
    observation, first = {k: x[0] for k, x in whole["observation"].items()}, whole["first"][0]
    random, sizes = np.random.default_rng(0), envs.actions.choices

    def step_environment() -> None:
        envs.send(random.integers(sizes, size=(num_envs, len(sizes))))
        envs.recv()

    def infer() -> None:
        pi, _, _ = actor.infer(observation, first, memory)
        pi.log_prob(pi.sample())

    def train() -> None:
        impala_loss(net, to_device(batch.data, net.device), o).total.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), o.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        actor.take_parameters(net.state_dict().values(), actor.version + 1)

    return {
        "environment": (step_environment, num_envs),
        "inference": (infer, num_envs),
        "training": (train, o.unroll_length * o.batch_size),
    }


def measure_parts(
    parts: dict[str, tuple[Callable[[], object], int]], turns: int
) -> dict[str, list[float]]:
    """CPU-seconds a step of each part, one figure a turn."""
    figures: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns):
        for name, (call, steps) in parts.items():
            call()  # its memory has left the caches meanwhile
            calls, start = 0, time.process_time()
            while (used := time.process_time() - start) < TURN:
                call()
                calls += 1
            figures[name].append(used / (calls * steps))
    return figures


def run_job(options: Options, peers: int) -> tuple[float, float, float]:
    """Steps per second, steps per CPU-second and cores used of the whole job."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "moolink", "run", "-n", str(peers)]
        command += ["-m", "examples.torch.impala", *job_arguments(options, peers)]
        command += ["--save-dir", directory, "--no-resume", "--log-interval", "1"]
        command += ["--total-steps", "100000000", "--checkpoint-interval", "100000"]
        job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            curve = Path(directory, "learning_curve.csv")
            first = wait_for_row(job, curve, lambda row: float(row["seconds"]) > 12)
            cpu = process_tree.cpu_seconds(job.pid)
            until = float(first["seconds"]) + options.seconds
            last = wait_for_row(job, curve, lambda row: float(row["seconds"]) > until)
            cpu = process_tree.cpu_seconds(job.pid) - cpu
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=30)
    steps = int(last["steps"]) - int(first["steps"])
    seconds = float(last["seconds"]) - float(first["seconds"])
    return steps / seconds, steps / cpu, cpu / seconds


def wait_for_row(
    job: subprocess.Popen[bytes], path: Path, wanted: Callable[[dict[str, str]], bool]
) -> dict[str, str]:
    """The newest row of the learning curve, as soon as it is a wanted one."""
    while True:
        if job.poll() is not None:
            raise RuntimeError(f"the job ended with status {job.returncode} while being measured")
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if None not in row.values()]
            if rows and wanted(rows[-1]):
                return rows[-1]
        time.sleep(0.05)


def measure(options: Options, peers: int) -> Result:
    cores = len(os.sched_getaffinity(0))
    parts = make_parts(job_options(options, peers))
    figures = measure_parts(parts, options.turns // 2)
    steps_per_second, steps_per_cpu_second, cores_used = run_job(options, peers)
    for name, more in measure_parts(parts, options.turns - options.turns // 2).items():
        figures[name] += more
    cost = {name: statistics.median(values) for name, values in figures.items()}
    allowed = cores / sum(cost.values())
    return Result(
        peers=peers,
        cores=cores,
        environment_us=cost["environment"] * 1e6,
        inference_us=cost["inference"] * 1e6,
        training_us=cost["training"] * 1e6,
        steps_per_second=steps_per_second,
        steps_per_cpu_second=steps_per_cpu_second,
        allowed_steps_per_second=allowed,
        ratio=steps_per_second / allowed,
        cores_used=cores_used,
    )


def table(options: Options, results: list[Result]) -> str:
    lines = [
        f"{options.env_id}, frames of {options.frame_size}, {options.precision}; {machine()}",
        "",
        "| peers | environment | inference | training | parts allow | job | ratio "
        "| per CPU-second | cores used |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.peers} | {r.environment_us:.0f} µs | {r.inference_us:.0f} µs "
        f"| {r.training_us:.0f} µs | {r.allowed_steps_per_second:,.0f}/s "
        f"| {r.steps_per_second:,.0f}/s | {r.ratio:.2f} | {r.steps_per_cpu_second:,.0f} "
        f"| {r.cores_used:.2f} |"
        for r in results
    ]
    return "\n".join(lines)


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, load {load:.1f} at the end, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    results = [measure(options, peers) for peers in options.peers]
    print(table(options, results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(table(options, results) + "\n")


if __name__ == "__main__":
    main()
