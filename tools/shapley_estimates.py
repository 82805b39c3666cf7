"""How well cheap Shapley values of PDSL rank as the exact ones: `python -m tools.shapley_estimates SCENARIO`.

It runs PDSL with the exact values on all of data.validation, and estimates each game's beside them. It prints the mean
rank correlation (Spearman's) over the games of every peer in every round, without those whose estimates are all equal.

With `--accuracy SEEDS` it runs the scenario once a seed with each estimate, and prints what the mean model reaches.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from torch import Tensor

from flower_privdec.algorithms import pdsl
from flower_privdec.algorithms.shapley import Game, circular, exact, monte_carlo
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import State
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import load_scenario

SETTINGS = ["n_peers=6", "rounds=8", "algorithm={name: pdsl, learning_rate: 0.1}", "compute.workers=1"]
# A quarter of the examples
SUBSAMPLE = 4
TRUNCATION = 0.01


def estimates(game: Callable[[int], Game], seed: int) -> dict[str, np.ndarray]:
    """Return estimates of a game's values, by name.

    Args:
        game: makes one on the share 1 / n of the examples.
        seed: of the permutations.
    """

    def drawn() -> np.random.Generator:
        return np.random.default_rng(seed)

    return {
        f"exact on 1/{SUBSAMPLE} of the examples": exact(game(SUBSAMPLE)),
        "10 permutations": monte_carlo(game(1), 10, drawn()),
        "20 permutations": monte_carlo(game(1), 20, drawn()),
        "1 circle": circular(game(1), 1, drawn()),
        "2 circles": circular(game(1), 2, drawn()),
        f"10 permutations, truncated at {TRUNCATION}": monte_carlo(game(1), 10, drawn(), TRUNCATION),
        f"10 permutations on 1/{SUBSAMPLE}, truncated": monte_carlo(game(SUBSAMPLE), 10, drawn(), TRUNCATION),
    }


def correlations(path: str, settings: list[str]) -> dict[str, list[float]]:
    """Run a scenario, and return the rank correlation of each estimate with the exact values, game by game."""
    ranks: dict[str, list[float]] = defaultdict(list)

    class Compared(pdsl.PDSL):
        def _values(self, cohort: Cohort, state: State, row: int, models: Tensor) -> np.ndarray:
            values = super()._values(cohort, state, row, models)
            held = cohort.validation
            if held is None:
                raise TypeError("data.validation is missing")

            def game(share: int) -> Game:
                part: Any = held if share == 1 else held.some(np.arange(0, len(held), share))
                return Game(len(models), lambda coalitions: part.hits(cohort.kernel, models, coalitions), len(part))

            for name, estimate in estimates(game, 1000 * state.round_index + row).items():
                if np.ptp(values) > 0 and np.ptp(estimate) > 0:
                    ranks[name].append(float(spearmanr(values, estimate).statistic))
            return values

    experiment = Experiment.build(load_scenario(path, [*SETTINGS, *settings]))
    experiment.algorithm.__class__ = Compared
    cohort = experiment.cohort()
    Engine(experiment.algorithm, cohort, experiment.initial_state(cohort)).rounds(experiment.scenario.rounds)
    return ranks


def accuracies(path: str, settings: list[str], seeds: int) -> dict[str, tuple[list[float], int]]:
    """Return the final accuracy of the mean model for each seed, and how many coalitions a run tried, by estimate."""
    n_peers = load_scenario(path, settings).n_peers
    ways = {
        "exact": ["algorithm.shapley=exact"],
        "1 circle": ["algorithm.shapley=circular", "algorithm.permutations=1"],
        f"{n_peers} permutations": ["algorithm.shapley=monte-carlo", f"algorithm.permutations={n_peers}"],
    }

    results = {}
    for name, way in ways.items():
        reached = []
        for seed in range(seeds):
            experiment = Experiment.build(load_scenario(path, [*settings, *way, f"seed={seed}"]))
            with tempfile.TemporaryDirectory() as folder:
                summary = run(experiment, Path(folder) / "run")
            reached.append(float(summary["accuracy"]["mean_model"]))
            tried = int(summary["coalition_evaluations"])
        results[name] = reached, tried
    return results


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.shapley_estimates", description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("settings", nargs="*", help="as key=value")
    parser.add_argument("--accuracy", type=int, metavar="SEEDS")
    given = parser.parse_intermixed_args()

    if given.accuracy is None:
        for name, ranks in correlations(given.scenario, given.settings).items():
            print(f"{name}: {np.mean(ranks):.2f} over {len(ranks)} games")
        return

    for name, (reached, tried) in accuracies(given.scenario, given.settings, given.accuracy).items():
        listed = ", ".join(f"{value:.1%}" for value in reached)
        print(f"{name}: {np.mean(reached):.1%} ({listed}), {tried} coalitions")


if __name__ == "__main__":
    main()
