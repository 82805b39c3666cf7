"""Fine-tune by LoRA and in full: accuracy at ε = 8, bytes and seconds a round, beside Opacus.

python study.py            prints the table of README.md; `pip install opacus` for its last column
"""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from collections.abc import Callable
from statistics import mean, stdev

import torch
from transformer import WEIGHTS, pretrain

import flower_privdec as fp
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment

SEEDS = (1, 2, 3)
TIMED = 5
RATES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)  # the best on seed 0 is taken for the others


def scenario(name: str, rate: float, seed: int, **more: object) -> fp.Scenario:
    """Return the scenario of a way of fine-tuning."""
    changed = {"model.module": f"transformer:{name}", "algorithm.learning_rate": rate, "seed": seed}
    return fp.load_scenario("scenario.yaml", changed, **more)


def accuracy(name: str, rate: float, seed: int, **more: object) -> tuple[float, int]:
    """Return the mean model's accuracy at the end, and the bytes that a peer sends to each receiver in a round."""
    try:
        summary = fp.run(scenario(name, rate, seed, **more)).summary
    except fp.RunError:  # it diverged
        return 0.0, 0
    return summary["accuracy"]["mean_model"], summary["traffic"]["bytes"]


def engine_of(name: str) -> tuple[Engine, torch.nn.Module]:
    """Return an engine that has taken a round, and its model."""
    experiment = Experiment.build(scenario(name, 0.1, 1, evaluation={"every": 20}))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.round()
    return engine, experiment.module


def opacus_round(engine: Engine, module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that takes the private steps of a round's batches, peer by peer, by Opacus."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(copy.deepcopy(module))
    plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = DPOptimizer(plain, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=30)
    cohort = engine.cohort

    def work() -> None:
        batch = cohort.data.batch(engine.state.round_index, cohort.rows)
        for row in range(len(cohort.rows)):
            present = batch.weight[row] > 0
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.x[row][present]), batch.y[row][present]).backward()
            optimizer.step()

    return work


def seconds(name: str) -> tuple[float, float]:
    """Return the CPU seconds of a round of ours, and of Opacus' steps for it alone, the least of some in turn.

    Without Opacus the second is NaN.
    """
    torch.set_num_threads(1)
    (engine, module), times = engine_of(name), ([], [])
    works = [engine.round, *([opacus_round(engine, module)] if importlib.util.find_spec("opacus") else [])]
    for _ in range(TIMED + 1):
        for work, taken in zip(works, times, strict=False):
            began = time.process_time()
            work()
            taken.append(time.process_time() - began)
    return min(times[0][1:]), min(times[1][1:], default=math.nan)


if __name__ == "__main__":
    if not WEIGHTS.exists():
        pretrain()
    print("| fine-tuned | trained | accuracy at ε = 8 | without privacy | KiB a round | ms a round | by Opacus |")
    print("|---|---|---|---|---|---|---|")
    for name in ("lora", "full"):
        private = max(RATES, key=lambda rate: accuracy(name, rate, 0)[0])
        plain = max(RATES, key=lambda rate: accuracy(name, rate, 0, privacy="none")[0])
        ours, theirs = seconds(name)
        runs = [accuracy(name, private, seed) for seed in SEEDS]
        values = [value for value, _ in runs]
        bytes_sent = runs[0][1]
        free = mean(accuracy(name, plain, seed, privacy="none")[0] for seed in SEEDS)
        trained = engine_of(name)[0].cohort.initial.numel()
        print(
            f"| {name}, rate {private:g} | {trained:,} | {mean(values):.1%} ± {stdev(values):.1%} | {free:.1%} | "
            f"{bytes_sent / 1024:.1f} | {1000 * ours:.0f} | {1000 * theirs:.0f} |",
            flush=True,
        )
