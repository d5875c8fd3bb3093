"""Statistics of returns, as "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv 2108.13264) recommends them, and files that rliable and MARL-eval read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = NDArray[np.float64]
RESAMPLES = 10_000
_MOST_DRAWN = 1 << 22  # numbers at once

# Random play and a professional human tester: "Dueling Network Architectures for Deep
# Reinforcement Learning" (arXiv 1511.06581), which DQN Zoo's atari_data.py also has.
RANDOM_AND_HUMAN = {
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "asteroids": (719.1, 47388.7),
    "atlantis": (12850.0, 29028.1),
    "bank_heist": (14.2, 753.1),
    "battle_zone": (2360.0, 37187.5),
    "beam_rider": (363.9, 16926.5),
    "berzerk": (123.7, 2630.4),
    "bowling": (23.1, 160.7),
    "boxing": (0.1, 12.1),
    "breakout": (1.7, 30.5),
    "centipede": (2090.9, 12017.0),
    "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4),
    "defender": (2874.5, 18688.9),
    "demon_attack": (152.1, 1971.0),
    "double_dunk": (-18.6, -16.4),
    "enduro": (0.0, 860.5),
    "fishing_derby": (-91.7, -38.7),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "gravitar": (173.0, 3351.4),
    "hero": (1027.0, 30826.4),
    "ice_hockey": (-11.2, 0.9),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3),
    "montezuma_revenge": (0.0, 4753.3),
    "ms_pacman": (307.3, 6951.6),
    "name_this_game": (2292.3, 8049.0),
    "phoenix": (761.4, 7242.6),
    "pitfall": (-229.4, 6463.7),
    "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "riverraid": (1338.5, 17118.0),
    "road_runner": (11.5, 7845.0),
    "robotank": (2.2, 11.9),
    "seaquest": (68.4, 42054.7),
    "skiing": (-17098.1, -4336.9),
    "solaris": (1236.3, 12326.7),
    "space_invaders": (148.0, 1668.7),
    "star_gunner": (664.0, 10250.0),
    "surround": (-10.0, 6.5),
    "tennis": (-23.8, -8.3),
    "time_pilot": (3568.0, 5229.2),
    "tutankham": (11.4, 167.6),
    "up_n_down": (533.4, 11693.2),
    "venture": (0.0, 1187.5),
    "video_pinball": (16256.9, 17667.9),
    "wizard_of_wor": (563.5, 4756.5),
    "yars_revenge": (3092.9, 54576.9),
    "zaxxon": (32.5, 9173.3),
}


def human_normalized(game: str | None, returns: ArrayLike) -> Scores | None:
    """Scores of which 0 is random play's and 1 the human's, float64, of the same shape.

    Args:
        game: ALE's name, such as `space_invaders`.

    Returns:
        None for a game without such scores.
    """
    if game not in RANDOM_AND_HUMAN:
        return None
    random, human = RANDOM_AND_HUMAN[game]
    normalized: Scores = (np.asarray(returns, np.float64) - random) / (human - random)
    return normalized


def mean(scores: Scores) -> Scores:
    """Of matrices of runs and games [..., R, G]: one number each."""
    return np.asarray(scores.mean((-2, -1)))


def median(scores: Scores) -> Scores:
    """Of one game's scores [..., R, 1], or of the mean scores of several games [..., R, G]."""
    return np.asarray(np.median(scores[..., 0] if scores.shape[-1] == 1 else scores.mean(-2), -1))


def iqm(scores: Scores) -> Scores:
    """The interquartile mean: the mean of the middle half of all scores [..., R, G]."""
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), -1)
    cut = ordered.shape[-1] // 4
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(-1))


def interval(scores: Scores, statistic: Callable[[Scores], Scores]) -> list[float]:
    """The 95 % interval of a statistic of scores [R, G], by a stratified bootstrap: each game's
    runs are drawn again, with replacement, and the percentiles of 10,000 draws taken."""
    random, (runs, games) = np.random.default_rng(0), scores.shape
    most = max(1, _MOST_DRAWN // scores.size)
    drawn = []
    for at in range(0, RESAMPLES, most):
        rows = random.integers(runs, size=(min(most, RESAMPLES - at), runs, games))
        drawn.append(statistic(np.take_along_axis(scores[None], rows, 1)))
    return [float(x) for x in np.percentile(np.concatenate(drawn), [2.5, 97.5])]


def summary(scores: ArrayLike) -> dict[str, Any]:
    """Number, mean, median, standard deviation, IQM and 95 % intervals, as JSON values.

    Args:
        scores: of episodes or runs [R], or of runs and games [R, G]. At least one.
    """
    matrix = np.asarray(scores, np.float64)
    matrix = matrix[:, None] if matrix.ndim == 1 else matrix
    statistics = {"mean": mean, "median": median, "iqm": iqm}
    found: dict[str, Any] = {"number": len(matrix)}
    found |= {name: float(each(matrix)) for name, each in statistics.items()}
    found["standard_deviation"] = float(matrix.std(ddof=1)) if matrix.size > 1 else 0.0
    found["interval_95"] = {name: interval(matrix, each) for name, each in statistics.items()}
    return found


def said(found: Mapping[str, Any], of_what: str) -> str:
    """A summary as text: `mean return 2.31 of 100 episodes, IQM 2.2 (95 % interval ...), ...`."""
    least, most = found["interval_95"]["iqm"]
    return (
        f"mean return {found['mean']:.2f} of {found['number']} {of_what}, IQM {found['iqm']:.2f} "
        f"(95 % interval {least:.2f} to {most:.2f}), median {found['median']:.2f}, deviation "
        f"{found['standard_deviation']:.2f}"
    )


def for_rliable(scores: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """JSON of the scores of each algorithm [runs, games]: rliable's functions take
    `{name: np.array(matrix) for name, matrix in json.load(file).items()}`."""
    return {name: np.asarray(matrix, np.float64).tolist() for name, matrix in scores.items()}


Run = Sequence[tuple[int, Sequence[float]]]  # steps, and returns of episodes at that step


def for_marl_eval(runs: Mapping[str, Mapping[str, Mapping[int, Run]]]) -> dict[str, Any]:
    """JSON in the form of MARL-eval: environment, task, algorithm, run, step, metric `return`.

    Args:
        runs: by id, algorithm and seed. The last returns of a run are its absolute metric.
    """
    tree: dict[str, Any] = {}
    for env_id, algorithms in runs.items():
        family, _, task = env_id.rpartition(":")[2].rpartition("/")
        tasks = tree.setdefault(family or "Gymnasium", {})
        for algorithm, seeds in algorithms.items():
            tasks.setdefault(task, {})[algorithm] = {
                f"seed_{seed}": {
                    **{
                        f"step_{number}": {"step_count": steps, "return": list(returns)}
                        for number, (steps, returns) in enumerate(run)
                    },
                    "absolute_metrics": {"return": list(run[-1][1])},
                }
                for seed, run in seeds.items()
            }
    return tree
