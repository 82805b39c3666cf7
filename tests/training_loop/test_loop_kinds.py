"""Training loops as people write them: each trains on the textbook's gradients, or is refused with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import ScenarioError
from flower_privdec.training_loop import ExamplePrivacy, private

N = 24  # examples
BATCH = 8

INPUTS = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(N) % 3


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def wrapped(
    tmp_path: Path, model: nn.Module, tensors: Any = (INPUTS, CLASSES), criterion: Any = None, **more: Any
) -> ExamplePrivacy:
    """Return the private parts of a loop, with so little noise that a step is the textbook's."""
    options: dict[str, Any] = {
        "ledger": tmp_path / "a.jsonl",
        "delta": 1e-3,
        "noise_multiplier": 1e-3,
        "report": str,
    } | more
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return private(model, optimizer, DataLoader(TensorDataset(*tensors), BATCH), criterion, **options)


def one_pass(parts: ExamplePrivacy) -> None:
    model, optimizer, loader, criterion = parts
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()


# --- criteria ---


def with_accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).float().mean()


def named(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": functional.cross_entropy(outputs, targets)}


def read(outputs: Tensor, targets: Tensor) -> float:
    return functional.cross_entropy(outputs, targets).item()


def forgotten(outputs: Tensor, targets: Tensor) -> None:
    functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("criterion", "names"), [(with_accuracy, "tuple"), (named, "dict"), (read, "float"), (forgotten, "NoneType")]
)
def test_a_criterion_that_returns_no_tensor_is_refused(criterion: Any, names: str, tmp_path: Path) -> None:
    with raises(ScenarioError, "loss.not-a-tensor", names):
        wrapped(tmp_path, layers(), criterion=criterion)
    assert not list(tmp_path.iterdir())

    one_pass(wrapped(tmp_path, layers(), criterion=functional.cross_entropy))


@pytest.mark.parametrize(("criterion", "names"), [("mse", "str"), (nn.CrossEntropyLoss, "class CrossEntropyLoss")])
def test_a_criterion_that_cannot_be_called_is_refused(criterion: Any, names: str, tmp_path: Path) -> None:
    with raises(ScenarioError, "training-loop.criterion", names):
        wrapped(tmp_path, layers(), criterion=criterion)
    assert not list(tmp_path.iterdir())


# --- models that cannot be copied, called or clipped ---


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))


def scripted() -> nn.Module:
    traced: nn.Module = torch.jit.trace(layers(), INPUTS)
    return traced


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize(("make", "names"), [(lazy, "lazy"), (scripted, "torch.jit")])
def test_a_model_without_parameters_of_its_own_is_refused(
    make: Callable[[], nn.Module], names: str, tmp_path: Path
) -> None:
    with raises(ScenarioError, "training-loop.model", names):
        wrapped(tmp_path, make())
    assert not list(tmp_path.iterdir())


def test_a_lazy_model_trains_after_a_first_call(tmp_path: Path) -> None:
    model = lazy()
    model(torch.zeros(1, 5))
    one_pass(wrapped(tmp_path, model))


# --- saving and copying ---


@pytest.mark.parametrize("part", ["model", "data_loader", "criterion", "parts"])
def test_private_parts_are_not_pickled(part: str, tmp_path: Path) -> None:
    parts = wrapped(tmp_path, layers())
    for save in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with raises(ScenarioError, "training-loop.not-pickled", "state_dict"):
            save(parts if part == "parts" else getattr(parts, part))


def test_what_the_error_names_saves_a_model(tmp_path: Path) -> None:
    model, optimizer, _, criterion = parts = wrapped(tmp_path, layers())
    one_pass(parts)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    whole = io.BytesIO()
    torch.save(model.module, whole)

    # Both are as if there had been no wrapping: a gradient may reach the loaded ones.
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    again = layers()
    again.load_state_dict(state["model"])
    whole.seek(0)
    for loaded in (again, torch.load(whole, weights_only=False)):
        torch.testing.assert_close(loaded(INPUTS), parts.model.module(INPUTS))
        criterion.criterion(loaded(INPUTS), CLASSES).backward()
        parts.close()
        continued = wrapped(tmp_path, loaded)
        continued.optimizer.load_state_dict(state["optimizer"])
        one_pass(continued)


def test_a_private_model_may_be_copied_and_averaged(tmp_path: Path) -> None:
    parts = wrapped(tmp_path, layers())
    average = AveragedModel(parts.model)
    one_pass(parts)
    average.update_parameters(parts.model)
    best = copy.deepcopy(parts.model)
    one_pass(parts)
    with torch.no_grad():
        assert not torch.equal(best(INPUTS), parts.model(INPUTS))
        assert average(INPUTS).shape == (N, 3)
    assert copy.copy(parts.model).module is parts.model.module


# --- rows of embeddings for padding ---


TOKENS = torch.randint(9, (N, 4), generator=torch.Generator().manual_seed(2)).sort(dim=1).values  # 0 is for padding


class Words(nn.Module):
    """A bag of words whose outputs are scores of the words themselves, by weights of its own or by the table."""

    def __init__(self, layer: type[nn.Module] = nn.Embedding, head: str = "own") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = layer(9, 4, padding_idx=0)
        self.head = nn.Linear(4, 9)
        if head == "shared":
            self.head.weight = self.table.weight
        self.by_table = head == "in forward"

    def forward(self, tokens: Tensor) -> Tensor:
        words: Tensor = self.table(tokens)
        if words.ndim == 3:
            words = words.mean(1)
        if self.by_table:
            return functional.linear(words, self.table.weight)
        scores: Tensor = self.head(words)
        return scores


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("loss_bound", [None, 2.0])
def test_a_row_for_padding_stays_as_it_was(layer: type[nn.Module], loss_bound: float | None, tmp_path: Path) -> None:
    model = Words(layer)
    before = model.table.weight.detach().clone()
    one_pass(wrapped(tmp_path, model, (TOKENS, CLASSES), noise_multiplier=1.0, loss_bound=loss_bound))
    assert torch.equal(model.table.weight[0], before[0])
    assert (model.table.weight[1:] != before[1:]).all()  # by noise, whichever words there are


def test_a_padding_row_shared_with_the_head_is_trained(tmp_path: Path) -> None:
    model = Words(head="shared")
    before = model.table.weight.detach().clone()
    one_pass(wrapped(tmp_path, model, (TOKENS, CLASSES), noise_multiplier=1.0))
    assert (model.table.weight != before).all()


def test_a_row_for_padding_used_beside_is_refused_unpaid(tmp_path: Path) -> None:
    parts = wrapped(tmp_path, Words(head="in forward"), (TOKENS, CLASSES))
    with raises(ScenarioError, "training-loop.padding", "row 0 of table.weight"):
        one_pass(parts)
    assert not list(tmp_path.iterdir())
