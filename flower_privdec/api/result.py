"""What a run came to: its metrics, its guarantees and its models, from the folder that it left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flower_privdec.api.scenarios import as_path
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.data.readers import require
from flower_privdec.engine.checkpoint import read_checkpoint
from flower_privdec.engine.recorder import model_tensors
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.agreement import build_module, module_facts
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.reporting.wording import headline
from flower_privdec.scenario import Scenario

Metrics = dict[str, Any]
StateDict = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run as its folder tells it, finished or not.

    Attributes:
        folder: where it lies. Of a run that was given no folder it is a temporary one, deleted with this object.
        scenario: with every default visible.
        metrics: a record for each evaluation, in order of the rounds: round, accuracy, loss, consensus_distance,
            epsilon (the largest of the peers; "inf" where there is none) and seconds.
        summary: what summary.json says; of a run that is not finished, the same keys as far as they are known.
    """

    folder: Path
    scenario: Scenario
    metrics: list[Metrics]
    summary: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run reached its last round."""
        return bool(self.summary["finished"])

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """Each peer's guarantee: ε (a number, or "inf"), δ, unit, adjacency, what a paper claims, and its scope.

        It is empty before the run is finished.
        """
        rows: list[dict[str, Any]] = self.summary["privacy"]
        return rows

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame: a row for each evaluation, a column such as `accuracy.peer_min`.

        Raises:
            ScenarioError: when pandas is not installed.
        """
        return as_frame([flat(record) for record in self.metrics])

    @property
    def models(self) -> dict[str, StateDict]:
        """The state dicts of the mean model, `mean`, and of every peer's, `peer-0` and so on, on the CPU.

        Of a run that is not finished they are those of its checkpoint.

        Raises:
            ScenarioError: when the run kept no model, or the file is damaged.
        """
        models: dict[str, StateDict] = {}
        for key, tensor in self._tensors()[0].items():
            owner, _, name = key.partition("/")
            models.setdefault(owner, {})[name] = tensor
        return models

    def model(self, peer: int | None = None, *, into: nn.Module | None = None) -> nn.Module:
        """Return a trained model, on the CPU and in evaluation mode.

        Args:
            peer: whose; by default the mean of all peers' models, which push-sum and gossip agree on.
            into: a module to fill; by default one is built as the scenario says. A run whose model was given as a
                Python object, and is read in another process, needs it.

        Raises:
            ScenarioError: when there is no such peer or model, or it does not fit the module.
        """
        if into is not None and not isinstance(into, nn.Module):
            raise ScenarioError(f"into is a {type(into).__name__} and must be a torch.nn.Module")
        tensors, facts = self._tensors("mean/" if peer is None else self._owner(peer))
        module = build_module(self.scenario, **facts) if into is None else into
        state = {key.partition("/")[2]: tensor for key, tensor in tensors.items()}
        try:
            module.to(next(iter(state.values())).dtype).load_state_dict(state)
        except RuntimeError as error:
            lines = " ".join(str(error).split())
            raise ScenarioError(f"{self.folder}: the model does not fit the module that is given: {lines}") from error
        return module.eval()

    def _owner(self, peer: int) -> str:
        n_peers = self.scenario.n_peers
        if isinstance(peer, bool) or not isinstance(peer, int | np.integer) or not 0 <= peer < n_peers:
            raise ScenarioError(f"peer={shown(peer)} must be 0 to {n_peers - 1}, or None for the mean model")
        return f"peer-{peer}/"

    def _tensors(self, prefix: str = "") -> tuple[StateDict, dict[str, Any]]:
        """Return the tensors whose names begin so, and what a module for them is built with."""
        path = self.folder / "model.safetensors"
        if self.finished and path.is_file():
            return _read_models(path, prefix)
        checkpoint = self.folder / "checkpoint"
        if self.finished or not checkpoint.is_file():
            raise ScenarioError(f"{self.folder}: has no {path.name}: this run kept no models; run the scenario again")
        agreement, rows = Agreement.of(self.scenario), read_checkpoint(checkpoint).state.rows
        if not rows:
            raise ScenarioError(f"{self.folder}: its shards hold the models until the run is done: let it finish")
        tensors = model_tensors(agreement, rows)
        return {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}, module_facts(
            agreement.public, agreement.loss
        )

    def __str__(self) -> str:
        """Return the run in a line: its name, what it reached, and at which ε."""
        return f"{self.scenario.name}: {headline(self.summary)}"


def load_run(folder: str | Path) -> RunResult:
    """Return what a run's folder says, as `run` returned it; of a run under way or broken off, as far as it went.

    Raises:
        ScenarioError: when it is no run's folder, or a file in it is damaged.
    """
    result = read_result(as_path(folder, "folder"))
    return RunResult(result.folder, result.scenario, result.metrics, result.summary)


def as_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas DataFrame.

    Raises:
        ScenarioError: when pandas is not installed.
    """
    return require("pandas", "a frame", "pip install pandas, or take the records").DataFrame(list(records))


def flat(record: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a record without records in it: `{"loss": {"mean_model": 1}}` is `{"loss.mean_model": 1}`."""
    columns: dict[str, Any] = {}
    for name, value in record.items():
        columns |= flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return columns


def _read_models(path: Path, prefix: str) -> tuple[StateDict, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["privdec"])
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a mapping)
            return {name: file.get_tensor(name) for name in names}, facts
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read as models ({one_line(error)}); run the scenario again") from error
