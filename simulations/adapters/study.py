"""Fine-tune by LoRA and in full: accuracy at ε = 8, bytes and seconds a round, beside per-example gradients by vmap.

python study.py            prints the table of README.md
"""

from __future__ import annotations

import time
from statistics import mean, stdev

import torch
from torch.func import functional_call, grad, vmap
from transformer import WEIGHTS, pretrain

import flower_privdec as fp
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment

SEEDS, TIMED = (1, 2, 3), 5
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


def plain_round(engine: Engine, module: torch.nn.Module) -> None:
    """Compute the clipped and noised sums of a round's batches as Opacus does in functorch mode, by vmap."""
    cohort, names = engine.cohort, [n for n, p in module.named_parameters() if p.requires_grad]
    fixed = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}

    def loss(trained: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(module, {**fixed, **trained}, (x[None],)), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    batch = cohort.data.batch(engine.state.round_index, cohort.rows)
    for row in range(len(cohort.rows)):
        present = batch.weight[row] > 0
        trained = {n: dict(module.named_parameters())[n].detach() for n in names}
        gradients = each(trained, batch.x[row][present], batch.y[row][present])
        flat = torch.cat([gradients[n].flatten(1) for n in names], dim=1)
        scale = (1.0 / flat.norm(dim=1).clamp_min(1e-12)).clamp_max(1.0)
        (scale @ flat).add_(torch.randn(flat.shape[1]))


def seconds(name: str) -> tuple[float, float]:
    """Return the CPU seconds of a round of ours, and of vmap's gradients for it alone, the least of some in turn."""
    torch.set_num_threads(1)
    (engine, module), ours, theirs = engine_of(name), [], []
    for _ in range(TIMED):
        for work, times in ((engine.round, ours), (lambda: plain_round(engine, module), theirs)):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
    return min(ours), min(theirs)


if __name__ == "__main__":
    if not WEIGHTS.exists():
        pretrain()
    print("| fine-tuned | trained | accuracy at ε = 8 | without privacy | KiB a round | ms a round | vmap alone |")
    print("|---|---|---|---|---|---|---|")
    for name in ("lora", "full"):
        private = max(RATES, key=lambda rate: accuracy(name, rate, 0)[0])
        plain = max(RATES, key=lambda rate: accuracy(name, rate, 0, privacy="none")[0])
        ours, theirs = seconds(name)
        runs = [accuracy(name, private, seed) for seed in SEEDS]
        values, bytes_sent = [value for value, _ in runs], runs[0][1]
        free = mean(accuracy(name, plain, seed, privacy="none")[0] for seed in SEEDS)
        trained = engine_of(name)[0].cohort.initial.numel()
        print(
            f"| {name}, rate {private:g} | {trained:,} | {mean(values):.1%} ± {stdev(values):.1%} | {free:.1%} | "
            f"{bytes_sent / 1024:.1f} | {1000 * ours:.0f} | {1000 * theirs:.0f} |",
            flush=True,
        )
