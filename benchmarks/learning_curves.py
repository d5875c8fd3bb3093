"""Learning curves of the torch and the JAX learner, one over the other, and statistics of both.

    python benchmarks/learning_curves.py --total-steps 300000 --seeds 0 1 2
    python benchmarks/learning_curves.py --env-id ALE/Pong-v5 ALE/Breakout-v5 --seeds 0 1 2

Runs each learner with each seed in each environment (`moolink run`). For each environment it draws
the mean return over the steps: a line for each framework's middle seed, a band from its least to
its greatest. Says whether the bands overlap at each tenth of the run. Writes
docs/results/learning_GAME.png and .csv, as learning_breakout.csv for ALE/Breakout-v5. Beside other
work on the machine the processor's time of a job tells more than its seconds.

The score of a run is the mean return of its last 100 episodes. Prints and writes
(learning_scores.json) number, mean, median, standard deviation, IQM and 95 % bootstrap intervals of
each framework's runs, for each environment; for Atari games also of human-normalized scores, and of
those for all games together. learning_scores_rliable.json and learning_scores_marl_eval.json are
for rliable (runs x games; human-normalized where all are Atari games) and for MARL-eval (at each
tenth of the run).
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
sys.path.insert(0, str(ROOT))

from examples.common import statistics  # noqa: E402
from examples.common.environments import spec_of  # noqa: E402
from examples.common.evaluation import write_json  # noqa: E402

FRAMEWORKS = ("torch", "jax")
POINTS = 41  # of a drawn curve
COLORS = {"torch": "tab:orange", "jax": "tab:blue"}


@dataclass
class Options:
    env_id: tuple[str, ...] = ("moolink/Catch-v0",)
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

    def result(self, env_id: str) -> Path:
        """The results' path without a suffix: `learning_catch` in the output directory."""
        return self.output / f"learning_{name_of(env_id).partition('-')[0].lower()}"


def name_of(env_id: str) -> str:
    """`Catch-v0`."""
    return env_id.rpartition("/")[2]


@dataclass
class Curve:
    """Of one run: steps, mean returns of the last 100 games, and the time that it took, in seconds
    and in seconds of a processor, of all its processes together."""

    steps: NDArray[np.float64]
    returns: NDArray[np.float64]
    seconds: float
    cpu_seconds: float


def learn(options: Options, env_id: str, framework: str, seed: int) -> Curve:
    """One job, in a process group of its own."""
    with contextlib.ExitStack() as stack:
        if options.runs is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            name = f"{name_of(env_id)}-{options.total_steps}-{framework}-{seed}"
            directory = options.runs / name
        ended = directory / "ended.json"
        if not ended.exists():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run_job(options, env_id, framework, seed, directory)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            ended.write_text(json.dumps({"cpu_seconds": used}))
        with (directory / "learning_curve.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["mean_return"]]
        cpu_seconds = json.loads(ended.read_text())["cpu_seconds"]
    steps = np.array([float(row["steps"]) for row in rows])
    returns = np.array([float(row["mean_return"]) for row in rows])
    return Curve(steps, returns, float(rows[-1]["seconds"]), cpu_seconds)


def run_job(options: Options, env_id: str, framework: str, seed: int, directory: Path) -> None:
    command = [sys.executable, "-m", "moolink", "run", "-n", str(options.peers)]
    command += ["-m", f"examples.{framework}.impala", "--env-id", env_id]
    command += ["--total-steps", str(options.total_steps), "--seed", str(seed), "--no-resume"]
    command += ["--log-interval", str(options.log_interval), "--save-dir", str(directory)]
    if options.repeat_action_probability is not None:
        command += ["--repeat-action-probability", str(options.repeat_action_probability)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def bands(curves: list[Curve], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least, middle and greatest return of the seeds at those steps [3, len(at)]."""
    values = np.sort([np.interp(at, curve.steps, curve.returns) for curve in curves], axis=0)
    return np.stack([values[0], values[len(values) // 2], values[-1]])


def draw(options: Options, env_id: str, curves: dict[str, list[Curve]], path: Path) -> None:
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
    title = f"{name_of(env_id)}, {options.peers} peers, {len(options.seeds)} seeds each"
    axes.set(title=title, xlabel="million agent steps", ylabel="mean return of 100 games")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare(options: Options, env_id: str) -> dict[str, list[Curve]]:
    """The curves of each framework in one environment, drawn and compared."""
    curves: dict[str, list[Curve]] = {framework: [] for framework in FRAMEWORKS}
    for seed in options.seeds:  # one framework after the other, so that both see the same load
        for framework in FRAMEWORKS:
            curve = learn(options, env_id, framework, seed)
            curves[framework].append(curve)
            last = curve.returns[-1]
            print(
                f"{framework} seed {seed}: return {last:.2f} in {curve.seconds:.0f} s, "
                f"{curve.cpu_seconds:.0f} s of a processor",
                flush=True,
            )
    tenths = tenths_of(options)
    per_framework = {name: bands(of_seeds, tenths) for name, of_seeds in curves.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    apart = 0
    with options.result(env_id).with_suffix(".csv").open("w", newline="") as file:
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
    draw(options, env_id, curves, options.result(env_id).with_suffix(".png"))
    print(f"bands overlap at {10 - apart} of 10 tenths")
    return curves


def tenths_of(options: Options) -> NDArray[np.float64]:
    return options.total_steps * np.arange(1, 11) / 10


def game_of(env_id: str) -> str | None:
    """ALE's name of the game."""
    return None if ":" in env_id else spec_of(env_id).kwargs.get("game")


def report(options: Options, curves: dict[str, dict[str, list[Curve]]]) -> None:
    """Prints and writes the statistics of the runs' last returns, by environment and framework."""
    found: dict[str, dict[str, object]] = {}
    raw, normalized, runs = {}, {}, {}
    for framework in FRAMEWORKS:
        last = {e: [c.returns[-1] for c in by[framework]] for e, by in curves.items()}
        scores = {e: statistics.human_normalized(game_of(e), x) for e, x in last.items()}
        raw[framework] = np.array(list(last.values())).T
        if all(x is not None for x in scores.values()):
            normalized[framework] = np.array(list(scores.values())).T
        for env_id, returns in last.items():
            summary = statistics.summary(returns)
            print(f"{env_id}, {framework}: {statistics.said(summary, 'runs')}")
            if scores[env_id] is not None:
                summary["human_normalized"] = statistics.summary(scores[env_id])
                print(f"    human-normalized mean {summary['human_normalized']['mean']:.3f}")
            found.setdefault(env_id, {})[framework] = summary
    if normalized:
        for framework, matrix in normalized.items():
            summary = statistics.summary(matrix)
            found.setdefault("all", {})[framework] = summary
            print(f"all games, {framework}, human-normalized: {statistics.said(summary, 'runs')}")
    for env_id, by in curves.items():
        runs[env_id] = {
            framework: {
                seed: [(int(t), [float(np.interp(t, c.steps, c.returns))]) for t in tenths]
                for seed, c in zip(options.seeds, of_seeds, strict=True)
            }
            for framework, of_seeds in by.items()
            for tenths in [tenths_of(options)]
        }
    path = options.output / "learning_scores"
    write_json(path.with_suffix(".json"), {"options": found_options(options), "scores": found})
    matrices = statistics.for_rliable(normalized or raw)
    write_json(path.with_name(path.name + "_rliable.json"), matrices)
    write_json(path.with_name(path.name + "_marl_eval.json"), statistics.for_marl_eval(runs))


def found_options(options: Options) -> dict[str, object]:
    """What was run."""
    return {
        "env_id": list(options.env_id),
        "total_steps": options.total_steps,
        "seeds": list(options.seeds),
        "peers": options.peers,
        "repeat_action_probability": options.repeat_action_probability,
    }


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    report(options, {env_id: compare(options, env_id) for env_id in options.env_id})
    return 0


if __name__ == "__main__":
    sys.exit(main())
