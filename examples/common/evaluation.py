"""Playing whole episodes from a checkpoint, to say how good it is."""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.common import checkpoint, statistics
from examples.common.environments import agents_of, make_envs, rules_of, said_rules
from examples.common.normalizer import Normalizer
from examples.common.observations import Observation
from examples.common.options import GroupOptions, OptionError, Options
from moolink import files

MAX_ENVS = 32
SEED = 600_011  # added to the options' seed: environments of training have other ones
NAME = "evaluation.json"


class Evaluation:
    """Environments that play their share of the episodes to their ends. (The first episodes to end
    would be a sample of the short ones.) Each has a seed of its own.

    Attributes:
        saved: the checkpoint.
        observation: of all environments, normalised as in training.
        first: [E], whether it is the first of an episode.
        returns: of the episodes that are over.
        lengths: the numbers of their steps.
        digests: of all that the environments showed and the policy did; equal for equal episodes.
    """

    def __init__(self, options: Options) -> None:
        saved = checkpoint.load(options.run_dir)
        if saved is None:
            raise OptionError(f"no checkpoint in {options.run_dir}: give the --save-dir of a job")
        checkpoint.check_can_go_on(options, saved)
        print(said_rules(options), flush=True)
        self.saved, self.options = saved, options
        agents = agents_of(options.env_id)  # of each environment, whose rows come together
        rows = math.ceil(min(MAX_ENVS, options.episodes) / agents) * agents
        self.envs = make_envs(options, rows)
        self._normalizer: Callable[[Observation], Observation] = dict
        if isinstance(options, GroupOptions):
            self._normalizer = normalizer = Normalizer(options, self.envs)
            normalizer.load(saved["state"]["normalizer"])
        self._left = np.full(rows, options.episodes // rows)
        self._left[: options.episodes % rows] += 1
        self._running, self._steps, self._digest = np.zeros(rows), np.zeros(rows, int), [0] * rows
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.digests: list[int] = []
        self._seen = self.envs.reset(options.seed * 1_000_003 + SEED)
        self.observation = self._normalizer(self._seen)
        self.first = np.ones(rows, np.bool_)

    def is_over(self) -> bool:
        return not self._left.any()

    def step(self, action: NDArray[np.generic]) -> None:
        """Takes a policy's actions [E, N]."""
        self.envs.send(action)
        step = self.envs.recv()
        for row in range(len(self._left)):
            for array in (*self._seen.values(), action, step.reward):
                self._digest[row] = zlib.crc32(array[row].tobytes(), self._digest[row])
        self._seen = step.observation
        self.observation, self.first = self._normalizer(step.observation), step.episode_over
        self._running += step.reward
        self._steps += 1
        for row in np.flatnonzero(step.episode_over):
            if self._left[row]:
                self.returns.append(float(self._running[row]))
                self.lengths.append(int(self._steps[row]))
                self.digests.append(self._digest[row])
                self._left[row] -= 1
            self._running[row], self._steps[row], self._digest[row] = 0.0, 0, 0


@contextlib.contextmanager
def evaluated(options: Options) -> Iterator[Evaluation]:
    """An evaluation that prints and writes its result at the end. Raises OptionError without a
    checkpoint."""
    evaluation = Evaluation(options)
    try:
        yield evaluation
    finally:
        evaluation.envs.close()
    more = {"lengths": evaluation.lengths, "distinct": len(set(evaluation.digests))}
    report(options, evaluation.saved, evaluation.returns, more)


def report(
    options: Options,
    saved: Mapping[str, Any],
    returns: Sequence[float],
    more: Mapping[str, Any],
) -> None:
    """Prints the statistics of an evaluation. Writes them to `evaluation.json` in the run's folder
    (and to `--result-json`), and the returns for rliable and MARL-eval beside it."""
    steps, rules = saved["totals"]["steps"], rules_of(options)
    found = statistics.summary(returns)
    normalized = statistics.human_normalized(rules.get("game"), returns)
    actions = "likeliest" if options.greedy else "sampled"
    print(f"{options.env_id} after {steps:,} steps: {statistics.said(found, 'episodes')}")
    line = f"{actions} actions, seed {options.seed}"
    if "distinct" in more:
        line += f", {more['distinct']} of {len(returns)} episodes are distinct"
    if normalized is not None:
        line += f"; human-normalized mean {normalized.mean():.3f}"
    print(line)
    result = {
        "env_id": options.env_id,
        "environment": rules,
        "learner": options.learner,
        "steps": steps,
        "actions": actions,
        "seed": options.seed,
        **found,
        **({} if normalized is None else {"human_normalized": statistics.summary(normalized)}),
        **more,
        "returns": list(returns),
    }
    scores = np.asarray(returns if normalized is None else normalized)
    seed = saved["options"].get("seed", 0)  # of the run
    runs = {options.env_id: {options.learner: {seed: [(steps, returns)]}}}
    folder = options.run_dir
    written = {
        folder / NAME: result,
        folder / "evaluation_rliable.json": statistics.for_rliable(
            {options.learner: [[scores.mean()]]}
        ),
        folder / "evaluation_marl_eval.json": statistics.for_marl_eval(runs),
    }
    if options.result_json is not None:
        written[options.result_json] = result
    for path, tree in written.items():
        write_json(path, tree)
    print(f"written to {folder / NAME}, evaluation_rliable.json and evaluation_marl_eval.json")


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a file that is whole or not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.written(path) as file:
        file.write((json.dumps(tree, indent=2) + "\n").encode())
