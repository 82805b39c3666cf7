"""What a run leaves behind: metrics, checkpoint, models, ledgers and a summary in one folder."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from flower_privdec.algorithms import Algorithm, Mix, State
from flower_privdec.cohort import Cohort
from flower_privdec.errors import ScenarioError
from flower_privdec.evaluation import evaluate
from flower_privdec.experiment import Experiment
from flower_privdec.gradients.base import layout
from flower_privdec.plots import save_run_plots
from flower_privdec.privacy.plan import UNLIMITED, privacy_rows
from flower_privdec.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomically
from flower_privdec.scenario import scenario_hash, to_yaml

OnMetrics = Callable[[dict[str, Any]], None]
LEAN_SECONDS = 60.0


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: infinity becomes the string "inf"."""
    return UNLIMITED if math.isinf(value) else value


class Recorder:
    """Keeps the folder of one run.

    Files: scenario.yaml (every default visible), metrics.jsonl (a line an evaluation), ledger/,
    checkpoint, model.safetensors (each peer and the mean), plots/, summary.json. A lean run, one of many
    in a study, keeps no models and no plots, and writes a checkpoint once a minute at most.

    Privacy: the numbers written are computed from noised models and the public test set.
    """

    def __init__(
        self, experiment: Experiment, out: Path, runtime: str, resume: bool = False, lean: bool = False
    ) -> None:
        self.experiment, self.out, self.runtime, self.lean = experiment, out, runtime, lean
        self._saved = time.monotonic()
        self.scenario_hash = scenario_hash(experiment.scenario)
        self.checkpoint = self._previous(resume)
        self.run_id = self.checkpoint.run_id if self.checkpoint else secrets.token_hex(8)
        self.seconds = self.checkpoint.seconds if self.checkpoint else 0.0

    @property
    def ledger_dir(self) -> Path:
        """Return where the ledgers of this run's peers lie."""
        private = self.experiment.scenario.private
        return Path(private.ledger) if private and private.ledger else self.out / "ledger"

    def _previous(self, resume: bool) -> Checkpoint | None:
        path = self.out / "checkpoint"
        if resume and path.exists():
            return load_checkpoint(path, self.scenario_hash, self.experiment.device)
        if (self.out / "scenario.yaml").exists():
            remedy = "give --resume to go on with it, or another --out" if path.exists() else "give another --out"
            raise ScenarioError(f"{self.out} already holds a run; {remedy}")
        if self.out.exists() and not self.out.is_dir():
            raise ScenarioError(f"{self.out} is not a folder; give another --out")
        if resume:
            raise ScenarioError(f"{self.out} holds no checkpoint to resume from; leave --resume out")
        return None

    def open_cohort(self) -> Cohort:
        """Return the cohort of the whole network with its ledgers, checked against the checkpoint."""
        cohort = self.experiment.cohort(None, self.ledger_dir, self.run_id)
        if cohort.ledger is not None and self.checkpoint is not None:
            cohort.ledger.check_heads(self.checkpoint.heads or {})
        return cohort

    def start(self, cohort: Cohort) -> State:
        """Return the state to begin with, and make the folder say so."""
        if self.checkpoint is not None:
            state = self.checkpoint.state
            self._forget_metrics_after(state.round_index)
            return state
        state = self.experiment.initial_state(cohort)
        self.out.mkdir(parents=True, exist_ok=True)
        self.save(state, cohort)
        write_atomically(self.out / "scenario.yaml", to_yaml(self.experiment.scenario).encode())
        return state

    def _forget_metrics_after(self, round_index: int) -> None:
        path = self.out / "metrics.jsonl"
        with suppress(FileNotFoundError):
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["round"] <= round_index]
            write_atomically(path, "".join(line + "\n" for line in lines).encode())

    def save(self, state: State, cohort: Cohort | None) -> None:
        """Write a checkpoint of a state between two rounds."""
        if self.lean and time.monotonic() - self._saved < LEAN_SECONDS:
            return
        heads = cohort.ledger.heads() if cohort is not None and cohort.ledger is not None else None
        save_checkpoint(
            self.out / "checkpoint", Checkpoint(state, self.scenario_hash, self.run_id, self.seconds, heads)
        )
        self._saved = time.monotonic()

    def record(self, rows: dict[str, Tensor], round_index: int) -> dict[str, Any]:
        """Evaluate the network after `round_index` rounds and append the line to metrics.jsonl."""
        plan = self.experiment.plan
        spent = max(plan.epsilons(round_index)) if plan else math.inf
        metrics = {
            "round": round_index,
            **evaluate(self.experiment, rows, round_index),
            "epsilon": json_number(spent),
            "seconds": round(self.seconds, 3),
        }
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        return metrics

    def last_metrics(self) -> dict[str, Any]:
        """Return the latest line of metrics.jsonl."""
        last: dict[str, Any] = json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])
        return last

    def finish(self, rows: dict[str, Tensor], cohort: Cohort) -> dict[str, Any]:
        """Write the models, the plots and the summary, and return the summary.

        Args:
            rows: the final state's.
            cohort: of the whole network; its ledgers say what was spent on the data set, over all runs.
        """
        metrics = self.last_metrics()
        scenario = self.experiment.scenario
        active = sum(int(self.experiment.participation.active(k).sum()) for k in range(scenario.rounds))
        steps = active * self.experiment.algorithm.steps_per_round
        summary = {
            "name": scenario.name,
            "algorithm": scenario.algorithm.name,
            "runtime": self.runtime,
            "n_peers": scenario.n_peers,
            "rounds": scenario.rounds,
            "seed": scenario.seed,
            "accuracy": metrics["accuracy"],
            "loss": metrics["loss"],
            "consensus_distance": metrics["consensus_distance"],
            **({"personalized": metrics["personalized"]} if "personalized" in metrics else {}),
            "traffic": traffic(self.experiment.algorithm, rows),
            "privacy": privacy_rows(self.experiment.plan, self._spent(cohort)),
            "noise": "simulated: seeded and reproducible, not for deployment",
            "wall_seconds": round(self.seconds, 3),
            "peer_steps_per_second": round(steps / max(self.seconds, 1e-9), 1),
        }
        if not self.lean:
            self._save_models(rows)
            save_run_plots(self.out)
        write_atomically(self.out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        return summary

    def _spent(self, cohort: Cohort) -> list[float]:
        scenario, plan = self.experiment.scenario, self.experiment.plan
        if plan is None:
            return [math.inf] * scenario.n_peers
        return plan.epsilons(scenario.rounds) if cohort.ledger is None else cohort.ledger.spent_all().tolist()

    def _save_models(self, rows: dict[str, Tensor]) -> None:
        experiment = self.experiment
        models = {"mean": experiment.algorithm.network_mean(rows)}
        models |= {f"peer-{i}": row for i, row in enumerate(experiment.algorithm.debiased(rows))}
        places = layout(experiment.module)
        tensors = {
            f"{owner}/{name}": place.view(row).contiguous().cpu()
            for owner, row in models.items()
            for name, place in places.items()
        }
        write_atomically(self.out / "model.safetensors", save(tensors))


def traffic(algorithm: Algorithm, rows: dict[str, Tensor]) -> dict[str, int]:
    """Return what an active peer sends in a round to each of its receivers, from the program's exchanges.

    Returns:
        vectors: how many as long as the model; bytes: of these vectors.
    """
    d = rows["x"].shape[1]
    names = [name for item in algorithm.program if isinstance(item, Mix) for name in item.names]
    sent = [rows[name] for name in names if rows[name].ndim == 2 and rows[name].shape[1] == d]
    return {"vectors": len(sent), "bytes": sum(d * row.element_size() for row in sent)}


def evaluation_rounds(rounds: int, every: int) -> list[int]:
    """Return after how many rounds the models are tried: every so many, and at the end."""
    return sorted({*range(every, rounds + 1, every), rounds})
