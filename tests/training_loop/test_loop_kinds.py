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
from torch.nn.utils import parameters_to_vector, prune
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.training_loop import ExamplePrivacy, private

N = 24  # examples
BATCH = 8

INPUTS = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(N) % 3


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def wrapped(
    tmp_path: Path,
    model: nn.Module,
    tensors: Any = (INPUTS, CLASSES),
    criterion: Any = None,
    batch_size: int = BATCH,
    **more: Any,
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
    return private(model, optimizer, DataLoader(TensorDataset(*tensors), batch_size), criterion, **options)


def one_pass(parts: ExamplePrivacy) -> None:
    model, optimizer, loader, criterion = parts
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()


# --- kinds that train on the textbook's gradients ---


class Heads(nn.Module):
    """A model of two outputs, in a tuple or a dict; the second may be without the mean of its batch."""

    def __init__(self, *, named: bool = False, mixing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(5, 4)
        self.classes = nn.Linear(4, 3)
        self.number = nn.Linear(4, 1)
        self.named = named
        self.mixing = mixing

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        classes, number = self.classes(hidden), functional.softplus(self.number(hidden))
        if self.mixing:
            number = number - number.mean(0) + 1
        return {"classes": classes, "number": number} if self.named else (classes, number)


class Parts(nn.Module):
    """A model that takes all parts of an example in one call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(5, 3)

    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.body(part) for part in parts)


class Packed(nn.Module):
    """A recurrent model over texts of several lengths."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.recurrent = kind(4, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        state = self.recurrent(packed)[1]
        hidden = state[0] if isinstance(state, tuple) else state
        scores: Tensor = self.head(hidden[-1])
        return scores


def both(outputs: Any, classes: Tensor, number: Tensor) -> Tensor:
    parts = tuple(outputs.values()) if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(parts[0], classes) + functional.mse_loss(parts[1], number)


def apart(classes: Tensor, number: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    return both((classes, number), labels, target)


def multiplied(classes: Tensor, number: Tensor, labels: Tensor) -> Tensor:
    return (functional.cross_entropy(classes, labels, reduction="none") * number.squeeze(1)).mean()


def whole(model: Any, criterion: Any, x: Tensor, *targets: Tensor) -> Tensor:
    loss: Tensor = criterion(model(x), *targets)
    return loss


def two_arguments(model: Any, criterion: Any, x: Tensor, *targets: Tensor) -> Tensor:
    loss: Tensor = criterion(*model(x), *targets)
    return loss


def variance_last(model: Any, criterion: Any, x: Tensor, target: Tensor) -> Tensor:
    mean, variance = model(x)
    loss: Tensor = criterion(mean, target, variance)
    return loss


def by_name(model: Any, criterion: Any, x: Tensor, classes: Tensor) -> Tensor:
    loss: Tensor = criterion(target=classes, input=model(x))
    return loss


def all_parts(model: Any, criterion: Any, *parts: Tensor) -> Tensor:
    loss: Tensor = criterion(*model(*parts))
    return loss


def with_lengths(model: Any, criterion: Any, tokens: Tensor, lengths: Tensor, classes: Tensor) -> Tensor:
    loss: Tensor = criterion(model(tokens, lengths), classes)
    return loss


class Sounds(nn.Module):
    """Log-chances of five symbols, of which 0 is the blank, at each of ten times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(3, 5)

    def forward(self, sounds: Tensor) -> Tensor:
        return self.layer(sounds).log_softmax(-1)


def ctc(outputs: Tensor, symbols: Tensor, times: Tensor, lengths: Tensor) -> Tensor:
    return functional.ctc_loss(outputs.transpose(0, 1), symbols, times, lengths)


def volumes() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv3d(2, 3, 2), nn.InstanceNorm3d(3, affine=True), nn.Flatten(), nn.Linear(81, 3))


class Mask(nn.Module):
    """What a pruned layer keeps of its weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (torch.arange(weight.numel()) % 2).view_as(weight)


def masked() -> nn.Module:
    model = layers()
    register_parametrization(model[0], "weight", Mask())
    return model


def weighted(outputs: Tensor, classes: Tensor, weights: Tensor) -> Tensor:
    return (weights * functional.cross_entropy(outputs, classes, reduction="none")).mean()


NUMBERS = INPUTS[:, :1] * 2
IMAGES = torch.randn(N, 2, 4, 4, 4, generator=torch.Generator().manual_seed(6))
WORDS = torch.randint(1, 9, (N, 4), generator=torch.Generator().manual_seed(2))
LENGTHS = torch.arange(N) % 4 + 1
SOUNDS = torch.randn(N, 10, 3, generator=torch.Generator().manual_seed(7))
LABELLED = (INPUTS, CLASSES)
HEADED = (INPUTS, CLASSES, NUMBERS)
TRIPLES = (INPUTS, INPUTS.flip(0), INPUTS.roll(1, 0))
ENTROPY = nn.CrossEntropyLoss()

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Any, Any]] = {
    "outputs in a tuple": (Heads, HEADED, both, whole),
    "outputs in a dict": (lambda: Heads(named=True), HEADED, both, whole),
    "outputs apart": (Heads, HEADED, apart, two_arguments),
    "outputs that mix": (lambda: Heads(mixing=True), LABELLED, multiplied, two_arguments),
    "mean and variance": (Heads, (INPUTS, INPUTS[:, :3]), nn.GaussianNLLLoss(), variance_last),
    "arguments by name": (layers, LABELLED, ENTROPY, by_name),
    "triplets": (Parts, TRIPLES, nn.TripletMarginLoss(), all_parts),
    "packed lstm": (lambda: Packed(nn.LSTM), (WORDS, LENGTHS, CLASSES), ENTROPY, with_lengths),
    "packed gru": (lambda: Packed(nn.GRU), (WORDS, LENGTHS, CLASSES), ENTROPY, with_lengths),
    "spoken words": (Sounds, (SOUNDS, WORDS[:, :3] % 4 + 1, LENGTHS + 6, LENGTHS.clamp(max=3)), ctc, whole),
    "volumes": (volumes, (IMAGES, CLASSES), ENTROPY, whole),
    "weights of examples": (layers, (INPUTS, CLASSES, INPUTS[:, 0].abs()), weighted, whole),
    "masked weights": (masked, LABELLED, ENTROPY, whole),
    "smoothed labels": (layers, LABELLED, nn.CrossEntropyLoss(label_smoothing=0.1), whole),
    "a loss for each": (layers, LABELLED, nn.CrossEntropyLoss(reduction="none"), whole),
}


def textbook(kind: str) -> Tensor:
    """Return the mean of all examples' clipped gradients, each by one backward pass of torch on a new model."""
    make, tensors, criterion, loss_of = KINDS[kind]
    total: Any = 0.0
    for row in range(N):
        model = make()
        loss_of(model, criterion, *(tensor[row : row + 1] for tensor in tensors)).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        total = total + gradient / max(1.0, gradient.norm().item())
    mean: Tensor = total / N
    return mean


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_textbooks(kind: str, tmp_path: Path) -> None:
    make, tensors, criterion, loss_of = KINDS[kind]
    model = make()
    before = parameters_to_vector(model.parameters()).detach()
    parts = wrapped(tmp_path, model, tensors, criterion, batch_size=N)
    for batch in parts.data_loader:
        loss_of(parts.model, parts.criterion, *batch).backward()
        parts.optimizer.step()
    moved = (before - parameters_to_vector(model.parameters()).detach()) / 0.1
    torch.testing.assert_close(moved, textbook(kind), rtol=1e-3, atol=5e-4)


def test_a_spectral_norm_follows_noised_weights(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = spectral_norm(nn.Linear(5, 3))
    parts = wrapped(tmp_path, model, noise_multiplier=50.0)
    for _ in range(4):
        one_pass(parts)
        parts.optimizer.param_groups[0]["lr"] /= 4
    for _ in range(4):  # of which each call follows the weights, once they are still
        parts.optimizer.param_groups[0]["lr"] = 0.0
        one_pass(parts)
    model.eval()
    assert float(torch.linalg.matrix_norm(model.weight, 2)) == pytest.approx(1, abs=0.02)


def test_targets_without_an_axis_are_refused_with_the_remedy(tmp_path: Path) -> None:
    numbers = NUMBERS.squeeze(1)
    with raises(ScenarioError, "loss.not-additive", r"targets\[:, None\]"):
        one_pass(wrapped(tmp_path, nn.Linear(5, 1), (INPUTS, numbers), nn.MSELoss()))
    assert not list(tmp_path.iterdir())
    one_pass(wrapped(tmp_path, nn.Linear(5, 1), (INPUTS, numbers[:, None]), nn.MSELoss()))
    one_pass(wrapped(tmp_path, nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), (INPUTS, numbers), nn.MSELoss()))


def test_a_pruned_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = layers()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with raises(ScenarioError, "training-loop.model", "pruned"):
        wrapped(tmp_path, model)


def test_outputs_of_several_calls_are_refused_unpaid(tmp_path: Path) -> None:
    model, _, loader, criterion = wrapped(tmp_path, Parts(), TRIPLES, nn.TripletMarginLoss())
    with raises(RunError, "training-loop.several-calls"):
        for parts in loader:
            criterion(*(model(part)[0] for part in parts))
    assert not list(tmp_path.iterdir())


def test_what_was_computed_of_outputs_is_no_target(tmp_path: Path) -> None:
    model, _, loader, criterion = wrapped(tmp_path, Heads(), HEADED, apart)
    with raises(RunError, "training-loop.gradient-past-clipping"):
        for x, classes, _ in loader:
            outputs, number = model(x)
            criterion(outputs, number, classes, number * 2)
    assert not list(tmp_path.iterdir())


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
