"""Exported models and their cards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from raising import raises
from run_folders import privacy_row
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import flower_privdec as fp
from flower_privdec.reporting.exporting import FORMATS
from flower_privdec.reporting.model_card import ModelFacts, _without_places, model_card
from flower_privdec.reporting.run_folder import read_groups

SCENARIO = {
    "name": "small",
    "n_peers": 3,
    "rounds": 2,
    "data": {"dataset": "digits", "batch": {"size": 45}},
    "model": {"name": "mlp", "hidden": [6]},
    "algorithm": {"name": "privsgp", "learning_rate": 1.0},
    "privacy": {"epsilon": 3.0, "delta": 1.0e-3},
}


def _filled_by(load: Callable[[str], dict[str, Tensor]]) -> Callable[[str], nn.Module]:
    def read(path: str) -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
        module.load_state_dict(load(path))
        return module

    return read


def _onnx_session(path: str) -> Callable[[Tensor], Tensor]:
    session = onnxruntime.InferenceSession(path)
    return lambda inputs: torch.from_numpy(session.run(["output"], {"input": inputs.numpy()})[0])


# How programs without this package read each format.
READERS: dict[str, Callable[[str], Callable[[Tensor], Tensor]]] = {
    ".safetensors": _filled_by(load_file),
    ".pt": _filled_by(lambda path: torch.load(path, weights_only=True)),
    ".torchscript": torch.jit.load,
    ".pt2": lambda path: torch.export.load(path).module(),
    ".onnx": _onnx_session,
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fp.RunResult:
    folder = tmp_path_factory.mktemp("exported")
    privacy = {**SCENARIO["privacy"], "ledger": str(folder / "secret-place")}
    return fp.run(fp.make_scenario(SCENARIO, privacy=privacy), out=folder / "run")


def test_every_format_has_an_independent_reader() -> None:
    assert READERS.keys() == FORMATS.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.load")
@pytest.mark.parametrize("ending", READERS)
def test_an_exported_model_computes_what_the_module_does(result: fp.RunResult, tmp_path: Path, ending: str) -> None:
    images = torch.rand(7, 1, 8, 8)
    for peer in (None, 2):
        exported = result.export(tmp_path / f"model{ending}", peer)
        outputs = READERS[ending](str(exported.model))(images)
        assert torch.allclose(outputs, result.model(peer)(images), atol=1e-5)


@pytest.mark.slow
def test_token_models_are_exported_with_whole_numbers(tmp_path: Path) -> None:
    tokens = torch.from_numpy(np.random.default_rng(1).integers(1, 9, (60, 5)))
    labels = torch.arange(60) % 3
    data = {"train": (tokens, labels), "test": (tokens, labels), "vocabulary": 9, "batch": {"size": 10}}
    run = fp.run(fp.make_scenario(SCENARIO, data=data, model={"name": "text"}))
    exported = run.export(tmp_path / "model.onnx")
    assert torch.allclose(_onnx_session(str(exported.model))(tokens), run.model()(tokens), atol=1e-5)
    assert "whole numbers 0 to 8" in exported.card.read_text(encoding="utf-8")


class CountsItsBatch(nn.Module):
    """Multiplies by how many examples there are, which tracing takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1).sum(1) * self.scale * len(inputs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.load")
def test_a_file_that_computes_otherwise_is_not_kept(result: fp.RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(result.folder, folder)
    facts = {"privdec": json.dumps({"input_shape": [64], "outputs": 1, "n_tokens": None})}
    save_file({"mean/scale": torch.ones(())}, folder / "model.safetensors", facts)

    with raises(fp.ScenarioError, "export.differs", names=r"\.safetensors"):
        fp.load_run(folder).export(tmp_path / "out" / "model.torchscript", into=CountsItsBatch())
    assert not list((tmp_path / "out").iterdir())
    fp.load_run(folder).export(tmp_path / "out" / "model.safetensors", into=CountsItsBatch())


def test_wrong_endings_peers_and_places_are_refused(result: fp.RunResult, tmp_path: Path) -> None:
    with raises(fp.ScenarioError, "export.suffix", names="model.bin"):
        result.export(tmp_path / "model.bin")
    for peer in (3, 1.0, "1", True):
        with raises(fp.ScenarioError, "api.argument", names=repr(peer)):
            result.export(tmp_path / "model.pt", peer)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with raises(fp.ScenarioError, "export.unwritable", names="file"):
        result.export(tmp_path / "file" / "model.pt")
    (tmp_path / "model.pt").mkdir()
    with raises(fp.ScenarioError, "export.unwritable", names="model.pt"):
        result.export(tmp_path / "model.pt")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "model.pt"}


def test_a_card_has_the_scenario_without_places(result: fp.RunResult, tmp_path: Path) -> None:
    card = result.export(tmp_path / "model.pt").card.read_text(encoding="utf-8")
    assert str(result.folder.parent) not in card
    assert "secret-place" not in card

    said = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    read_again = fp.make_scenario({"name": "small", "n_peers": 3, "rounds": 2, **said})
    for name in said.keys() - {"privacy"}:
        assert getattr(read_again, name) == getattr(result.scenario, name)
    epsilon = result.privacy[0]["epsilon"]
    assert f"{epsilon:.2f}" in card
    assert "Nothing of this run may be published" in card  # its noise is drawn from keys


def test_own_models_of_runs_are_never_overwritten(result: fp.RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(result.folder, folder)
    run = fp.load_run(folder)
    (tmp_path / "link").symlink_to(folder)
    before = (folder / "model.safetensors").read_bytes()
    for name in ("run/model.safetensors", "link/model.safetensors", "run/Model.SafeTensors"):
        with raises(fp.ScenarioError, "export.exists", names=r"(?i)model\.safetensors"):
            run.export(tmp_path / name)
    run.export(folder / "mean.safetensors")
    assert (folder / "model.safetensors").read_bytes() == before


def test_each_file_has_a_card_of_its_own(result: fp.RunResult, tmp_path: Path) -> None:
    cards = [result.export(tmp_path / "model.pt").card, result.export(tmp_path / "model.safetensors", 1).card]
    assert "mean model" in cards[0].read_text(encoding="utf-8")
    assert "model of peer 1" in cards[1].read_text(encoding="utf-8")
    result.export(tmp_path / "model.pt", 2)
    assert "model of peer 2" in cards[0].read_text(encoding="utf-8")

    cards[0].write_text("my notes", encoding="utf-8")
    with raises(fp.ScenarioError, "export.exists", names="model.pt-card.md"):
        result.export(tmp_path / "model.pt")
    assert cards[0].read_text(encoding="utf-8") == "my notes"


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs.flatten(1)))  # type: ignore[no-any-return]


def test_tied_parameters_keep_every_name(result: fp.RunResult, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(result.folder, folder)
    facts = {"privdec": json.dumps({"input_shape": [64], "outputs": 64, "n_tokens": None})}
    state = {f"mean/{name}": tensor.clone() for name, tensor in Tied().state_dict().items()}
    save_file(state, folder / "model.safetensors", facts)
    for ending in (".pt", ".safetensors"):
        exported = fp.load_run(folder).export(tmp_path / f"tied{ending}", into=Tied())
        assert exported.model.is_file()


def test_places_are_left_out_by_their_keys() -> None:
    table = {"target": "y", "numbers": {"test": [0.0, 1.0], "root": [0.0, 1.0]}}
    data = {"dataset": "csv", "table": table}
    assert _without_places({**data, "test": "x.csv", "source": "ward-7"}, ("data",)) == data

    places = {"vocabulary": "lists/ours.txt", "home": "~me", "url": "x://host/y", "files": ["a/b"]}
    said = _without_places({"arguments": {"root": 3, "kind": "b", **places}}, ("model",))
    assert said == {"arguments": {"root": 3, "kind": "b", "files": []}}


def test_a_card_has_the_arguments_of_own_parts(result: fp.RunResult, tmp_path: Path) -> None:
    settings = {
        "network.codec": {"module": "mine:Rounds", "arguments": {"digits": 3}},
        "network.robust": {"kind": "clipped", "byzantine": 1},
        "topology": {"module": "mine:ring", "arguments": {"hops": 2, "file": "~/edges.txt", "more": ["x", "a/b"]}},
    }
    run = read_groups([result.folder])[0].runs[0]
    run = replace(run, scenario=fp.make_scenario(run.scenario, settings))

    card = model_card(run, ModelFacts("mean model", "m.pt", "numbers", "numbers", 3))
    said = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert said["network"]["codec"]["arguments"] == {"digits": 3}
    assert said["network"]["robust"]["byzantine"] == 1
    assert said["topology"]["arguments"] == {"hops": 2, "more": ["x"]}
    assert "`topology.arguments.file`, `topology.arguments.more.1`" in card
    assert "edges.txt" not in card
    assert "a/b" not in card


def test_a_devices_folder_has_its_own_model(result: fp.RunResult, tmp_path: Path) -> None:
    """A deployed peer keeps a file with plain names, and a summary of its own."""
    folder = tmp_path / "device"
    folder.mkdir()
    shutil.copy(result.folder / "scenario.yaml", folder)
    summary = {"peer": 1, "round": 2, "epsilon": privacy_row(1)["epsilon"], "noise": "models may be published"}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    save_file(result.models["peer-1"], folder / "model.safetensors")

    device = fp.load_run(folder)
    images = torch.rand(3, 1, 8, 8)
    for peer in (None, 1):
        assert torch.equal(device.model(peer)(images), result.model(1)(images))
    with raises(fp.ScenarioError, "api.no-model", names="peer 1"):
        device.model(0)
    assert "model of peer 1" in device.export(tmp_path / "one.pt").card.read_text(encoding="utf-8")

    (folder / "model.safetensors").write_bytes(b"half")
    with raises(fp.ScenarioError, "api.no-model", names=r"model\.safetensors"):
        device.model()
