"""The folders of runs, read from Python: metrics, privacy, models and pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flower_privdec.api.argument_errors import argument_error
from flower_privdec.api.pandas_frames import as_frame, flat
from flower_privdec.api.scenarios import as_path
from flower_privdec.common.errors import ScenarioError, called_from_python
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.agreement import build_module, module_facts
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.recorder import model_tensors
from flower_privdec.reporting.console import comparison_row
from flower_privdec.reporting.plots import curves_of, draw_curve, drawing, html_of, picture
from flower_privdec.reporting.run_folder import Result, RunGroup, read_result
from flower_privdec.reporting.wording import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

StateDict = dict[str, Tensor]


class StoredModels(NamedTuple):
    """Some models of a run.

    Attributes:
        tensors: by the owner's name and the parameter's, `mean/1.weight` or `peer-0/1.weight`.
        module_facts: the arguments with which `build_module` makes a module for them.
    """

    tensors: StateDict
    module_facts: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RunResult(Result):
    """The contents of a run's folder, finished or not.

    Attributes:
        folder: its path. A run without `out` has a temporary one, deleted with this object.
        scenario: with every default resolved.
        metrics: a record for each evaluation, in order of the rounds: round, accuracy, loss, consensus_distance,
            epsilon (the largest of the peers; "inf" without privacy) and seconds.
        summary: summary.json; of a run that was stopped, with `stopped_at` and `stopped_by`; of a run under way, the
            same keys as far as they are known.
    """

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """Each peer's guarantee: ε (a number, or "inf"), δ, unit, adjacency, a paper's claimed ε, and its scope.

        It is empty while the run is under way.
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

        Of a run under way they are those of its checkpoint.

        Raises:
            ScenarioError: when the run kept no model, or the file is damaged.
        """
        models: dict[str, StateDict] = {}
        for key, tensor in self._stored().tensors.items():
            owner, _, name = key.partition("/")
            models.setdefault(owner, {})[name] = tensor
        return models

    def model(self, peer: int | None = None, *, into: nn.Module | None = None) -> nn.Module:
        """Return a trained model, on the CPU and in evaluation mode.

        Args:
            peer: whose; by default the mean of all peers' models, which push-sum and gossip agree on.
            into: a module to fill; by default one is built from the scenario. It is required if the model is a Python
                object of another process.

        Raises:
            ScenarioError: when there is no such peer or model, or it does not fit the module.
        """
        if into is not None and not isinstance(into, nn.Module):
            raise argument_error(f"into is a {type(into).__name__} and must be a torch.nn.Module")
        n_peers = self.scenario.n_peers
        if peer is not None and (isinstance(peer, bool) or peer not in range(n_peers)):
            raise argument_error(f"peer={shown(peer)} must be 0 to {n_peers - 1}, or None for the mean model")

        owner = "mean" if peer is None else f"peer-{peer}"
        stored = self._stored(f"{owner}/")
        module = into
        if module is None:
            module = build_module(self.scenario, **stored.module_facts)

        state = {key.partition("/")[2]: tensor for key, tensor in stored.tensors.items()}
        dtype = next(iter(state.values())).dtype
        try:
            module.to(dtype).load_state_dict(state)
        except RuntimeError as error:
            lines = " ".join(str(error).split())
            raise ScenarioError(
                f"{self.folder}: the model does not fit the module that is given: {lines}", code="api.model-misfit"
            ) from error
        return module.eval()

    def _stored(self, prefix: str = "") -> StoredModels:
        """Return the tensors of a finished run, or of the checkpoint of one under way, whose names have a prefix."""
        path = self.folder / "model.safetensors"
        is_finished = bool(self.privacy)
        if is_finished and path.is_file():
            return _read_models(path, prefix)

        checkpoint = self.folder / "checkpoint"
        if is_finished or not checkpoint.is_file():
            raise ScenarioError(
                f"{self.folder}: has no {path.name}: this run kept no models; run the scenario again",
                code="api.no-model",
            )
        state = read_checkpoint(checkpoint).state
        if not state.rows:
            raise ScenarioError(
                f"{self.folder}: its shards hold the models until the run is done: let it finish", code="api.no-model"
            )

        agreement = Agreement.of(self.scenario)
        tensors = model_tensors(agreement, state.rows, state.round_index)
        chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return StoredModels(chosen, module_facts(agreement.public, agreement.loss))

    def __str__(self) -> str:
        """Return the run in a line: its name, its result and its ε."""
        return f"{self.scenario.name}: {headline(self.summary)}"

    def _repr_html_(self) -> str:
        facts = [f"{key}: {value}" for key, value in comparison_row(self.summary).items() if key != "run"]
        text = "\n".join([str(self), *facts])
        return html_of(text, picture("the run", self.plot) if self.metrics else [])

    def plot(self, metric: str | None = None) -> Figure:
        """Return a figure of one quantity over the rounds.

        Args:
            metric: a metric of the task, or loss, consensus, epsilon; by default the task's first.

        Raises:
            ScenarioError: the run has no such quantity, or matplotlib is not installed.
        """
        groups = [RunGroup(self.scenario.name, (self,))]
        curves = {curve.name: curve for curve in curves_of(groups)}
        name = next(iter(curves)) if metric is None else metric
        figure = None
        if name in curves:
            with drawing():
                figure = draw_curve(curves[name], groups)
        if figure is None:
            raise argument_error(f"metric={shown(name)} must be one that the run has, of {', '.join(curves)}")
        return figure


def _read_models(path: Path, prefix: str) -> StoredModels:
    """Read the models of a finished run whose names have a prefix.

    Raises:
        ScenarioError: the file is damaged, or another program's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["privdec"])
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a mapping)
            return StoredModels({name: file.get_tensor(name) for name in names}, facts)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as models ({one_line(error)}); run the scenario again", code="api.no-model"
        ) from error


@called_from_python()
def load_run(folder: str | Path) -> RunResult:
    """Read a run's folder, as `run` returned it; of an unfinished run, as far as it went.

    Raises:
        ScenarioError: when it is not a run's folder, or a file in it is damaged.
    """
    return RunResult(**vars(read_result(as_path(folder, "folder"))))
