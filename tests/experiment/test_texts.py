"""Models of tokenized texts in a scenario: clipped example by example, alike in every runtime, resumed and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_texts
from flower_runs import final_rows, run_under_flower
from gradient_problems import Batch
from networked import run_network
from raising import raises
from safetensors.torch import load_file
from salts import pin_salts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from user_texts import SIZES

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.recorder import traffic
from flower_privdec.models import flatten, trained, unflatten
from flower_privdec.models.layers.one_tensor import own_model, unpacked

TRANSFORMERS = pytest.mark.slow  # which take seconds to import
ADAPTERS = 2 * 2 * 2 * 2 * 16 + 2 * 17  # of query and value in two layers, r = 2 rows and columns each; and the head
MODELS = ["reader", pytest.param("adapted_bert", marks=TRANSFORMERS)]


def scenario(model: str = "reader", settings: dict[str, Any] | None = None, **sections: Any) -> fp.Scenario:
    """Return a scenario over texts of each peer's own, which any process can run."""
    data = {"dataset": {"module": "user_texts:halves"}, "root": "{peer}", "test": "test", "columns": SIZES}
    whole = {
        "name": "texts",
        "n_peers": 4,
        "rounds": 2,
        "data": {**data, "batch": {"size": 6}},
        "model": {"module": f"user_texts:{model}"},
        "algorithm": {"name": "privsgp", "learning_rate": 0.5},
        "privacy": {"epsilon": 8.0, "delta": 1.0e-3, "clip_norm": 0.3},
        "compute": {"dtype": "float64", "generator": "portable"},
    }
    return fp.make_scenario({**whole, **sections}, settings)


def example_by_example(experiment: Experiment, row: Tensor, x: Tensor, y: Tensor, clip_norm: float) -> Tensor:
    """Return the sum of clipped gradients by autograd on one text after the other, as the model's author calls it."""
    model = own_model(unflatten(experiment.module, row))
    parameters = list(trained(model).values())
    total = torch.zeros_like(row)
    for tokens, label in zip(x, y, strict=True):
        columns = unpacked(tokens[None], SIZES) if x.dtype == torch.int64 else {"pixel_values": tokens[None]}
        outputs = model(**columns)
        parts = torch.autograd.grad(cross_entropy(outputs["logits"], label[None]), parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g for g, p in zip(parts, parameters, strict=True)]
        gradient = torch.cat([part.reshape(-1) for part in dense])
        total += gradient * min(1.0, clip_norm / gradient.norm().item())
    return total


@pytest.mark.parametrize("arguments", [{}, {"tied": True}])
def test_clipped_sums_are_those_of_single_texts(arguments: dict[str, Any]) -> None:
    check_sums(scenario(settings={"model.arguments": arguments}))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "adapted_bert", "image_classifier"])
def test_transformers_are_clipped_as_single_examples_are(model: str) -> None:
    images = {"dataset": "digits", "batch": {"size": 6}}
    check_sums(scenario(model, data=images) if model == "image_classifier" else scenario(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_is_trained_in_the_scenario_s_type(kind: str) -> None:
    check_sums(scenario("bert", {"model.arguments": {"kind": kind}}))


def check_sums(given: fp.Scenario) -> None:
    """Compare the kernel's sums for two peers, some clipped and some not, with those of single examples."""
    experiment = Experiment.build(given)
    examples = experiment.own.examples
    rows = torch.stack([experiment.initial, experiment.initial + 0.1 * torch.randn_like(experiment.initial)])
    chosen = torch.from_numpy(np.stack([part[:5] for part in examples.parts[:2]]))
    x = examples.x[chosen]
    y = examples.y[chosen]
    weight = torch.ones(2, 5, dtype=torch.float64)
    limits = torch.tensor([0.3, 1e9], dtype=torch.float64)

    found = torch.zeros_like(rows)
    experiment.kernel.add_clipped_(found, rows, Batch(x, y, weight), limits, torch.ones(2, dtype=torch.float64))
    for i in range(2):
        expected = example_by_example(experiment, rows[i], x[i].to(x.dtype), y[i], limits[i].item())
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_relay_and_network_match_the_engine(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_salts(monkeypatch)
    given = scenario(model)
    expected = testing.run_rounds(Experiment.build(given), 2).state.rows["x"]
    relayed = final_rows(run_under_flower(given, tmp_path / "relay", "relay"))["x"]
    torch.testing.assert_close(relayed, expected, rtol=1e-9, atol=1e-12)

    # Peers of a network draw the noise of code of one's own from their operating systems.
    bare = scenario(model, privacy="none", network={"mode": "synchronous", "links": "local", "final_mixing": 0})
    expected = testing.run_rounds(Experiment.build(scenario(model, privacy="none")), 2).state.rows["x"]
    sent = run_network(bare, tmp_path / "network", memory=True)["x"]
    torch.testing.assert_close(sent, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_only_adapters_are_trained_sent_and_charged() -> None:
    experiment = Experiment.build(scenario("adapted_bert"))
    end = testing.run_rounds(experiment, 2).state.rows["x"]
    assert end.shape == (4, ADAPTERS)
    assert traffic(experiment.algorithm, {"x": end, "w": torch.ones(4)})["bytes"] == 8 * ADAPTERS
    names = set(trained(own_model(experiment.module)))
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    assert ((end - experiment.initial).abs() > 0).all()  # every number of a row has noise
    testing.assert_sensitivity(experiment, rounds=1)


def test_one_text_moves_only_releases_as_declared() -> None:
    experiment = Experiment.build(scenario())
    testing.assert_sensitivity(experiment, rounds=1)
    testing.assert_noise(experiment, rounds=1)
    testing.assert_nothing_else_leaves(experiment)


MOMENTUM = {"name": "d-psgd", "learning_rate": 0.5, "optimizer": {"name": "momentum"}}
PADDED = {"model.arguments": {"padding": 0}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": MOMENTUM},
        {"algorithm": {"name": "fedavg", "learning_rate": 0.5, "local_steps": 2}, "topology": {"name": "complete"}},
        {"algorithm": {"name": "dp-cga", "learning_rate": 0.5}, "topology": {"name": "ring"}},
        {"compute": {"dtype": "float64", "generator": "system"}},  # as deployed peers draw, and add to rows at the end
    ],
    ids=["push-sum", "momentum", "local steps", "a sum for each receiver", "deployed"],
)
def test_the_row_for_padding_stays_and_others_are_noised(sections: dict[str, Any]) -> None:
    experiment = Experiment.build(scenario(settings=PADDED, **sections))
    (columns,) = experiment.kernel.padding
    state = testing.run_rounds(experiment, 2).state.rows
    moved = (state["x"] / state.get("w", torch.ones(4))[:, None] - experiment.initial).abs()
    assert moved[:, columns].max() < 1e-12
    moved[:, columns] = 1
    assert (moved > 1e-9).all()


def test_a_row_that_the_head_uses_too_is_trained() -> None:
    experiment = Experiment.build(scenario(settings={"model.arguments": {"padding": 0, "tied": True}}))
    assert experiment.kernel.padding == []
    assert (testing.run_rounds(experiment, 1).state.rows["x"] != experiment.initial).all()


def test_a_row_for_padding_gives_a_run_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pin_salts(monkeypatch)
    keys = set(Experiment.build(scenario(settings=PADDED)).own.keys.values())
    monkeypatch.setattr("flower_privdec.experiment.run_key.padding_rows", lambda module: {})
    assert not keys & set(Experiment.build(scenario(settings=PADDED)).own.keys.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_stopped_run_goes_on_as_if_never_stopped(model: str, tmp_path: Path) -> None:
    given = scenario(model, privacy="none", rounds=4, evaluation={"every": 1})
    whole = fp.run(given, out=tmp_path / "whole")
    fp.run(given, out=tmp_path / "run", on_evaluation=lambda record: record["round"] == 2)
    resumed = fp.run(given, out=tmp_path / "run", resume=True)
    assert resumed.finished
    for name, value in whole.models["mean"].items():
        assert torch.equal(resumed.models["mean"][name], value)


@pytest.mark.parametrize("model", MODELS)
def test_models_are_stored_under_their_own_names(model: str, tmp_path: Path) -> None:
    result = fp.run(scenario(model), out=tmp_path / "run")
    made: nn.Module = getattr(user_texts, model)()
    assert result.models["mean"].keys() == made.state_dict().keys()
    assert type(result.model()) is type(made)
    made.double().load_state_dict(result.models["mean"])  # by those who know nothing of scenarios

    columns = {name: torch.from_numpy(values) for name, values in user_texts.columns(9, seed=5).items()}
    columns.pop("labels")
    with torch.no_grad():
        torch.testing.assert_close(result.model()(**columns)["logits"], made.eval()(**columns)["logits"])
    further = fp.make_scenario(scenario(model), {"model.from": str(tmp_path / "run")}, name="further")
    assert torch.equal(Experiment.build(further).initial, flatten(result.model()))


@pytest.mark.slow
def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    result = fp.run(scenario("adapted_bert"), out=tmp_path / "run")
    result.model().save_pretrained(str(tmp_path / "adapters"))  # type: ignore[operator]
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    trained_parts = result.models["mean"]
    lines = {name: value for name, value in saved.items() if "lora_" in name}
    assert len(lines) == 8
    for name, value in lines.items():
        assert torch.equal(value, trained_parts[name.replace(".weight", ".default.weight")])


def test_state_dicts_are_exported_under_the_model_s_names(tmp_path: Path) -> None:
    result = fp.run(scenario(), out=tmp_path / "run")
    exported = result.export(tmp_path / "model.safetensors")
    assert load_file(exported.model).keys() == user_texts.reader().state_dict().keys()
    assert "attention" in exported.card.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.load")
@pytest.mark.parametrize("model", ["reader", "adapted_bert"])
def test_programs_take_columns_as_their_inputs(model: str, tmp_path: Path) -> None:
    import onnxruntime

    result = fp.run(scenario(model, compute={"dtype": "float32"}), out=tmp_path / "run")
    columns = user_texts.columns(9, seed=5)
    columns.pop("labels")
    inputs = [torch.from_numpy(column) for column in columns.values()]
    with torch.no_grad():
        expected = result.model()(**dict(zip(columns, inputs, strict=True)))["logits"]

    session = onnxruntime.InferenceSession(str(result.export(tmp_path / "model.onnx").model))
    found = [torch.from_numpy(session.run(["output"], columns)[0])]
    found.append(torch.jit.load(str(result.export(tmp_path / "model.torchscript").model))(*inputs))
    found.append(torch.export.load(result.export(tmp_path / "model.pt2").model).module()(*inputs))
    for outputs in found:
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        {"data.batch": {"rate": 0.2}, "data.root": None, "data.test": None},
        {"data.batch": {"size": 6}, "data.at_least": 60},
    ],
)
def test_noise_that_cancels_class_weights_and_metrics_fit_texts(data: dict[str, Any]) -> None:
    task = {"class_weights": [1.0, 0.5], "metrics": ["accuracy", "roc-auc"]}
    noise = {"privacy.noise": {"kind": "cancelling", "colluding": 1}, "topology": {"name": "complete"}}
    result = fp.run(scenario(settings={**noise, **data, "task": task, "evaluation.by_class": True}))
    assert 0 <= result.metrics[-1]["roc-auc"]["mean_model"] <= 1
    assert result.privacy[0]["epsilon"] <= 8


@pytest.mark.parametrize(
    ("columns", "code", "words"),
    [
        ({**SIZES, "position_ids": 2}, "data.columns", "'position_ids'"),
        ({"input_ids": user_texts.VOCABULARY, "attention_mask": 2}, "model.input", "data.columns"),
        ({**SIZES, "input_ids": user_texts.VOCABULARY + 1}, "model.input", "input_ids 0 to 30"),
    ],
)
def test_columns_that_the_model_does_not_take_are_refused(columns: dict[str, int], code: str, words: str) -> None:
    with raises(ScenarioError, code, words):
        Experiment.build(scenario(settings={"data.columns": columns}))


@pytest.mark.slow
def test_dropout_is_refused_with_its_remedy() -> None:
    with raises(ScenarioError, "model.random", r"eval\(\)"):
        Experiment.build(scenario("bert_in_training"))
