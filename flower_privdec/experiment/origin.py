"""The run whose model another run starts from (`model.from`), and the ledger that both are charged to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from flower_privdec.common.deferred import nn
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.data import PublicSet
from flower_privdec.experiment.run_key import fingerprint, tensors_hash
from flower_privdec.models.layers.one_tensor import own_model
from flower_privdec.privacy.ledger.segments import Head, ledger_path, verified
from flower_privdec.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from torch import Tensor

ORIGIN = "origin.json"  # of a run's folder, and not in its models: the ledger's head is a hash of who is in the data
MEAN = "mean/"  # before the names of the mean model's tensors


@dataclass(frozen=True)
class TrainedRun:
    """One of the runs behind a model: how to recognize the same data, and where it is charged.

    Attributes:
        source: the name of its data in a ledger.
        tested: a hash of its public test set.
        private: whether it had a privacy section.
        ledger: the folder that it was charged in; None if its peers have their own.
        head: the head of the ledger when the run ended.
    """

    source: str
    tested: str
    private: bool
    ledger: str | None = None
    head: Head | None = None

    @staticmethod
    def of(scenario: Scenario, public: PublicSet, ledger: Path | None, head: Head | None) -> TrainedRun:
        """Describe a run; its ledger is None if its peers have their own."""
        return TrainedRun(
            source=public.name,
            tested=fingerprint(public.x, public.y).hex(),
            private=scenario.private is not None,
            ledger=None if ledger is None else str(ledger.absolute()),
            head=head,
        )

    def is_charged_in(self, folder: Path) -> bool:
        """Return whether a folder has the ledger of this run, with all that was charged up to its end."""
        if self.head is None:
            return False
        n_lines, digest = self.head
        path = ledger_path(folder, self.source)
        if n_lines == 0 or not path.exists():
            return False

        # The line that was the last one then, in whichever segment it lies now.
        for segment, _ in verified(path):
            place = n_lines - 1 - segment.first
            if 0 <= place < len(segment.hashes):
                return segment.hashes[place] == digest
        return False


@dataclass(frozen=True)
class Origin:
    """The run that another one starts from.

    Attributes:
        folder: the folder of the run.
        weights: its mean model, by the names of a state dict.
        runs: those behind it, oldest first, itself the last.
    """

    folder: Path
    weights: Mapping[str, Tensor]
    runs: tuple[TrainedRun, ...]

    def load_into_(self, module: nn.Module) -> None:
        """Copy the weights into a module.

        Raises:
            ScenarioError: they do not fit.
        """
        module = own_model(module)
        own = module.state_dict()
        shapes = {name: list(tensor.shape) for name, tensor in self.weights.items()}
        needed = {name: list(tensor.shape) for name, tensor in own.items()}
        if shapes != needed:
            name = next(name for name in {**needed, **shapes} if shapes.get(name) != needed.get(name))
            raise ScenarioError(
                f"model.from={self.folder}: its {name} has the shape {shapes.get(name, 'of nothing')} and the model's "
                f"{needed.get(name, 'of nothing')}: name the same model, or leave name out",
                code="origin.misfit",
            )
        module.load_state_dict({name: t.to(own[name].dtype) for name, t in self.weights.items()})

    def ledger(self, scenario: Scenario, public: PublicSet) -> Path | None:
        """Return the folder of the ledger that a run from here has to be charged in; None if it has its own.

        Raises:
            ScenarioError: weights of the same data came without privacy, under another name of the data, or without
                their ledger.

        Privacy: weights are what their own ε covers. On the same data another run adds to that; on other data it adds
            nothing.
        """
        me = TrainedRun.of(scenario, public, None, None)
        private = scenario.private
        behind = [run for run in self.runs if run.source == me.source or run.tested == me.tested]
        if private is None or not behind:
            return None

        where = f"model.from={self.folder}"
        if not all(run.private for run in behind):
            raise ScenarioError(
                f"{where}: was trained without privacy on the same data ({me.source}), so no ε covers its weights: "
                "start from a run with privacy, or from one on other data",
                code="origin.not-private",
            )
        for run in behind:
            if run.source != me.source:
                raise ScenarioError(
                    f"{where}: has the same test set under the name {run.source}, and this run's data are called "
                    f"{me.source}: name them alike (data.dataset or data.source), so that one ledger counts both",
                    code="origin.renamed",
                )

        # A folder that was moved has its ledger beside it, or where the scenario says.
        last = behind[-1].ledger
        given = None if private.ledger is None else Path(private.ledger).expanduser()
        places = []
        if last:
            places = [Path(last), self.folder / "ledger"]
            if given is not None:
                places.append(given)
        holding = next((place for place in places if all(run.is_charged_in(place) for run in behind)), None)
        if holding is None:
            kind = "lies with its peers: start from another"
            if last:
                kind = f"is not in {last}, nor beside it: restore it"
            raise ScenarioError(
                f"{where}: was trained on the same data ({me.source}), and its ledger {kind}, or train without privacy",
                code="origin.ledger",
            )
        if given is not None and given.resolve() != holding.resolve():
            raise ScenarioError(
                f"privacy.ledger={private.ledger} is not the ledger of {self.folder}, which was trained on the same "
                f"data and is charged in {holding}: leave it out",
                code="origin.ledger",
            )
        return holding


def origin_facts(runs: Sequence[TrainedRun], models: Mapping[str, Tensor]) -> str:
    """Return the record that a run writes to its folder of its models and the runs that they came from."""
    weights = {name.removeprefix(MEAN): tensor for name, tensor in models.items() if name.startswith(MEAN)}
    return json.dumps({"runs": [asdict(run) for run in runs], "weights": tensors_hash(weights)})


def model_section(scenario: Scenario) -> Any:
    """Return the section that names a scenario's model: its own, or that of the run that it starts from."""
    section = scenario.model
    if section.target is None:
        return model_section(load_scenario(_folder(str(section.origin)) / "scenario.yaml"))
    return section


def _folder(origin: str) -> Path:
    folder = Path(origin).expanduser()
    if not (folder / "scenario.yaml").is_file():
        raise ScenarioError(
            f"model.from={folder.absolute()}: has no scenario.yaml, so it is not a run: give the folder of a run",
            code="origin.not-a-run",
        )
    return folder


def read_origin(origin: str) -> Origin:
    """Return the run that a scenario starts from.

    Args:
        origin: its folder, as `model.from` has it.

    Raises:
        ScenarioError: there is no such run, it is under way, or its model was changed.
    """
    folder = _folder(origin)
    path = folder / "model.safetensors"
    where = f"model.from={folder}"
    if not path.is_file() or not (folder / "summary.json").is_file():
        raise ScenarioError(
            f"{where}: is under way, or has no models: let it finish, or stop it", code="origin.unfinished"
        )

    try:
        facts = json.loads((folder / ORIGIN).read_bytes())
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(MEAN)]  # noqa: SIM118 (not a mapping)
            weights = {name.removeprefix(MEAN): file.get_tensor(name) for name in names}
        heads = [None if run["head"] is None else (int(run["head"][0]), str(run["head"][1])) for run in facts["runs"]]
        runs = tuple(TrainedRun(**run | {"head": head}) for run, head in zip(facts["runs"], heads, strict=True))
        if not runs or facts["weights"] != tensors_hash(weights):
            raise ValueError("its weights are not those that the run wrote")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ScenarioError(
            f"{where}: {path.name} is not as the run wrote it ({one_line(error)}), so no ε covers it: restore it from "
            "a copy, or run it again",
            code="origin.edited",
        ) from error

    return Origin(folder, weights, runs)
