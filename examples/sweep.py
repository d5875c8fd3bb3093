"""A search for hyperparameters with Optuna, from outside of the learner.

    python -m examples.sweep --trials 20 --at-once 2 --peers 1
    python -m examples.sweep --learner examples.torch.impala --env-id moolink/Catch-v0 --seconds 30

Options that are not its own go to the learner.
Each trial is a job of its own: `moolink run` with a group of its own, on one broker that this
program has. The learner writes its last return where `--result-json` says, and that is the trial's
value. A job that ends with an error is a failed trial, which Optuna does not take for a bad value.
Change `suggest` to search for something else; with `--storage` a search goes on where it ended.

Run it with -m: run by path, its folder would hide the packages torch and jax.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import optuna
import tyro
from optuna.trial import Trial, TrialState

import moolink


@dataclass
class Options:
    learner: str = "examples.torch.ppo"
    """Module of the learner."""
    env_id: str = "CartPole-v1"
    """Its environment."""
    trials: int = 20
    """Trials in all."""
    at_once: int = 2
    """Trials that run at once, each with this many peers:"""
    peers: int = 1
    """Peers of each trial."""
    seconds: float = 60.0
    """Length of each trial."""
    save_dir: Path = Path("runs/sweep")
    """Each trial's files and output go to a folder in here."""
    storage: str | None = None
    """Where Optuna keeps the trials, such as `sqlite:///sweep.db`. Default: in memory."""


def suggest(trial: Trial) -> list[str]:
    """The learner's options that are searched for."""
    return [
        *["--learning-rate", str(trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True))],
        *["--entropy-cost", str(trial.suggest_float("entropy_cost", 1e-4, 3e-2, log=True))],
        *["--discount", str(1 - trial.suggest_float("one_minus_discount", 3e-3, 5e-2, log=True))],
    ]


class TrialError(Exception):
    """A job has no result; the message says where its output is."""


def run_trial(options: Options, number: int, arguments: list[str], broker: str) -> float:
    """Trains one job to its end, with these options of the learner, and returns its last mean
    return."""
    directory = options.save_dir / f"trial-{number}"
    directory.mkdir(parents=True, exist_ok=True)
    result, output = directory / "result.json", directory / "output.txt"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "moolink", "run", "-n", str(options.peers)]
    command += ["--connect", broker, "--group", f"trial-{number}", "-m", options.learner]
    command += ["--env-id", options.env_id, "--save-dir", str(directory), "--no-resume"]
    command += ["--max-seconds", str(options.seconds), "--result-json", str(result)]
    with output.open("w") as file:
        done = subprocess.run([*command, *arguments], stdout=file, stderr=file, check=False)
    if done.returncode != 0:
        raise TrialError(f"the job ended with status {done.returncode}; its output is in {output}")
    try:
        value = json.loads(result.read_text())["mean_return"]
    except OSError as error:  # a job with a full disk goes on, but leaves no result
        raise TrialError(f"the job left no result ({error}); see {output}") from error
    if value is None:
        raise TrialError(f"no episode ended within {options.seconds:g} s; see {output}")
    return float(value)


def search(options: Options, fixed: list[str], study: optuna.Study, broker: str) -> None:
    """Asks for trials, runs some at once, and tells how each ended. `fixed`: options of all."""
    running: dict[Future[float], Trial] = {}
    left = options.trials
    with ThreadPoolExecutor(options.at_once) as threads:
        while left or running:
            while left and len(running) < options.at_once:
                trial = study.ask()
                arguments = [*suggest(trial), *fixed]
                job = threads.submit(run_trial, options, trial.number, arguments, broker)
                running[job] = trial
                left -= 1
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                trial, error = running.pop(job), job.exception()
                if error is None:
                    study.tell(trial, job.result())
                    print(f"trial {trial.number}: {job.result():.2f} with {trial.params}")
                elif isinstance(error, TrialError):
                    study.tell(trial, state=TrialState.FAIL)
                    print(f"trial {trial.number} failed: {error}", file=sys.stderr)
                else:
                    raise error


def main() -> int:
    options, fixed = tyro.cli(Options, description=__doc__, return_unknown_args=True)
    study = optuna.create_study(
        study_name=options.env_id,
        direction="maximize",
        storage=options.storage,
        load_if_exists=True,
    )
    with moolink.Broker(first=True) as broker:
        search(options, fixed, study, broker.listen("127.0.0.1:0")[0])
    if not study.get_trials(states=[TrialState.COMPLETE]):
        print("error: no trial has a result", file=sys.stderr)
        return 1
    print(f"best: {study.best_value:.2f} with {study.best_params}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
