"""The folders of runs, read from Python: metrics, privacy, models and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from flower_privdec.api.argument_errors import argument_error
from flower_privdec.api.notebook_display import ShowsItself
from flower_privdec.api.pandas_frames import as_frame, flat
from flower_privdec.api.scenarios import as_path
from flower_privdec.common.errors import called_from_python
from flower_privdec.common.formatting import shown
from flower_privdec.reporting.console import comparison_row
from flower_privdec.reporting.exporting import ExportedModel, export
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.plots import curves_of, draw_curve, html_of, picture
from flower_privdec.reporting.run_folder import Result, RunGroup, read_result
from flower_privdec.reporting.trained_models import StateDict, load_model, stored_models
from flower_privdec.reporting.wording import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where a result has what others call by these names.
OTHER_NAMES = {
    "summary[{metric!r}]['mean_model']": "accuracy acc score",
    "summary['loss']['mean_model']": "loss",
    "privacy[0]['epsilon']": "epsilon eps",
    "metrics": "history log logs records",
    "frame()": "to_dataframe to_pandas dataframe df to_frame",
    "models": "state_dict weights parameters get_weights",
    "export('model.pt')": "save save_model",
    "model()": "predict evaluate",
    "folder": "path out",
}


@dataclass(frozen=True, eq=False, repr=False)
class RunResult(ShowsItself, Result):
    """The contents of a run's folder, finished or not.

    Attributes:
        folder: its path. A run without `out` has a temporary one, deleted with this object.
        scenario: with every default resolved.
        metrics: a record for each evaluation, in order of the rounds: round, accuracy, loss, consensus_distance,
            epsilon (the largest of the peers; "inf" without privacy) and seconds.
        summary: summary.json; of a run that was stopped, with `stopped_at` and `stopped_by`; of a run under way, the
            same keys as far as they are known.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Refuse what a result has not, with what it has in its place."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            for here, others in OTHER_NAMES.items():
                if name in others.split():
                    message += "; use ." + here.format(metric=next(iter(self.scenario.task.kinds())))
            raise AttributeError(message, name=name, obj=self)

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
        for key, tensor in stored_models(self).tensors.items():
            owner, _, name = key.partition("/")
            models.setdefault(owner, {})[name] = tensor
        return models

    @called_from_python()
    def model(self, peer: int | None = None, *, into: nn.Module | None = None) -> nn.Module:
        """Return a trained model, on the CPU and in evaluation mode.

        Args:
            peer: whose; by default the mean of all peers' models, which push-sum and gossip agree on, or, of a
                device's folder, the device's own.
            into: a module to fill; by default one is built from the scenario. It is required if the model is a Python
                object of another process.

        Raises:
            ScenarioError: when there is no such peer or model, or it does not fit the module.
        """
        return load_model(self, peer, into).module

    @called_from_python()
    def export(self, out: str | Path, peer: int | None = None, *, into: nn.Module | None = None) -> ExportedModel:
        """Write a trained model for programs that do not have this package, and a card of what it is beside it.

        The file is read back and compared with the module before it gets its name.

        Args:
            out: the path, whose ending says the format: .safetensors and .pt hold the state dict, .torchscript and .pt2
                (of `torch.export`) the module with its code; .onnx needs the extra `onnx`. Inputs may come in batches
                of any size. The card is OUT-card.md, in the same folder.
            peer, into: as of `model`.

        Returns:
            The paths of the model and of its card.

        Raises:
            ScenarioError: when there is no such model or format, the format cannot hold the module, or nothing can be
                written; no file is left then.
        """
        return export(self, as_path(out, "out"), peer, into)

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


@called_from_python()
def load_run(folder: str | Path) -> RunResult:
    """Read a run's folder, as `run` returned it; of an unfinished run, as far as it went.

    Raises:
        ScenarioError: when it is not a run's folder, or a file in it is damaged.
    """
    return RunResult(**vars(read_result(as_path(folder, "folder"))))
