"""Learning curves of the torch and the JAX learner, one over the other.

    python benchmarks/learning_curves.py --total-steps 300000 --seeds 0 1 2

Runs each learner with each seed (`moolink run`), and draws the mean return over the steps: a line
for each framework's middle seed, a band from its least to its greatest. Says whether the bands
overlap at each tenth of the run. Writes docs/results/learning_GAME.png and .csv, as
learning_breakout.csv for ALE/Breakout-v5. Beside other work on the machine the processor's time of
a job tells more than its seconds.
"""

from __future__ import annotations

import contextlib
import csv
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ("torch", "jax")
POINTS = 41  # of a drawn curve
COLORS = {"torch": "tab:orange", "jax": "tab:blue"}


@dataclass
class Options:
    env_id: str = "moolink/Catch-v0"
    total_steps: int = 300_000
    seeds: tuple[int, ...] = (0, 1, 2)
    peers: int = 2
    repeat_action_probability: float | None = None
    """Of Atari games, if it is not to be the id's."""
    log_interval: float = 0.25
    """Seconds between two points of a curve, as it is measured."""
    runs: Path | None = None
    """Directory in which the jobs are kept, and from which those that have ended before are taken:
    a comparison that was interrupted goes on."""
    output: Path = ROOT / "docs" / "results"

    @property
    def env_name(self) -> str:
        """`Catch-v0`."""
        return self.env_id.rpartition("/")[2]

    @property
    def result(self) -> Path:
        """The results' path without a suffix: `learning_catch` in the output directory."""
        return self.output / f"learning_{self.env_name.partition('-')[0].lower()}"


@dataclass
class Curve:
    """Of one run: steps, mean returns of the last 100 games, and the time that it took, in seconds
    and in seconds of a processor, of all its processes together."""

    steps: NDArray[np.float64]
    returns: NDArray[np.float64]
    seconds: float
    cpu_seconds: float


def learn(options: Options, framework: str, seed: int) -> Curve:
    """One job, in a process group of its own."""
    with contextlib.ExitStack() as stack:
        if options.runs is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            name = f"{options.env_name}-{options.total_steps}-{framework}-{seed}"
            directory = options.runs / name
        ended = directory / "ended.json"
        if not ended.exists():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run_job(options, framework, seed, directory)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            ended.write_text(json.dumps({"cpu_seconds": used}))
        with (directory / "learning_curve.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["mean_return"]]
        cpu_seconds = json.loads(ended.read_text())["cpu_seconds"]
    steps = np.array([float(row["steps"]) for row in rows])
    returns = np.array([float(row["mean_return"]) for row in rows])
    return Curve(steps, returns, float(rows[-1]["seconds"]), cpu_seconds)


def run_job(options: Options, framework: str, seed: int, directory: Path) -> None:
    command = [sys.executable, "-m", "moolink", "run", "-n", str(options.peers)]
    command += ["-m", f"examples.{framework}.impala", "--env-id", options.env_id]
    command += ["--total-steps", str(options.total_steps), "--seed", str(seed), "--no-resume"]
    command += ["--log-interval", str(options.log_interval), "--save-dir", str(directory)]
    if options.repeat_action_probability is not None:
        command += ["--repeat-action-probability", str(options.repeat_action_probability)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def bands(curves: list[Curve], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least, middle and greatest return of the seeds at those steps [3, len(at)]."""
    values = np.sort([np.interp(at, curve.steps, curve.returns) for curve in curves], axis=0)
    return np.stack([values[0], values[len(values) // 2], values[-1]])


def draw(options: Options, curves: dict[str, list[Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    at = np.linspace(0, options.total_steps, POINTS)
    for framework, of_seeds in curves.items():
        least, middle, greatest = bands(of_seeds, at)
        axes.fill_between(at / 1e6, least, greatest, alpha=0.25, color=COLORS[framework])
        label = f"{framework}, {np.median([c.cpu_seconds for c in of_seeds]):.0f} s of a processor"
        axes.plot(at / 1e6, middle, color=COLORS[framework], label=label)
    title = f"{options.env_name}, {options.peers} peers, {len(options.seeds)} seeds each"
    axes.set(title=title, xlabel="million agent steps", ylabel="mean return of 100 games")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    curves: dict[str, list[Curve]] = {framework: [] for framework in FRAMEWORKS}
    for seed in options.seeds:  # one framework after the other, so that both see the same load
        for framework in FRAMEWORKS:
            curve = learn(options, framework, seed)
            curves[framework].append(curve)
            last = curve.returns[-1]
            print(
                f"{framework} seed {seed}: return {last:.2f} in {curve.seconds:.0f} s, "
                f"{curve.cpu_seconds:.0f} s of a processor",
                flush=True,
            )
    tenths = options.total_steps * np.arange(1, 11) / 10
    per_framework = {name: bands(of_seeds, tenths) for name, of_seeds in curves.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    apart = 0
    with options.result.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [f"{name}_{what}" for name in FRAMEWORKS for what in ("least", "middle", "most")]
        writer.writerow(["steps", *columns, "overlap"])
        for i, steps in enumerate(tenths):
            mine, theirs = (per_framework[name][:, i] for name in FRAMEWORKS)
            overlap = mine[0] <= theirs[2] and theirs[0] <= mine[2]
            apart += not overlap
            figures = [f"{x:.3f}" for x in (*mine, *theirs)]
            writer.writerow([int(steps), *figures, "yes" if overlap else "no"])
            print(f"{int(steps):>9,} steps: {' '.join(figures)} {'' if overlap else 'apart'}")
    draw(options, curves, options.result.with_suffix(".png"))
    print(f"bands overlap at {10 - apart} of 10 tenths")
    return 0


if __name__ == "__main__":
    sys.exit(main())
