"""What a training loop does with gradients between `backward()` and `step()`, and with the wrapped model as a whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.training_loop import ExamplePrivacy, private

INPUTS = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(8) % 3


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def wrapped(tmp_path: Path, model: nn.Module, parameters: Any = None, **more: Any) -> ExamplePrivacy:
    """Return the private parts of a loop whose batches are all examples, in steps that follow from a seed."""
    options: dict[str, Any] = {"ledger": tmp_path / "a.jsonl", "delta": 1e-3, "noise_multiplier": 1.0, "report": str}
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(INPUTS, CLASSES), len(INPUTS))
    return private(model, optimizer, loader, nn.CrossEntropyLoss(), insecure_seed=1, **options | more)


def moved(tmp_path: Path, between: Callable[[nn.Module], Any], **more: Any) -> Tensor:
    """Return by how much one step moved the parameters, of a loop that does something before it."""
    model = layers()
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    parts = wrapped(tmp_path, model, ledger=tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", **more)
    for inputs, targets in parts.data_loader:
        parts.optimizer.zero_grad()
        parts.criterion(parts.model(inputs), targets).backward()
        between(model)
        parts.optimizer.step()
    return before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def halved_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 0.5


def halved(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 2


def clipped(model: nn.Module) -> None:
    assert clip_grad_norm_(model.parameters(), 0.1) > 0.1


def read(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        kept = io.BytesIO()
        torch.save(parameter.grad, kept)
        kept.seek(0)
        assert torch.equal(copy.deepcopy(parameter.grad), torch.load(kept))


@pytest.mark.parametrize("loss_bound", [None, 2.0])
def test_a_loop_finds_the_noised_gradients(loss_bound: float | None, tmp_path: Path) -> None:
    step = moved(tmp_path, lambda model: None, loss_bound=loss_bound)
    found: list[Tensor] = []

    def look(model: nn.Module) -> None:
        found.extend(p.grad.clone().flatten() for p in model.parameters() if p.grad is not None)

    assert torch.equal(moved(tmp_path, look, loss_bound=loss_bound), step)
    torch.testing.assert_close(torch.cat(found), step)
    assert torch.equal(moved(tmp_path, read, loss_bound=loss_bound), step)


@pytest.mark.parametrize("halve", [halved_in_place, halved])
def test_scaled_gradients_scale_the_step(halve: Any, tmp_path: Path) -> None:
    torch.testing.assert_close(moved(tmp_path, halve), moved(tmp_path, lambda model: None) / 2, rtol=1e-4, atol=1e-6)


def test_clipped_gradients_bound_the_step(tmp_path: Path) -> None:
    step = moved(tmp_path, lambda model: None)
    torch.testing.assert_close(moved(tmp_path, clipped), step * (0.1 / step.norm()), rtol=1e-4, atol=1e-6)


def test_a_gradient_that_was_seen_is_paid_for(tmp_path: Path) -> None:
    model = layers()
    parts = wrapped(tmp_path, model)
    inputs, targets = next(iter(parts.data_loader))
    parts.criterion(parts.model(inputs), targets).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.shape == (4, 5)
    assert not list(tmp_path.iterdir())  # of its shape nothing is paid
    gradient.norm()
    assert len((tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()) == 2  # the header and one payment


def test_a_gradient_without_its_step_stays_unseen(tmp_path: Path) -> None:
    model = layers()
    parts = wrapped(tmp_path, model)
    with raises(RunError, "training-loop.one-step-a-batch", "no step"):
        for inputs, targets in parts.data_loader:
            parts.criterion(parts.model(inputs), targets).backward()
    with raises(RunError, "training-loop.one-step-a-batch", "never noised"):
        print(next(model.parameters()).grad)
    parts.close()
    assert next(model.parameters()).grad is None


def test_parameters_without_the_optimizer_are_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    model = layers()
    wrapped(tmp_path, model, model[2].parameters(), report=said.append).close()
    (warning,) = said
    assert "does not hold 0.weight, 0.bias" in warning

    model[0].requires_grad_(False)
    wrapped(tmp_path, model, model[2].parameters(), report=said.append).close()
    assert said == [warning]


@pytest.mark.parametrize(
    "export",
    [
        lambda model: torch.jit.trace(model, INPUTS),
        torch.jit.script,
        lambda model: torch.export.export(model, (INPUTS,)),
        lambda model: torch.func.vmap(model)(INPUTS),
    ],
    ids=["trace", "script", "export", "vmap"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_exporting_the_wrapped_model_names_the_given_one(export: Any, tmp_path: Path) -> None:
    parts = wrapped(tmp_path, layers())
    with raises(ScenarioError, "training-loop.exported", r"model\.module"):
        export(parts.model)
    with torch.no_grad():
        assert torch.jit.trace(parts.model.module, INPUTS)(INPUTS).shape == (8, 3)


def test_a_model_halved_after_wrapping_is_refused(tmp_path: Path) -> None:
    parts = wrapped(tmp_path, layers())
    parts.model.half()
    with raises(ScenarioError, "training-loop.model", "float16"):
        for inputs, _ in parts.data_loader:
            parts.model(inputs.half())
    assert not list(tmp_path.iterdir())


class Two(nn.Linear):
    """A model of two outputs in a dict or a tuple."""

    named = True

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "hidden": x} if self.named else (scores, x)


@pytest.mark.parametrize(("named", "part"), [(True, r"outputs\['scores'\]"), (False, r"outputs\[0\]")])
def test_whole_outputs_are_refused_with_the_one_to_give(named: bool, part: str, tmp_path: Path) -> None:
    model = Two(5, 3)
    model.named = named
    parts = wrapped(tmp_path, model)
    with raises(ScenarioError, "training-loop.batch-of-one", part):
        for inputs, targets in parts.data_loader:
            parts.criterion(parts.model(inputs), targets)
    assert not list(tmp_path.iterdir())


def test_a_seen_gradient_takes_nothing_that_is_not_clipped(tmp_path: Path) -> None:
    """What a loop adds to a noised gradient may not come from the model by a way past private()."""

    def add_unclipped(model: nn.Module) -> None:
        parameters = list(model.parameters())
        loss = nn.functional.cross_entropy(model(INPUTS), CLASSES)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad += gradient

    with raises(RunError, "training-loop.gradient-past-clipping"):
        moved(tmp_path, add_unclipped)
