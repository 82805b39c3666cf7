"""The models that a run's folder holds: of all peers and their mean, or, in a device's folder, the device's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.formatting import one_line
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.agreement import build_module, module_facts
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.recorder import TRAINED, model_tensors
from flower_privdec.models.layers.one_tensor import own_model
from flower_privdec.reporting.run_folder import Result

StateDict = dict[str, Tensor]
MEAN = "mean"
PEER = "peer-"


class StoredModels(NamedTuple):
    """Some models of a run.

    Attributes:
        tensors: by the owner's name and the parameter's, `mean/1.weight` or `peer-0/1.weight`.
        module_facts: the arguments with which `build_module` makes a module for them.
    """

    tensors: StateDict
    module_facts: dict[str, Any]


@dataclass(frozen=True)
class LoadedModel:
    """A trained model.

    Attributes:
        module: on the CPU, in evaluation mode.
        owner: `mean`, or `peer-3`.
        input_shape: of one example.
        n_tokens: inputs are whole numbers 0..n_tokens-1; None if they are real numbers.
        columns: how many values each argument of a model of tokenized texts has; None for any other model.
    """

    module: nn.Module
    owner: str
    input_shape: tuple[int, ...]
    n_tokens: int | None
    columns: Mapping[str, int] | None = None

    @property
    def title(self) -> str:
        """Whose model it is, in words."""
        if self.owner == MEAN:
            return "mean model of all peers"
        return f"model of peer {self.owner.removeprefix(PEER)}"


def load_model(run: Result, peer: int | None, into: nn.Module | None = None) -> LoadedModel:
    """Load a trained model of a run.

    Args:
        peer: whose, below the number of peers; None for the mean, or, of a device's folder, for the device's own.
        into: a module to fill; by default one is built from the scenario.

    Raises:
        ScenarioError: when there is no such peer or model, or it does not fit the module.
    """
    if into is not None and not isinstance(into, nn.Module):
        raise ScenarioError(f"into is a {type(into).__name__} and must be a torch.nn.Module", code="api.argument")
    n_peers = run.scenario.n_peers
    if peer is not None and (
        not isinstance(peer, int | np.integer) or isinstance(peer, bool) or peer not in range(n_peers)
    ):
        raise ScenarioError(
            f"{option('peer', repr(peer))} must be 0 to {n_peers - 1}; without it the mean model is meant",
            code="api.argument",
        )

    device = device_of(run)
    if peer is not None:
        owner = f"{PEER}{peer}"
    elif device is not None:
        owner = f"{PEER}{device}"
    else:
        owner = MEAN

    stored = stored_models(run, f"{owner}/")
    if not stored.tensors:
        raise ScenarioError(
            f"{run.folder}: is the folder of peer {device}, which has no other model; ask for peer {device}",
            code="api.no-model",
        )
    facts = stored.module_facts
    module = into
    if module is None:
        module = own_model(build_module(run.scenario, **facts))

    state = {key.partition("/")[2]: tensor for key, tensor in stored.tensors.items()}
    dtype = next(iter(state.values())).dtype
    try:
        module.to(dtype).load_state_dict(state)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise ScenarioError(
            f"{run.folder}: the model does not fit the module that is given: {lines}", code="api.model-misfit"
        ) from error
    shape = tuple(facts["input_shape"])
    return LoadedModel(module.eval(), owner, shape, facts["n_tokens"], run.scenario.data.columns)


def device_of(run: Result) -> int | None:
    """Return the peer whose folder, on its own device, this is; None if it is the folder of a run of all peers."""
    rows = run.summary["privacy"]
    if run.summary["runtime"] == "network" and len(rows) == 1 and run.scenario.n_peers > 1:
        peer: int = rows[0]["peer"]
        return peer
    return None


def stored_models(run: Result, prefix: str = "") -> StoredModels:
    """Return the tensors of a finished run, or of the checkpoint of one under way, whose names have a prefix.

    Raises:
        ScenarioError: the run kept no models, or a file is damaged.
    """
    path = run.folder / TRAINED
    device = device_of(run)
    if device is not None and path.is_file():
        return _models_of_device(run, path, device, prefix)

    is_finished = bool(run.summary["privacy"])
    if is_finished and path.is_file():
        return _read_models(path, prefix)

    checkpoint = run.folder / "checkpoint"
    if is_finished or not checkpoint.is_file():
        raise ScenarioError(
            f"{run.folder}: has no {path.name}: this run kept no models; run the scenario again",
            code="api.no-model",
        )
    state = read_checkpoint(checkpoint).state
    if not state.rows:
        raise ScenarioError(
            f"{run.folder}: its shards hold the models until the run is done: let it finish", code="api.no-model"
        )

    agreement = Agreement.of(run.scenario)
    tensors = model_tensors(agreement, state.rows, state.round_index)
    chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return StoredModels(chosen, module_facts(agreement.public, agreement.loss))


def _models_of_device(run: Result, path: Path, device: int, prefix: str) -> StoredModels:
    """Read a device's own model, whose names are plain, so that programs without this package can read it."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {f"{PEER}{device}/{name}": file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ScenarioError(
            f"{path}: cannot be read as a model ({one_line(error)}); the peer writes it again at its next evaluation",
            code="api.no-model",
        ) from error

    agreement = Agreement.of(run.scenario)
    chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return StoredModels(chosen, module_facts(agreement.public, agreement.loss))


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
