"""Models: what they are, that their initial values are keyed, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from flower_privdec.common.catalogue import MODELS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.models import (
    build_model,
    check_model,
    flatten,
    parameter_count,
    unflatten,
)

IMAGE = (1, 28, 28)
SIZES = {
    "linear": 7_850,
    "softmax": 7_850,
    "mlp": 79_510,
    "cnn": 105_866,
    "cnn-small": 105_866,
    "cnn-dyn-d2p": 54_840,
    "cnn-pdsl": 20_490,
    "cnn-feddeper": 3_761_034,
    "resnet18-gn": 11_172_810,
}
FACTORY = """
import torch
from torch import nn

def two_layers(width=5, scale=1.0):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

def lazy():
    return nn.Sequential(nn.LazyLinear(3))

def number():
    return 3

class Strange(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.layer, self.answer = nn.Linear(4, 3), answer

    def forward(self, x):
        return {"pair": (x, x), "turned": self.layer(x)[:, :2].T}[self.answer]

def strange(answer):
    return Strange(answer)

class Over(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(4, 3), way

    def forward(self, x):
        mixed = {"softmax": x.softmax(0), "mean": x - x.mean(0), "sum": x.cumsum(0), "none": x.softmax(1)}
        return self.layer(mixed[self.way])

def over(way):
    return Over(way)

def typed(kind):
    return nn.Linear(4, 3).to(getattr(torch, kind))

CONSTANT = 1
"""


def test_every_named_model_is_listed_and_has_its_size() -> None:
    assert set(MODELS) == {*SIZES, "text"}
    for name, size in SIZES.items():
        assert parameter_count(build_model(name, IMAGE, 10, seed=1)) == size


def test_resnet18_is_the_papers_apart_from_its_norm() -> None:
    """ResNet-18 for 3 x 32 x 32 images has 20 convolutions, 20 norms and halves its images three times."""
    model = build_model("resnet18-gn", (3, 32, 32), 10, seed=1)
    assert sum(isinstance(part, nn.Conv2d) for part in model.modules()) == 20
    assert sum(isinstance(part, nn.GroupNorm) for part in model.modules()) == 20
    assert parameter_count(model) == 11_173_962
    assert model[:-3](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)  # type: ignore[index]


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn-small"])
def test_initial_parameters_are_keyed_and_use_no_global_state(name: str) -> None:
    state = torch.get_rng_state()
    rows = [flatten(build_model(name, (1, 8, 8), 4, seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_zeros() -> None:
    assert not flatten(build_model("mlp", (3,), 2, seed=1, init="zeros")).any()


def test_options() -> None:
    model = build_model("mlp", (2, 3), 4, seed=1, hidden=[7, 5], activation="tanh")
    assert [type(part).__name__ for part in model] == ["Flatten", "Linear", "Tanh", "Linear", "Tanh", "Linear"]  # type: ignore[union-attr]
    assert parameter_count(build_model("linear", (3,), 1, seed=1, bias=False)) == 3
    narrow = build_model("cnn-pdsl", (3, 32, 32), 10, seed=1, kernel=5, hidden=[20])
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_flatten_and_unflatten_are_inverse_in_torchs_order() -> None:
    model = build_model("mlp", (3,), 2, seed=1, hidden=[4])
    row = torch.arange(float(parameter_count(model)))
    unflatten(model, row)
    assert torch.equal(flatten(model), row)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert torch.equal(model[1].weight[1], row[3:6])  # type: ignore[index]
    flatten(model).zero_()
    assert torch.equal(flatten(model), row)
    with raises(ScenarioError, "model.row", r"\[26\]"):
        unflatten(model, row[:-1])


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: Any) -> str:
    (tmp_path / "own_models.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_models"


def test_own_module(factory: str) -> None:
    model = build_model(f"{factory}:two_layers", (4,), 3, seed=1, arguments={"width": 6})
    assert parameter_count(model) == 4 * 6 + 6 + 6 * 3 + 3
    again = build_model(f"{factory}:two_layers", (4,), 3, seed=1, arguments={"width": 6})
    assert torch.equal(flatten(model), flatten(again))


@pytest.mark.parametrize(
    ("target", "options", "refusal"),
    [
        ("no_such_package:f", {}, ("code.import", "no_such_package")),
        ("own_models:none", {}, ("code.no-name",)),
        ("own_models:CONSTANT", {}, ("code.kind",)),
        ("own_models:number", {}, ("model.no-module", "torch.nn.Module")),
        ("own_models:two_layers", {"depth": 3}, ("code.fails", "'depth'")),
    ],
)
def test_own_module_that_does_not_fit(factory: str, target: str, options: Any, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal):
        build_model(target, (4,), 3, seed=1, arguments=options)


def test_lazy_layers_are_keyed_too(factory: str) -> None:
    state = torch.get_rng_state()
    rows = [flatten(build_model(f"{factory}:lazy", (4,), 3, seed=1)) for _ in range(2)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_own_module_with_wrong_shapes(factory: str) -> None:
    target = f"{factory}:two_layers"
    with raises(ScenarioError, "model.output"):
        build_model(target, (4,), 5, seed=1)
    with raises(ScenarioError, "model.input"):
        build_model(target, (7,), 3, seed=1)


def test_own_module_that_fails_or_returns_no_tensor(factory: str) -> None:
    with raises(ScenarioError, "model.output"):
        build_model(f"{factory}:strange", (4,), 3, seed=1, arguments={"answer": "pair"})
    with raises(ScenarioError, "model.input", r"\[4\]"):
        build_model(f"{factory}:strange", (4,), 3, seed=1, arguments={"answer": "other"})

    # Of two examples and two classes the outputs have the right shape.
    with raises(ScenarioError, "model.output", r"4 examples into \[2, 4\]"):
        build_model(f"{factory}:strange", (4,), 2, seed=1, arguments={"answer": "turned"})


@pytest.mark.parametrize("way", ["softmax", "mean", "sum"])
def test_an_own_module_that_mixes_examples_is_refused(way: str, factory: str) -> None:
    build_model(f"{factory}:over", (4,), 3, seed=1, arguments={"way": "none"})
    with raises(ScenarioError, "model.mixes-examples"):
        build_model(f"{factory}:over", (4,), 3, seed=1, arguments={"way": way})


def test_an_own_module_of_another_type_gets_a_remedy(factory: str) -> None:
    with raises(ScenarioError, "model.input", "float64: build it in float32"):
        build_model(f"{factory}:typed", (4,), 3, seed=1, arguments={"kind": "float64"})


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_becomes_float32_exactly(kind: str, factory: str) -> None:
    arguments = {"kind": kind}
    module = build_model(f"{factory}:typed", (4,), 3, seed=1, arguments=arguments)
    in_half = [parameter.to(getattr(torch, kind)) for parameter in module.parameters()]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert all(torch.equal(half.float(), whole) for half, whole in zip(in_half, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "options", "refusal"),
    [
        ("mpl", (4,), {}, ("catalogue.unknown", "'mlp'")),
        ("mlp", (4,), {"hiden": [3]}, ("model.option", "model.hiden")),
        ("mlp", (4,), {"activation": "gelu"}, ("catalogue.unknown",)),
        ("mlp", (4,), {"hidden": [0]}, ("model.widths",)),
        ("linear", (4,), {"shape": 3}, ("model.option", "model.shape")),
        ("linear", (4,), {"init": "ones"}, ("catalogue.unknown", "init='ones'")),
        ("cnn-small", (4,), {}, ("model.no-images",)),
        ("cnn-small", (1, 3, 3), {}, ("model.pooling",)),
        ("resnet18-gn", (3, 8, 8), {"groups": 3}, ("model.groups", "model.groups=3")),
        ("linear", (), {}, ("model.shape",)),
    ],
)
def test_bad_arguments_are_refused(name: str, shape: Any, options: Any, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal):
        build_model(name, shape, 10, seed=1, **options)


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        (nn.BatchNorm1d(4), ("model.batch-norm",)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), ("model.batch-norm", "group_norm")),
        (nn.Dropout(0.5), ("model.random",)),
    ],
)
def test_models_that_cannot_be_private_are_refused(part: nn.Module, refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal):
        check_model(nn.Sequential(nn.Linear(4, 4), part))


def test_a_model_without_parameters_is_refused() -> None:
    with raises(ScenarioError, "model.no-parameters"):
        check_model(nn.Sequential(nn.ReLU()))


def test_norms_that_keep_examples_apart_are_accepted() -> None:
    check_model(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.Dropout(0.0)))
