"""A criterion is tried before its first step is paid for: what adds up over examples is accepted, and nothing else."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from flower_privdec.common.errors import ScenarioError
from flower_privdec.models.layers.model_outputs import Output
from flower_privdec.tasks.additivity import compare
from flower_privdec.training_loop import private
from flower_privdec.training_loop.criterion_checks import CriterionTrial, usual_calls

Criterion = Callable[..., Tensor]
WEIGHTS = torch.tensor([1.0, 20.0, 1.0, 1.0, 3.0])
X = torch.zeros(1, 4)
LABEL, NUMBER, FLAG = torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.zeros(1, dtype=torch.bool)
THREE = torch.zeros(1, 3)
TOKENS = torch.zeros(1, 6, dtype=torch.int64)
IMAGE, PIXELS = torch.zeros(1, 3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.int64)


def fives() -> nn.Module:
    return nn.Linear(4, 5)


def threes() -> nn.Module:
    return nn.Linear(4, 3)


def one() -> nn.Module:
    return nn.Linear(4, 1)


def chances() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())


def log_shares() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(1))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 7))


def pixels() -> nn.Module:
    return nn.Conv2d(3, 5, 3, padding=1)


def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="none")


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = each(outputs, labels)
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return (WEIGHTS[labels] * each(outputs, labels)).mean()


def a_weight_each(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (weights * each(outputs, labels)).mean()


def hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.relu(1 - (2 * labels - 1) * outputs[:, 0]).mean()


def quantile(outputs: Tensor, numbers: Tensor) -> Tensor:
    error = numbers - outputs[:, 0]
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def language(outputs: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), tokens.flatten(), ignore_index=0)


def masked(outputs: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs.transpose(1, 2), tokens, reduction="none")
    return (losses * mask).sum() / mask.sum()


def transcribed(outputs: Tensor, tokens: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
    return functional.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), tokens, lengths, target_lengths)


def dice_of_each(outputs: Tensor, labels: Tensor) -> Tensor:
    share = torch.sigmoid(outputs)
    return (1 - (2 * (share * labels).sum(1) + 1) / (share.sum(1) + labels.sum(1) + 1)).mean()


def dropped(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.dropout(outputs, 0.5), labels)


ORDINARY: list[tuple[Callable[[], nn.Module], Tensor, Criterion, list[Tensor]]] = [
    (fives, X, nn.CrossEntropyLoss(), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(label_smoothing=0.1), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(ignore_index=2), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(weight=torch.full((5,), 7.0)), [LABEL]),
    (fives, X, nn.CrossEntropyLoss(), [torch.zeros(1, 5)]),
    (log_shares, X, nn.NLLLoss(), [LABEL]),
    (log_shares, X, nn.KLDivLoss(reduction="batchmean"), [torch.zeros(1, 5)]),
    (threes, X, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 9.0])), [THREE]),
    (chances, X, nn.BCELoss(), [THREE]),
    (threes, X, nn.MSELoss(), [THREE]),
    (threes, X, nn.HuberLoss(), [THREE]),
    (threes, X, nn.SmoothL1Loss(reduction="sum"), [THREE]),
    (threes, X, nn.CosineEmbeddingLoss(), [THREE, NUMBER]),
    (one, X, nn.PoissonNLLLoss(), [torch.zeros(1, 1)]),
    (one, X, nn.GaussianNLLLoss(), [torch.zeros(1, 1), torch.zeros(1, 1)]),
    (one, X, hinge, [LABEL]),
    (one, X, quantile, [NUMBER]),
    (fives, X, focal, [LABEL]),
    (fives, X, weighted, [LABEL]),
    (fives, X, a_weight_each, [LABEL, NUMBER]),
    (threes, X, dice_of_each, [THREE]),
    (fives, X, dropped, [LABEL]),
    (words, TOKENS, language, [TOKENS]),
    (words, TOKENS, masked, [TOKENS, TOKENS.float()]),
    (words, TOKENS, transcribed, [TOKENS[:, :3], LABEL, LABEL]),
    (pixels, IMAGE, nn.CrossEntropyLoss(ignore_index=255), [PIXELS]),
]


@pytest.mark.parametrize(("model", "x", "criterion", "targets"), ORDINARY)
def test_ordinary_losses_are_tried_and_accepted(
    model: Callable[[], nn.Module], x: Tensor, criterion: Criterion, targets: list[Tensor]
) -> None:
    assert CriterionTrial(model(), criterion).try_call([x], {}, [Output(), *targets])


def divided(outputs: Tensor, labels: Tensor) -> Tensor:
    weights = WEIGHTS[labels]
    return (weights * each(outputs, labels)).sum() / weights.sum()


def weights_divided(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (weights * each(outputs, labels)).sum() / weights.sum()


class Wrapped(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels, weight=WEIGHTS, label_smoothing=0.1)


def cox(outputs: Tensor, times: Tensor, events: Tensor) -> Tensor:
    order = times.argsort(descending=True)
    hazards = outputs[order, 0]
    return -((hazards - hazards.logcumsumexp(0)) * events[order]).sum() / events.sum().clamp(min=1)


def pearson(outputs: Tensor, numbers: Tensor) -> Tensor:
    one, other = outputs[:, 0] - outputs[:, 0].mean(), numbers - numbers.mean()
    return 1 - (one * other).sum() / (one.norm() * other.norm())


def contrast(outputs: Tensor, _labels: Tensor) -> Tensor:
    points = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(points @ points.T / 0.1, torch.arange(len(outputs)))


def misses(outputs: Tensor, numbers: Tensor) -> Tensor:
    return ((outputs[:, 0] > 0) != (numbers > 0)).float().mean()


def ranking(outputs: Tensor, labels: Tensor) -> Tensor:
    pairs = (labels[:, None] > labels[None]).float()
    gaps = outputs[:, 0][:, None] - outputs[:, 0][None]
    return (functional.softplus(-gaps) * pairs).sum() / pairs.sum().clamp(min=1)


def dice(outputs: Tensor, labels: Tensor) -> Tensor:
    share = torch.sigmoid(outputs)
    return 1 - (2 * (share * labels).sum() + 1) / (share.sum() + labels.sum() + 1)


def root(outputs: Tensor, numbers: Tensor) -> Tensor:
    return functional.mse_loss(outputs, numbers).sqrt()


def worst(outputs: Tensor, labels: Tensor) -> Tensor:
    return each(outputs, labels).max()


def hardest(outputs: Tensor, labels: Tensor) -> Tensor:
    return each(outputs, labels).topk(max(1, len(outputs) // 2)).values.mean()


def centred(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs - outputs.detach().mean(0) / 2, labels)


def balanced(outputs: Tensor, labels: Tensor) -> Tensor:
    share = labels.mean().clamp(0.01, 0.99)
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], labels, pos_weight=(1 - share) / share)


def diverse(outputs: Tensor, labels: Tensor) -> Tensor:
    share = outputs.softmax(1).mean(0)
    return functional.cross_entropy(outputs, labels) + (share * share.log()).sum()


def rare_values(outputs: Tensor, numbers: Tensor) -> Tensor:
    weights = 1 + 99 * (numbers.abs() > 30).float()
    return (weights * (outputs[:, 0] - numbers).square()).sum() / weights.sum()


def rare(classes: int) -> nn.Module:
    weights = torch.ones(classes)
    weights[classes * 7 // 9] = 20
    return nn.CrossEntropyLoss(weight=weights)


OTHERS: list[tuple[Callable[[], nn.Module], Tensor, Criterion, list[Tensor], str]] = [
    (fives, X, nn.CrossEntropyLoss(weight=WEIGHTS), [LABEL], "loss.not-additive"),
    (log_shares, X, nn.NLLLoss(weight=WEIGHTS), [LABEL], "loss.not-additive"),
    (pixels, IMAGE, nn.CrossEntropyLoss(weight=WEIGHTS), [PIXELS], "loss.not-additive"),
    (lambda: nn.Linear(4, 1000), X, rare(1000), [LABEL], "loss.not-additive"),
    (fives, X, Wrapped(), [LABEL], "loss.not-additive"),
    (fives, X, divided, [LABEL], "loss.not-additive"),
    (fives, X, weights_divided, [LABEL, NUMBER], "loss.not-additive"),
    (threes, X, dice, [THREE], "loss.not-additive"),
    (threes, X, root, [THREE], "loss.not-additive"),
    (fives, X, worst, [LABEL], "loss.not-additive"),
    (fives, X, hardest, [LABEL], "loss.not-additive"),
    (fives, X, centred, [LABEL], "loss.not-additive"),
    (one, X, balanced, [NUMBER], "loss.not-additive"),
    (fives, X, diverse, [LABEL], "loss.not-additive"),
    (one, X, nn.MSELoss(), [NUMBER], "loss.not-additive"),  # [n, 1] beside [n] is every pair
    (one, X, rare_values, [NUMBER], "loss.not-additive"),
    (one, X, rare_values, [LABEL], "loss.not-additive"),  # of counts
    (one, X, cox, [NUMBER, FLAG], "loss.no-gradient"),
    (one, X, cox, [NUMBER, NUMBER], "loss.no-gradient"),
    (one, X, pearson, [NUMBER], "loss.no-gradient"),
    (fives, X, contrast, [LABEL], "loss.no-gradient"),
    (one, X, misses, [NUMBER], "loss.no-gradient"),
    (one, X, ranking, [LABEL], "loss.no-gradient"),
]


@pytest.mark.parametrize(("model", "x", "criterion", "targets", "code"), OTHERS)
def test_losses_of_a_batch_are_refused(
    model: Callable[[], nn.Module], x: Tensor, criterion: Criterion, targets: list[Tensor], code: str
) -> None:
    with raises(ScenarioError, code) as caught:
        CriterionTrial(model(), criterion).try_call([x], {}, [Output(), *targets])
    assert "\n" not in str(caught.value)


class Remembering:
    """A loss over a running mean of the losses before it, kept in a number, a tensor or a list."""

    def __init__(self, kept: Any) -> None:
        self.kept = [kept]

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs, labels)
        before = self.kept[-1]
        self.kept.append(float(loss) if isinstance(before, float) else loss.detach())
        return loss * (1.0 if before < 5 else -1.0)


def remembering() -> Criterion:
    inside = Remembering(1.0)
    return lambda outputs, labels: inside(outputs, labels) / inside.kept[-2]


class Locked(Remembering):
    """An object that cannot be copied."""

    def __init__(self, kept: Any) -> None:
        super().__init__(kept)
        self.lock = threading.Lock()


def test_a_function_that_remembers_other_examples_is_refused() -> None:
    with raises(ScenarioError, "loss.remembers"):
        CriterionTrial(fives(), remembering()).try_call([X], {}, [Output(), LABEL])


def with_parameters(kind: str) -> Criterion:
    """Return a criterion that computes with parameters which no private step would move."""
    model, scale = fives(), nn.Parameter(torch.ones(()))

    def penalty(outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def consistency(outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels) + (outputs - model(X[: len(outputs)])).square().mean()

    def scaled(outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs * scale, labels)

    return {"penalty": penalty, "consistency": consistency, "scaled": scaled}[kind]


@pytest.mark.parametrize("kind", ["penalty", "consistency", "scaled"])
def test_a_criterion_with_parameters_is_refused(kind: str) -> None:
    with raises(ScenarioError, "loss.parameters"):
        CriterionTrial(fives(), with_parameters(kind)).try_call([X], {}, [Output(), LABEL])


def test_a_teacher_without_gradient_may_be_asked() -> None:
    teacher = fives().requires_grad_(False)

    def distilled(outputs: Tensor, labels: Tensor) -> Tensor:
        taught = teacher(X[: len(outputs)])[:1].softmax(1).expand(len(outputs), -1)
        return functional.cross_entropy(outputs, labels) + functional.cross_entropy(outputs, taught)

    assert CriterionTrial(fives(), distilled).try_call([X], {}, [Output(), LABEL])


def test_an_object_uncopyable_per_example_is_refused() -> None:
    with raises(ScenarioError, "loss.not-copied"):
        CriterionTrial(fives(), Locked(1.0))


def test_a_criterions_memory_of_one_example_reaches_no_other(tmp_path: Path) -> None:
    """One example with a loss of 1e6 would turn the gradients of all that come after it."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) / 10
    y = torch.arange(50) % 5
    releases = []
    for place, first in enumerate((0.0, 1e6)):
        torch.manual_seed(1)
        data = x.clone()
        data[0] = first
        model = fives()
        parts = private(
            model,
            torch.optim.SGD(model.parameters(), 1.0),
            DataLoader(TensorDataset(data, y), 50),
            Remembering(1.0),
            ledger=tmp_path / f"{place}.jsonl",
            delta=1e-5,
            noise_multiplier=1e-9,
        )
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        for features, labels in parts.data_loader:
            parts.optimizer.zero_grad()
            parts.criterion(parts.model(features), labels).backward()
            parts.optimizer.step()
        releases.append(50 * (before - nn.utils.parameters_to_vector(model.parameters()).detach()))
    assert float((releases[0] - releases[1]).norm()) < 2.001  # C for each of the two


REDUCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # of losses and weights; whether they add up
    "mean": (lambda losses, _: losses.mean(), True),
    "sum": (lambda losses, _: losses.sum(), True),
    "none": (lambda losses, _: losses, True),
    "sum over a constant": (lambda losses, _: losses.sum() / 32, True),
    "weights multiply": (lambda losses, weights: (weights * losses).mean(), True),
    "weights divide": (lambda losses, weights: (weights * losses).sum() / weights.sum(), False),
    "root": (lambda losses, _: losses.mean().sqrt(), False),
    "soft maximum": (lambda losses, _: losses.logsumexp(0), False),
    "square": (lambda losses, _: losses.sum().square(), False),
    "spread": (lambda losses, _: losses.mean() + (losses - losses.mean()).abs().mean(), False),
}
POSITIVE = st.floats(0.1, 10)


@settings(max_examples=20)
@given(
    reduction=st.sampled_from(list(REDUCTIONS)),
    parts=st.tuples(POSITIVE, POSITIVE, POSITIVE),
    weights=st.lists(POSITIVE, min_size=3, max_size=3),
    factor=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_a_criterion_is_accepted_exactly_if_it_adds_up(
    reduction: str, parts: tuple[float, float, float], weights: list[float], factor: float
) -> None:
    reduce, adds_up = REDUCTIONS[reduction]
    table = torch.tensor(weights)

    def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
        hot = functional.one_hot(labels, 3).to(outputs.dtype)
        losses = parts[0] * each(outputs, labels) + parts[1] * outputs.square().mean(1)
        losses = losses + parts[2] * (outputs - hot).abs().sum(1)
        return factor * reduce(losses, table[labels])

    if reduction == "weights divide":
        adds_up = max(weights) - min(weights) < 1e-3 * max(weights)
        if not adds_up and max(weights) - min(weights) < 1e-2 * max(weights):
            return  # too near to be told
    trial = CriterionTrial(nn.Linear(4, 3), criterion)
    if adds_up:
        assert trial.try_call([X], {}, [Output(), LABEL])
        return
    with raises(ScenarioError, "loss.not-additive"):
        trial.try_call([X], {}, [Output(), LABEL])


def test_gradients_are_compared_by_direction_and_by_factor() -> None:
    alone = torch.tensor([[1.0, 2.0], [0.0, 1.0], [0.0, 0.0]])
    assert compare(alone, alone / 3, 1e-3) == (False, False)
    assert compare(alone, alone * torch.tensor([[1.0], [2.0], [1.0]]), 1e-3) == (False, True)
    assert compare(alone, alone + torch.tensor([[0.1, 0.0], [0.0, 0.0], [0.0, 0.0]]), 1e-3) == (True, False)
    assert compare(alone, alone + torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.1]]), 1e-3) == (True, False)
    assert compare(alone, alone * torch.nan, 1e-3) == (True, False)
    assert compare(alone * 1e-30, alone * 1e30, 1e-3) == (False, False)


# --- in a loop ---


def wrapped(tmp_path: Path, criterion: Criterion, loader: Any = None, model: nn.Module | None = None) -> Any:
    if loader is None:
        loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40) % 5), batch_size=10)
    model = fives() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"ledger": tmp_path / "a.jsonl", "delta": 1e-3, "noise_multiplier": 1.0}
    return private(model, optimizer, loader, criterion, report=lambda line: None, **options)


def test_a_refused_criterion_leaves_no_ledger(tmp_path: Path) -> None:
    for criterion in (divided, contrast):
        with raises(ScenarioError, "loss.no-gradient" if criterion is contrast else "loss.not-additive"):
            wrapped(tmp_path, criterion)
    rows = [{"img": torch.rand(4), "label": number % 5} for number in range(40)]
    with raises(ScenarioError, "loss.not-additive", names="reduction='sum'"):
        wrapped(tmp_path, divided, DataLoader(rows, batch_size=10))  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_numeric_tensors_are_refused_before_a_ledger(value: float, tmp_path: Path) -> None:
    x, y = torch.randn(40, 4), torch.arange(40) % 5
    x[7, 1] = value
    data = TensorDataset(x, y)
    for dataset in (data, Subset(data, range(30)), ConcatDataset([data])):
        with raises(ScenarioError, "training-loop.not-finite") as caught:
            wrapped(tmp_path, nn.CrossEntropyLoss(), DataLoader(dataset, batch_size=10))
        assert "7" not in str(caught.value)
    assert not any(tmp_path.iterdir())
    others = Subset(Subset(data, range(5, 40)), [index for index in range(35) if index != 2])
    wrapped(tmp_path, nn.CrossEntropyLoss(), DataLoader(others, batch_size=10))


def test_unusual_use_of_a_criterion_is_tried_first(tmp_path: Path) -> None:
    def summed(outputs: Tensor, labels: Tensor, *more: Tensor) -> Tensor:
        return divided(outputs, labels) if more else functional.cross_entropy(outputs, labels)

    net, _, loader, criterion = wrapped(tmp_path, summed)
    before = net.weight.detach().clone()
    x, y = next(iter(loader))
    with raises(ScenarioError, "loss.not-additive"):
        criterion(net(x), y, y)
    assert torch.equal(net.weight, before)
    assert not any(tmp_path.iterdir())  # the first batch is paid for when its noise is added


def test_a_trial_sees_no_private_number(tmp_path: Path) -> None:
    seen = []

    def criterion(outputs: Tensor, numbers: Tensor) -> Tensor:
        seen.append(float(numbers.max()))
        return functional.mse_loss(outputs[:, 0], numbers)

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(x.max()))
            return super().forward(x) + torch.randn(())

    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            noise = random.random() + float(np.random.random()) + float(torch.rand(()))  # noqa: NPY002
            return tuple(tensor[index] + noise for tensor in self.tensors)

    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002

    def begin() -> None:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)

    data = Augmented(torch.full((40, 4), 1234.5), torch.full((40,), 1234.5))
    model = Watching(4, 1)
    begin()
    expected = drawn()
    begin()
    wrapped(tmp_path, criterion, DataLoader(data, batch_size=10), model)
    assert drawn() == expected
    assert len(seen) > 10
    assert max(seen) < 1000


def test_a_mean_over_positions_that_count_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CriterionTrial(words(), masked).try_call([TOKENS], {}, [Output(), TOKENS, TOKENS])
    assert "masked" in caplog.text

    def constant(outputs: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        return masked(outputs, tokens, mask) * mask.sum() / 6

    caplog.clear()
    assert CriterionTrial(words(), constant).try_call([TOKENS], {}, [Output(), TOKENS, TOKENS])
    assert not caplog.text


class Named(nn.Module):
    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return image * mask


class AnyNames(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["a"]


@pytest.mark.parametrize(
    ("batch", "model", "expected"),
    [
        ((1, 2), fives(), ([1], {}, [2])),
        ([1, 2, 3], fives(), ([1], {}, [2, 3])),
        ([1, 2, 3], fives(), ([1, 2], {}, [3])),
        ([1, 2], fives(), ([1], {}, [1])),
        ([{"image": 1, "mask": 2}, 3], Named(), ([], {"image": 1, "mask": 2}, [3])),
        ({"img": 1, "label": 2}, fives(), ([1], {}, [2])),
        ({"image": 1, "mask": 2, "y": 3}, Named(), ([], {"image": 1, "mask": 2}, [3])),
        (X, fives(), ([X], {}, [X])),
        ([X], fives(), ([X], {}, [X])),
        ({"a": 1, "b": 2, "labels": 3}, AnyNames(), ([], {"a": 1, "b": 2}, [3])),
    ],
)
def test_usual_ways_to_call_are_known(batch: Any, model: nn.Module, expected: Any) -> None:
    assert expected in [call[:3] for call in usual_calls(batch, model)]


def doses() -> Any:
    return [{"x": torch.rand(4), "dose": torch.rand(1), "age": torch.rand(())} for _ in range(40)]


def test_usual_changes_to_a_batch_are_not_refused(tmp_path: Path) -> None:
    """Outputs [n, 1] beside targets [n] do not add up, and many loops give the targets another axis."""
    x, y = torch.rand(40, 4), torch.rand(40)
    for number, (data, column) in enumerate(((doses(), "dose"), (TensorDataset(x, y), 1))):
        folder = tmp_path / str(number)
        parts = wrapped(folder, nn.MSELoss(), DataLoader(data, batch_size=10), one())
        batch = next(iter(parts.data_loader))
        inputs = batch["x" if column == "dose" else 0]
        parts.criterion(parts.model(inputs), batch[column].reshape(-1, 1))
        with raises(ScenarioError, "loss.not-additive"):
            parts.criterion(parts.model(inputs), batch[column].reshape(-1))


def test_an_autoencoder_is_tried_as_the_loop_calls(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    parts = wrapped(tmp_path, nn.MSELoss(), model=model)
    x, _ = next(iter(parts.data_loader))
    parts.criterion(parts.model(x), x)
