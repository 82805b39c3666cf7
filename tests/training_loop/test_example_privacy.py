"""Example-level privacy of a user's own training loop: clipping, noise, sampling, the ledger, and what is refused."""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from command_line import forked, status_of
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.gradients.protocol import LARGEST
from flower_privdec.models.layers.model_outputs import Output
from flower_privdec.privacy.ledger import ledger as ledger_module
from flower_privdec.privacy.noise import ExactNoise
from flower_privdec.training_loop import ExamplePrivacy, group_norm, private
from flower_privdec.training_loop.clipped_sum import ClippedSum
from flower_privdec.training_loop.private_loop import NoisedSteps

CLIP = 0.7
N = 6  # examples of a batch


# --- models of many kinds ---


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Tied(nn.Module):
    """Weights that stand in two places, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(torch.tanh(self.inner(self.words(x).mean(1)))))


class ByHand(nn.Module):
    """Parameters that no layer owns, and a nested one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.randn(2))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.frozen(embedding(x, self.table).sum(1)), self.weight) * self.scale


class Mixing(nn.Module):
    """What takes the mean of a batch away, which BatchNorm is not the only one to do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return y - y.mean(0) + y[0]


class Remembering(nn.Module):
    """What keeps something of each batch in the model, for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(5, 3), 0
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.head(x + self.mean) * self.seen


class Doubling(torch.autograd.Function):
    """A function of a user's own, with the rule for many examples left to torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.head(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[1].register_forward_hook(lambda module, inputs, output: output - output.mean(0) / 2)
    model[1].register_full_backward_hook(lambda module, before, after: (1e3 * before[0],))
    return model


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: dict[str, Tensor], *, scale: float = 1.0) -> Tensor:
        return self.head(inputs["left"] - inputs["right"]) * scale


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(5, 4), layer, nn.Flatten(), nn.Linear(12, 3))


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Conv2d(4, 4, 2, stride=2), nn.LayerNorm([4, 1, 1]), nn.Flatten(), nn.Linear(4, 3))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)), (5,)),
    "conv": (convolutions, (2, 4, 4)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3), nn.Flatten(), nn.Linear(9, 3)), (2, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM), (3, 5)),
    "gru": (lambda: Recurrent(nn.GRU), (3, 5)),
    "attention": (attention, (3, 5)),
    "tied": (Tied, (-3,)),
    "by hand": (ByHand, (-3,)),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)), (-3,)),
    "sparse": (lambda: nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3)), (-3,)),
    "own function": (Own, (5,)),
    "checkpointed": (Checkpointed, (5,)),
    "hooked": (hooked, (5,)),
    "normed": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), (5,)),
    "mixing": (Mixing, (5,)),
    "remembering": (Remembering, (5,)),
}


def batch(shape: tuple[int, ...], seed: int = 0, count: int = N) -> tuple[Tensor, Tensor]:
    """Return inputs and classes; a negative shape is of tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = (count, *map(abs, shape))
    x = torch.randint(7, size, generator=generator) if shape[0] < 0 else torch.randn(size, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def made(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    factory, shape = KINDS[kind]
    torch.manual_seed(5)
    return factory(), shape


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def clipped(model: nn.Module, x: Tensor, y: Tensor, criterion: Any = cross_entropy, **options: Any) -> Tensor:
    total, examples = ClippedSum(model, trained(model), criterion, CLIP, **options)([x], {}, [Output(), y])
    assert examples == len(x)
    return total


def textbook(kind: str, x: Tensor, y: Tensor, criterion: Any = cross_entropy) -> Tensor:
    """Return the sum of clipped gradients by one backward pass for each example, on a new model."""
    total: Any = 0.0
    for i in range(len(x)):
        model, _ = made(kind)
        model.zero_grad()
        criterion(model(x[i : i + 1]), y[i : i + 1]).backward()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained(model).values()]
        row = torch.cat([part.flatten() for part in parts])
        if math.isfinite(row.norm().item()) and row.norm() <= LARGEST[row.dtype]:
            total = total + row * min(1.0, CLIP / max(row.norm().item(), 1e-30))
    return total


# --- the law of sensitivity ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["auto", "loop"])
def test_the_sum_is_the_textbooks(kind: str, way: str) -> None:
    model, shape = made(kind)
    x, y = batch(shape)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.testing.assert_close(clipped(model, x, y, way=way), textbook(kind, x, y), rtol=2e-4, atol=2e-5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert getattr(model, "seen", 0) == 0


@pytest.mark.parametrize("kind", ["conv", "lstm", "tied", "by hand", "own function", "mixing"])
def test_most_models_are_called_on_many_examples(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, shape = made(kind)
    x, y = batch(shape)
    torch.testing.assert_close(clipped(model, x, y), clipped(model, x, y, way="vmap"))
    assert caplog.text == ""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(
    st.integers(0, N - 1),
    st.integers(0, 99),
    st.sampled_from([1.0, 0.0, 1e25, 1e38, -1e-30, math.nan, math.inf]),
)
def test_one_example_moves_the_sum_within_the_clip_norm(kind: str, who: int, seed: int, size: float) -> None:
    model, shape = made(kind)
    x, y = batch(shape, seed)
    if x.is_floating_point():
        x[who] *= size
    others = torch.arange(N) != who
    moved = clipped(model, x, y) - clipped(model, x[others], y[others])
    assert torch.isfinite(moved).all()
    assert moved.norm() <= CLIP * (1 + 1e-5)
    assert clipped(model, x[[who]], y[[who]]).norm() <= CLIP


@pytest.mark.parametrize("scale", [0.0, 1e25, math.nan, math.inf])
def test_a_huge_zero_or_nan_loss_counts_no_more(scale: float) -> None:
    model, shape = made("linear")
    x, y = batch(shape)

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * torch.where(targets.max() == 1, scale, 1.0)

    good = y != 1
    total = clipped(model, x, y, broken)
    assert torch.isfinite(total).all()
    rest = clipped(model, x[good], y[good])
    assert (total - rest).norm() <= CLIP * (~good).sum() * (1 + 1e-5)
    if not math.isfinite(scale) or scale == 0:
        torch.testing.assert_close(total, rest)


@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_a_criterion_that_mixes_examples_sees_one(way: str) -> None:
    model, shape = made("linear")
    x, y = batch(shape)

    def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs - outputs.mean() + outputs[0], targets) * len(outputs) * targets.sum()

    torch.testing.assert_close(clipped(model, x, y, contrast, way=way), textbook("linear", x, y, contrast))


def test_a_criterion_keeps_nothing_between_batches(tmp_path: Path) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            loss = cross_entropy(outputs - self.center, targets)
            self.center = 0.5 * self.center + outputs.detach().mean(0)
            return loss

    centred = Centred()
    loop(setup(tmp_path, criterion=centred, way="loop", reserve=9))
    assert not centred.center.any()


def test_a_function_using_all_examples_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Whole(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
            return x - x.mean(0), 0

    class Using(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return Whole.apply(self.head(x))

    model, (x, y) = Using(), batch((5,))
    plain = clipped(nn.Sequential(model.head), x, y)
    torch.testing.assert_close(clipped(model, x, y), plain)
    assert "one example after the other" in caplog.text
    with raises(ScenarioError, "training-loop.batch-of-one"):
        clipped(model, x, y, way="vmap")


def test_a_sum_in_small_pieces_is_the_same() -> None:
    model, shape = made("conv")
    x, y = batch(shape)
    torch.testing.assert_close(clipped(model, x, y, memory_bytes=1), clipped(model, x, y))


def test_inputs_by_name_and_nested() -> None:
    torch.manual_seed(0)
    model, (x, y) = Named(), batch((5,))
    pair = {"left": x, "right": x.flip(1)}
    one, _ = ClippedSum(model, trained(model), cross_entropy, CLIP)([], {"inputs": pair, "scale": 1.0}, [Output(), y])
    torch.testing.assert_close(one, clipped(nn.Sequential(model.head), x - x.flip(1), y))


# --- the loop ---


def data(count: int = 40) -> Dataset[Any]:
    return TensorDataset(*batch((5,), 3, count))


def setup(
    tmp_path: Path, model: nn.Module | None = None, loader: Any = None, criterion: Any = None, **options: Any
) -> ExamplePrivacy:
    torch.manual_seed(1)
    model = made("linear")[0] if model is None else model
    options = {"ledger": tmp_path / "a.jsonl", "delta": 1e-3, "noise_multiplier": 1.0, "report": _silent} | options
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=10) if loader is None else loader
    return private(model, optimizer, loader, nn.CrossEntropyLoss() if criterion is None else criterion, **options)


def _silent(line: str) -> None:
    pass


def loop(parts: ExamplePrivacy, most: int = 10**9) -> int:
    """Train for one pass as anybody would, and return the number of batches that were seen."""
    net, optimizer, loader, criterion = parts
    seen = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        seen += 1
        if seen == most:
            break
    return seen


class Counting:
    """Noise that is 2 everywhere, in standard deviations; keeps how it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def add_(self, out: Tensor, std: Tensor, step: int, peers: Any, *rest: Any) -> None:
        self.calls.append((float(std), step))
        out += 2 * std[:, None]


def test_the_gradient_is_the_noised_mean() -> None:
    model, shape = made("linear")
    x, y = batch(shape)
    optimizer, noise = torch.optim.SGD(model.parameters(), lr=1.0), Counting()
    steps = NoisedSteps(optimizer, trained(model), noise, clip_norm=CLIP, noise_multiplier=3.0, expected_batch=10)
    before = torch.cat([each.detach().flatten() for each in model.parameters()])
    total = clipped(model, x, y)
    steps.draw(N, 17)
    steps.arrive(total, N, steps.drawn)
    optimizer.step()
    after = torch.cat([each.detach().flatten() for each in model.parameters()])
    assert noise.calls == [(pytest.approx(3.0 * CLIP), 17)]
    torch.testing.assert_close(before - after, (total + 2 * 3.0 * CLIP) / 10, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, 0.05),
        lambda p: torch.optim.AdamW(p, 0.05, foreach=True),
        lambda p: torch.optim.RMSprop(p, 0.01),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "adagrad"],
)
def test_any_optimizer_takes_its_own_step_on_that_gradient(make: Any, tmp_path: Path) -> None:
    parts = setup(tmp_path, model := made("linear")[0], optimizer=make(model.parameters()), reserve=50)
    twin = made("linear")[0]
    other = make(twin.parameters())

    def follow(*_: Any) -> None:
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        other.step()

    parts.optimizer.register_step_post_hook(follow)
    loop(parts)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_noise_is_gaussian_and_never_repeats(tmp_path: Path) -> None:
    model = nn.Linear(5, 4000)
    parts = setup(tmp_path, model, noise_multiplier=2.0, clip_norm=0.5)
    drawn = []
    parts.optimizer.register_step_post_hook(lambda *_: drawn.append(model.weight.grad.flatten() * 10 / (2.0 * 0.5)))
    for _, _ in parts.data_loader:
        parts.model(torch.zeros(1, 5))  # no batch of the loader's: nobody is in this step
        parts.optimizer._flower_privdec_steps.drawn.size = 0
        parts.optimizer.step()
    rows = torch.stack(drawn)
    assert rows.std(1) == pytest.approx(1.0, abs=0.04)
    assert rows.mean(1) == pytest.approx(0.0, abs=0.04)
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.04
    assert (rows.abs() > 1.96).double().mean() == pytest.approx(0.05, abs=0.01)


def test_a_seed_is_insecure_and_said_to_be(tmp_path: Path) -> None:
    weights, said, spent = [], [], []
    for name in ("a", "b", "c"):
        parts = setup(tmp_path, ledger=tmp_path / name, insecure_seed=None if name == "c" else 3, report=said.append)
        loop(parts)
        weights.append(parts.model.state_dict()["0.weight"].clone())
        spent.append(parts.epsilon)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert [math.isinf(epsilon) for epsilon in spent] == [True, True, False]
    assert [line.startswith("INSECURE") for line in said] == [True, True, False]


def test_zero_grad_may_be_forgotten(tmp_path: Path) -> None:
    rows = []
    for name in ("with", "without"):
        parts = setup(tmp_path, ledger=tmp_path / name, insecure_seed=3)
        net, optimizer, loader, criterion = parts
        for x, y in loader:
            if name == "with":
                optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
        rows.append(net.state_dict())
    assert all(torch.equal(rows[0][key], rows[1][key]) for key in rows[0])


def test_frozen_parameters_stay_and_only_the_optimizers_are_trained(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    loop(setup(tmp_path, model, optimizer=torch.optim.SGD([model[0].bias, model[1].weight], lr=0.1)))
    moved = [name for name, each in model.state_dict().items() if not torch.equal(each, before[name])]
    assert moved == ["1.weight"]


def test_mixed_precision_by_autocast(tmp_path: Path) -> None:
    net, optimizer, loader, criterion = setup(tmp_path, reserve=50)
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
    assert all(torch.isfinite(each).all() and each.dtype == torch.float32 for each in net.parameters())


def test_it_learns(tmp_path: Path) -> None:
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > x[:, 1]).long()
    parts = setup(
        tmp_path, nn.Linear(5, 2), DataLoader(TensorDataset(x, y), 40), noise_multiplier=0.5, reserve=10, clip_norm=2.0
    )
    for group in parts.optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(3):
        loop(parts)
    with torch.no_grad():
        assert (parts.model(x).argmax(1) == y).double().mean() > 0.9


def test_the_model_is_itself_in_all_but_its_gradients(tmp_path: Path) -> None:
    model = made("linear")[0]
    parts = setup(tmp_path, model)
    assert list(parts.model.state_dict()) == list(model.state_dict())
    assert [name for name, _ in parts.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    parts.model.load_state_dict({name: torch.zeros_like(each) for name, each in model.state_dict().items()})
    assert all((each == 0).all() for each in model.parameters())
    parts.model.eval()
    assert not model.training
    x, _ = batch((5,))
    with torch.no_grad():
        torch.testing.assert_close(parts.model(x), model(x))
    assert len(parts.data_loader) == 4
    assert len(parts.data_loader.dataset) == 40


def test_a_scheduler_and_evaluation_in_between_change_nothing(tmp_path: Path) -> None:
    net, optimizer, loader, criterion = setup(tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x, y in loader:
        criterion(net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            criterion(net(x), y)
        criterion(net(x), y)  # without no_grad: a figure and no more
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0.1


# --- sampling ---


def test_every_example_is_drawn_independently_at_the_rate(tmp_path: Path) -> None:
    count, passes = 12, 40
    loader = DataLoader(TensorDataset(torch.arange(count), torch.zeros(count)), batch_size=3, shuffle=True)
    parts = setup(tmp_path, nn.Linear(1, 1), loader, reserve=4)
    steps = parts.optimizer._flower_privdec_steps
    parts.optimizer.register_step_post_hook(lambda *_: rows.append(list(seen)))
    rows: list[list[int]] = []
    seen: list[int] = []
    for _ in range(passes):
        for x, _ in parts.data_loader:
            seen[:] = x.tolist()
            steps.arrive(torch.zeros(2), len(x), steps.drawn)
            parts.optimizer.step()
            seen.clear()
    assert len(rows) == 4 * passes  # empty batches too, on noise alone
    hits = np.array([[who in row for who in range(count)] for row in rows], dtype=float)
    assert all(len(set(row)) == len(row) for row in rows)
    spread = 5 * math.sqrt(0.25 * 0.75 / len(rows))
    assert np.abs(hits.mean(0) - 0.25).max() < spread
    assert np.abs(np.corrcoef(hits.T) - np.eye(count)).max() < 5 / math.sqrt(len(rows))
    assert 0.4 < hits.sum(1).var() / (count * 0.25 * 0.75) < 2.0  # 0 for batches of a fixed size


def test_an_empty_batch_takes_a_step_on_noise(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(Subset(data(400), range(200)), batch_size=1), reserve=200)
    taken: list[int] = []
    parts.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    seen = loop(parts)
    assert seen < 200 == len(taken)


def test_a_batch_size_of_all_takes_all(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(data(), batch_size=100))
    assert [len(x) for x, _ in _stepping(parts)] == [40]
    assert "1 step by taking all of 40 examples" in str(parts)


def _stepping(parts: ExamplePrivacy) -> Iterator[Any]:
    for x, y in parts.data_loader:
        parts.criterion(parts.model(x), y).backward()
        parts.optimizer.step()
        yield x, y


def test_collate_and_workers_are_kept(tmp_path: Path) -> None:
    def dicts(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {"img": torch.stack([x for x, _ in rows]), "label": torch.stack([y for _, y in rows])}

    net, optimizer, loader, criterion = setup(
        tmp_path, loader=DataLoader(data(), batch_size=10, collate_fn=dicts, num_workers=1, shuffle=True)
    )
    for each in loader:
        criterion(net(each["img"]), each["label"]).backward()
        optimizer.step()
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 2  # the header, and one payment: workers read a whole pass ahead


# --- the ledger ---


def spent(rate: float, noise: float, steps: int, delta: float) -> float:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))


@pytest.mark.slow
def test_all_rounds_cost_what_dp_accounting_says(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=20)
    budget = {"epsilon": 4.0, "noise_multiplier": None, "rounds": 5, "reserve": 2}
    noises = set()
    for number in range(5):
        parts = setup(tmp_path, loader=loader, **budget)  # each round anew, as a client function does
        assert parts.allowed == 2 * (5 - number)
        noises.add(parts.noise_multiplier)
        list(_stepping(parts))
    assert len(noises) == 1
    exact = spent(0.5, noises.pop(), 10, 1e-3)
    assert parts.epsilon == pytest.approx(exact, rel=2e-3)
    assert 0.99 * 4.0 <= parts.epsilon <= 4.0
    parts = setup(tmp_path, loader=loader, **budget)
    assert parts.allowed == 0
    reading = iter(parts.data_loader)
    with raises(BudgetError, "ledger.budget-spent", names=r"ε = 4.00 at δ = 0.001 \(unit: example; adjacency: zero-"):
        next(reading)


def test_a_spent_budget_ends_a_pass_before_reading(tmp_path: Path) -> None:
    read: list[int] = []

    class Watched(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, place: int) -> Any:
            read.append(place)
            return torch.zeros(5), 0

    parts = setup(tmp_path, loader=DataLoader(Watched(), batch_size=10), epsilon=3.0)
    allowed = parts.allowed
    assert spent(0.25, 1.0, allowed, 1e-3) <= 3.0 < spent(0.25, 1.0, allowed + 1, 1e-3)
    for _ in range(allowed // 4):
        loop(parts)
    assert parts.allowed == allowed % 4
    with pytest.raises(BudgetError):
        loop(parts)
    assert parts.allowed == 0
    before = len(read)
    with pytest.raises(BudgetError):
        loop(setup(tmp_path, loader=DataLoader(Watched(), batch_size=10), epsilon=3.0))
    assert len(read) == before


def test_other_mechanisms_and_runs_count_too(tmp_path: Path) -> None:
    first = setup(tmp_path, noise_multiplier=0.8)
    loop(first)
    second = setup(tmp_path, noise_multiplier=None, epsilon=4.0, rounds=10)
    assert 0 < second.allowed < 40  # the noise was solved for 40 steps, and some of the budget is spent
    assert second.epsilon == first.epsilon > 0
    said = str(second)
    assert "4 steps by Poisson sampling at rate 0.25 of 40 examples, noise multiplier 0.8" in said
    for part in ("ε = ", "at δ = 0.001", "unit: example", "adjacency: zero-out", "charged: ", "budget ε = 4"):
        assert part in said


def test_a_ledgers_noise_survives_a_lost_solution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"epsilon": 3.0, "noise_multiplier": None, "steps": 20}
    first = setup(tmp_path, **budget)
    loop(first)
    monkeypatch.setattr(
        "flower_privdec.training_loop.loop_budget.noise_multiplier",
        lambda *_, **__: first.noise_multiplier * (1 + 1e-4),
    )
    again = setup(tmp_path, **budget)
    assert again.noise_multiplier == first.noise_multiplier
    assert again.allowed == 16


class OfTwo(nn.Linear):
    """A model that returns more than one tensor, as many of transformers do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def of_another_width(parts: ExamplePrivacy) -> None:
    loop(parts)


def of_another_name(parts: ExamplePrivacy) -> None:
    for batch in parts.data_loader:
        parts.model(batch["image"])


def of_accumulated(parts: ExamplePrivacy) -> None:
    for x, y in parts.data_loader:
        parts.criterion(parts.model(x), y).backward()


def of_scaled(parts: ExamplePrivacy) -> None:
    for x, y in parts.data_loader:
        (parts.criterion(parts.model(x), y) / 4).backward()


def of_other_targets(parts: ExamplePrivacy) -> None:
    for x, y in parts.data_loader:
        parts.criterion(parts.model(x), torch.stack([y.float()] * 7)).backward()


def of_a_read_loss(parts: ExamplePrivacy) -> None:
    for x, y in parts.data_loader:
        print(parts.criterion(parts.model(x), y))


def of_memory(parts: ExamplePrivacy) -> None:
    for _ in parts.data_loader:
        raise MemoryError


@pytest.mark.parametrize(
    ("mistake", "model", "error"),
    [
        (of_another_width, lambda: nn.Linear(6, 3), ScenarioError),
        (of_another_width, lambda: OfTwo(5, 3), ScenarioError),
        (of_another_name, lambda: nn.Linear(5, 3), TypeError),
        (of_accumulated, lambda: nn.Linear(5, 3), RunError),
        (of_scaled, lambda: nn.Linear(5, 3), RunError),
        (of_other_targets, lambda: nn.Linear(5, 3), ScenarioError),
        (of_a_read_loss, lambda: nn.Linear(5, 3), RunError),
        (of_memory, lambda: nn.Linear(5, 3), MemoryError),
    ],
)
def test_a_mistake_in_the_first_batch_costs_nothing(
    mistake: Callable[[ExamplePrivacy], None], model: Any, error: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = tmp_path / "ledgers"
    loader = DataLoader(data(), 40)
    parts = setup(tmp_path, model(), loader=loader, ledger=folder / "a.jsonl", report=said.append)
    with pytest.raises(error):
        mistake(parts)
    assert not folder.exists()
    parts.close()
    right = setup(tmp_path, nn.Linear(5, 3), loader=loader, ledger=folder / "a.jsonl")
    loop(right)
    with pytest.raises(error):
        mistake(setup(tmp_path, model(), loader=loader, ledger=folder / "a.jsonl"))
    assert len((folder / "a.jsonl").read_text().splitlines()) == 2  # the header and the payment of the loop that works
    assert said == []


def test_an_error_from_private_examples_is_paid_for(tmp_path: Path) -> None:
    parts = setup(tmp_path, nn.Linear(5, 2), loader=DataLoader(data(), 40))  # a class too many
    with raises(RunError, "training-loop.withheld"):
        loop(parts)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_a_loss_that_is_shown_is_paid_for_before(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(data(), 40), show_loss=True)
    x, y = next(iter(parts.data_loader))
    assert not list(tmp_path.iterdir())
    parts.criterion(parts.model(x), y)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_a_batch_of_a_lost_iterator_is_paid_once(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(data(), 40))
    x, y = next(iter(parts.data_loader))
    parts.criterion(parts.model(x), y).backward()
    parts.optimizer.step()
    assert parts.epsilon > 0
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2
    loop(setup(tmp_path, loader=DataLoader(data(), 40)))  # its lock is gone too


def test_a_dangerous_delta_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    setup(tmp_path, delta=0.025, report=said.append)
    assert said == [
        "warning: δ = 0.025 >= 1/40: revealing one example outright would be allowed; take δ well below 1/40"
    ]
    setup(tmp_path, delta=0.024, report=said.append)
    assert len(said) == 1


def test_a_step_is_on_disk_before_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[int] = []
    original = os.urandom

    parts = setup(tmp_path)

    def lines() -> int:
        path = tmp_path / "a.jsonl"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    def drawing(count: int) -> bytes:
        if count == 32:
            paid.append(lines())
        return original(count)

    monkeypatch.setattr("flower_privdec.training_loop.loop_budget.os.urandom", drawing)
    added: list[int] = []
    monkeypatch.setattr(parts._steps._noise, "add_", lambda *_: added.append(lines()))
    loop(parts)
    assert paid == [0, 2, 3, 4]  # the first batch shows whether the loop works, and is paid for before its noise
    assert added == [1, 2, 3, 4]


@pytest.mark.slow
def test_leaving_a_pass_early_releases_the_ledger(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(data(400), batch_size=100))
    assert loop(parts, most=2) == 2
    again = setup(tmp_path, loader=DataLoader(data(400), batch_size=100))
    assert again.epsilon == parts.epsilon == pytest.approx(spent(0.25, 1.0, 2, 1e-3), rel=2e-3)
    loop(again)
    assert again.epsilon == pytest.approx(spent(0.25, 1.0, 6, 1e-3), rel=2e-3)

    def failing() -> None:
        for _ in again.data_loader:
            raise ValueError

    with pytest.raises(ValueError) as kept:  # noqa: PT011 (nobody else raises one, and its traceback is held)
        failing()
    assert kept.tb is not None
    parts = setup(tmp_path, loader=DataLoader(data(400), batch_size=100))
    loop(parts)
    assert parts.epsilon == pytest.approx(spent(0.25, 1.0, 11, 1e-3), rel=2e-3)


def test_a_long_pass_writes_few_lines_and_loses_little(tmp_path: Path) -> None:
    parts = setup(tmp_path, loader=DataLoader(data(640), batch_size=10), noise_multiplier=None, epsilon=2.0, rounds=2)
    assert loop(parts, most=33) == 33  # in the ninth block of four; an empty batch or two may be among them
    assert parts.allowed in (128 - 36, 128 - 40)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) in (1 + 9, 1 + 10)


@pytest.mark.slow
def test_the_released_mean_has_the_accounted_distribution(tmp_path: Path) -> None:
    """With one example alone, a step is (1 - q) N(0, σ²C²) + q N(C, σ²C²), over the expected batch."""
    rate, noise, size = 0.25, 0.3, 4
    x = torch.zeros(size, 1)
    x[0] = 1e6
    parts = setup(
        tmp_path,
        nn.Linear(1, 1, bias=False),
        DataLoader(TensorDataset(x, torch.zeros(size)), batch_size=1),
        lambda outputs, targets: (outputs.squeeze(1) + targets).sum(),
        noise_multiplier=noise,
        clip_norm=CLIP,
        reserve=4,
    )
    found: list[float] = []
    weight = next(iter(parts.model.parameters()))
    parts.optimizer.register_step_post_hook(lambda *_: found.append(weight.grad.item() / CLIP))
    for _ in range(120):
        loop(parts)
    values = np.array(found)
    normal = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))
    for at in (-0.3, 0.0, 0.3, 0.5, 0.7, 1.0, 1.3):
        below = (1 - rate) * normal(at / noise) + rate * normal((at - 1) / noise)
        assert abs((values < at).mean() - below) < 5 * math.sqrt(below * (1 - below) / len(values))


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    one, other = setup(tmp_path), setup(tmp_path)
    stepping = _stepping(one)
    next(stepping)
    with raises(BudgetError, "ledger.in-use"):
        loop(other)
    stepping.close()
    loop(other)


def loop_that_is_killed(ledger: Path) -> None:
    net = torch.nn.Linear(2, 2)
    loader = DataLoader(TensorDataset(torch.randn(40, 2), torch.zeros(40, dtype=torch.int64)), 20)
    for number in range(20):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        parts = private(
            net, optimizer, loader, torch.nn.CrossEntropyLoss(), ledger=ledger, delta=1e-3, epsilon=4.0, rounds=20
        )
        for batch, (x, y) in enumerate(parts.data_loader):
            if (number, batch) == (10, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            parts.criterion(parts.model(x), y).backward()
            optimizer.step()


@pytest.mark.slow
def test_a_round_killed_midway_resumes_there(tmp_path: Path) -> None:
    assert status_of(forked(loop_that_is_killed, tmp_path / "a.jsonl")) == -signal.SIGKILL
    budget = {"epsilon": 4.0, "noise_multiplier": None, "rounds": 20}
    parts = setup(tmp_path, loader=DataLoader(data(), batch_size=20), **budget)
    assert parts.allowed == 40 - 22  # ten rounds, a step, and the one that was paid when it died


def test_a_ledger_that_was_edited_or_cut_is_refused(tmp_path: Path) -> None:
    parts = setup(tmp_path)
    loop(parts)
    path = tmp_path / "a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], json.dumps(json.loads(lines[1]) | {"to_step": 9}) + "\n", *lines[2:]]))
    with raises(BudgetError, "ledger.damaged"):
        _ = parts.allowed
    with raises(BudgetError, "ledger.damaged"):
        loop(parts)


def test_a_disk_that_fails_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = setup(tmp_path)
    before = parts.model.state_dict()["0.weight"].clone()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flower_privdec.privacy.ledger.ledger.os.fsync", full)
    with raises(BudgetError, "ledger.folder", names="No space left"):
        loop(parts)
    assert torch.equal(before, parts.model.state_dict()["0.weight"])


# --- what is refused, by name ---


def refused(parts: ExamplePrivacy, code: str, named: str, body: Callable[[Any, Any, Any, Any], None]) -> None:
    """Check that what a loop does with a batch is refused, and that the parameters are where they were."""
    net, optimizer, loader, criterion = parts

    def train() -> None:
        for x, y in loader:
            body(x, y, optimizer, lambda x, y: criterion(net(x), y))

    before = [parameter.detach().clone() for parameter in net.parameters()]
    with raises(RunError, f"training-loop.{code}", names=named):
        train()
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))


def twice(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    loss(x, y).backward()
    loss(x, y).backward()


def no_backward(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    loss(x, y)
    optimizer.step()


def no_step(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    loss(x, y).backward()


def closure(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    loss(x, y).backward()
    optimizer.step(lambda: loss(x, y))


def part(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    loss(x[1:], y[1:]).backward()


def scaled(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    (loss(x, y) / 4).backward()


def squared(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    (loss(x, y) ** 2).backward()


def scaler(x: Tensor, y: Tensor, optimizer: Any, loss: Any) -> None:
    torch.amp.GradScaler("cpu").scale(loss(x, y)).backward()


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (twice, "one-step-a-batch", "gradient accumulation"),
        (no_backward, "one-step-a-batch", "loss.backward"),
        (no_step, "one-step-a-batch", "no step"),
        (closure, "one-step-a-batch", "closure"),
        (part, "one-step-a-batch", "number of examples"),
        (scaled, "gradient-past-clipping", "divided"),
        (squared, "gradient-past-clipping", "squared"),
        (scaler, "gradient-past-clipping", "GradScaler"),
    ],
)
def test_unpaid_steps_are_refused(body: Any, code: str, named: str, tmp_path: Path) -> None:
    refused(setup(tmp_path, loader=DataLoader(data(400), batch_size=100), show_loss=True), code, named, body)


def test_a_batch_is_not_reused_in_another_step(tmp_path: Path) -> None:
    def train(keep_outputs: bool) -> None:
        net, optimizer, loader, criterion = setup(tmp_path, loader=DataLoader(data(), 100), ledger=tmp_path / "b")
        kept: list[Any] = []
        for _ in range(2):  # all examples are in both batches, so that their sizes agree
            for x, y in loader:
                kept.append(net(x) if keep_outputs else criterion(net(x), y))
                (criterion(kept[0], y) if keep_outputs else kept[0]).backward(retain_graph=True)
                optimizer.step()

    for keep_outputs in (True, False):
        with raises(RunError, "training-loop.one-step-a-batch", names="backward"):
            train(keep_outputs)


def test_a_gradient_past_the_wrapping_is_refused(tmp_path: Path) -> None:
    model = made("linear")[0]
    parts = setup(tmp_path, model)
    x, y = batch((5,))
    with raises(RunError, PAST, names="weight"):
        cross_entropy(model(x), y).backward()
    with raises(RunError, PAST, names="criterion"):
        cross_entropy(parts.model(x), y).backward()
    with raises(RunError, PAST, names="outputs"):
        parts.criterion(parts.model(x) - 1, y)
    with raises(RunError, PAST, names="outputs"):
        parts.criterion(parts.model(x).sub_(1), y)
    with raises(RunError, STEP, names="backward"):
        parts.criterion(parts.model(x), y).backward()
    with raises(RunError, STEP, names="step"):
        parts.optimizer.step()
    with raises(RunError, PAST, names="weight_decay"):
        (0.1 * parts.model.get_submodule("module.0").weight.norm()).backward()
    parts.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with raises(RunError, PAST, names="parameters"):
        parts.optimizer.step()
    parts.close()
    cross_entropy(model(x), y).backward()
    parts.optimizer.step()


STEP, PAST = "training-loop.one-step-a-batch", "training-loop.gradient-past-clipping"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(5), 0


@pytest.mark.parametrize(
    ("loader", "named"),
    [
        (lambda: DataLoader(Stream(), batch_size=10), "map-style"),
        (lambda: DataLoader(data(), batch_size=None), "batch_size"),
        (lambda: DataLoader(data(), batch_sampler=[[0, 1]]), "batch_size"),
        (lambda: DataLoader(data(), 10, sampler=WeightedRandomSampler([1.0] * 40, 40)), "WeightedRandomSampler"),
        (lambda: DataLoader(data(), 50, drop_last=True), "drop_last"),
        (lambda: [1, 2], "DataLoader"),
    ],
)
def test_a_loader_that_cannot_be_sampled_is_refused(loader: Any, named: str, tmp_path: Path) -> None:
    with raises(ScenarioError, "training-loop.loader", names=named):
        setup(tmp_path, loader=loader())


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"noise_multiplier": None}, ("training-loop.noise",)),
        ({"noise_multiplier": None, "epsilon": 1.0}, ("training-loop.noise",)),
        ({"noise_multiplier": 0.0}, ("training-loop.argument", "noise_multiplier=0.0")),
        ({"noise_multiplier": math.nan}, ("training-loop.argument", "noise_multiplier=nan")),
        ({"epsilon": -1.0}, ("training-loop.argument", "epsilon=-1.0")),
        ({"delta": 1.5}, ("privacy.delta", "delta=1.5")),
        ({"clip_norm": 0.0}, ("training-loop.argument", "clip_norm=0.0")),
        ({"clip_norm": math.inf}, ("training-loop.argument", "clip_norm=inf")),
        ({"reserve": 0}, ("training-loop.argument", "reserve=0")),
        ({"way": "fast"}, ("training-loop.way", "way='fast'")),
        *(
            ({name: "1"}, ("argument.kind", f"{name}='1'"))
            for name in ("clip_norm", "noise_multiplier", "delta", "epsilon")
        ),
        *(({name: 1.5}, ("argument.kind", f"{name}=1.5")) for name in ("steps", "rounds", "reserve")),
        *(
            ({name: True}, ("argument.kind", f"{name}=True"))
            for name in ("clip_norm", "noise_multiplier", "insecure_seed")
        ),
        *(
            ({name: None}, ("training-loop.argument", f"{name}=None"))
            for name in ("clip_norm", "delta", "ledger", "local_epochs")
        ),
        ({"local_epochs": 0}, ("training-loop.argument", "local_epochs=0")),
        ({"report": 5}, ("argument.kind", "report=5")),
        ({"ledger": 5}, ("argument.kind", "ledger=5")),
        ({"model": nn.utils.weight_norm(nn.Linear(5, 3))}, ("training-loop.model",)),
        ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))}, ("training-loop.model", "group_norm")),
        (
            {"model": nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 4))},
            ("training-loop.model", "group_norm"),
        ),
        ({"model": nn.EmbeddingBag(7, 3, max_norm=1.0)}, ("training-loop.model", "max_norm")),
        ({"model": nn.Linear(5, 3).half()}, ("training-loop.model", "float16")),
        (
            {"criterion": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 9.0]))},
            ("loss.not-additive", "reduction='sum'"),
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_private_is_refused(
    options: dict[str, Any], refusal: tuple[str, ...], tmp_path: Path
) -> None:
    with raises(ScenarioError, *refusal):
        setup(tmp_path, **options)
    assert not (tmp_path / "a.jsonl").exists()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with raises(ScenarioError, "training-loop.model", "2 parameters"):
        setup(tmp_path, optimizer=torch.optim.SGD(nn.Linear(5, 3).parameters(), 0.1))
    assert not (tmp_path / "a.jsonl").exists()


def new_head(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    model[-1] = nn.Linear(model[-1].in_features, 3)


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(("change", "named"), [(new_head, "another parameter"), (frozen, "frozen after private()")])
def test_a_model_that_changed_after_wrapping_is_refused(change: Any, named: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    parts = setup(tmp_path, model)
    change(model)
    with raises(RunError, "training-loop.gradient-past-clipping", named):
        loop(parts)
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, lambda parameters: torch.optim.SparseAdam(list(parameters))])
def test_an_optimizer_without_private_steps_is_refused(make: Any, tmp_path: Path) -> None:
    model = made("linear")[0]
    with raises(ScenarioError, "training-loop.model", "take another"):
        setup(tmp_path, model, optimizer=make(model.parameters()))
    assert not (tmp_path / "a.jsonl").exists()


def test_private_parts_and_folders_are_refused(tmp_path: Path) -> None:
    parts = setup(tmp_path)
    with raises(ScenarioError, "training-loop.private-already", names="model"):
        setup(tmp_path, parts.model)
    with raises(ScenarioError, "training-loop.private-already", names="loader"):
        setup(tmp_path, loader=parts.data_loader)
    with raises(ScenarioError, "training-loop.private-already", names="optimizer"):
        setup(tmp_path, parts.model.module, optimizer=parts.optimizer)
    with raises(ScenarioError, "training-loop.argument", names="ledger="):
        setup(tmp_path, ledger=tmp_path)


def test_a_models_error_on_private_examples_is_withheld(tmp_path: Path) -> None:
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1 and x.abs().max() > 0:
                raise ValueError(f"secret {x.tolist()}")
            return self.head(x)

    parts = setup(tmp_path, Telling(), loader=DataLoader(data(400), 100), way="loop")
    with raises(RunError, "training-loop.withheld", names="ValueError") as caught:
        loop(parts)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None
    parts = setup(tmp_path, nn.Linear(5, 2), loader=DataLoader(data(400), 100), ledger=tmp_path / "b")
    with raises(RunError, "training-loop.withheld", names=r"criterion.* \w+Error") as caught:  # a class too many
        loop(parts)
    assert "2" not in str(caught.value)
    with raises(ScenarioError, "training-loop.fails-on-zeros", names="model.* mat1 and mat2"):
        loop(setup(tmp_path, nn.Linear(6, 2), ledger=tmp_path / "c"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaders_error_on_private_examples_is_withheld(workers: int, tmp_path: Path) -> None:
    def telling(examples: list[Any]) -> Any:
        raise ValueError(f"secret {examples}")

    with raises(RunError, "training-loop.withheld", names="collate_fn.* ValueError") as caught:
        setup(tmp_path, loader=DataLoader(data(), 10, collate_fn=telling, num_workers=workers))
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None

    def telling_later(examples: list[Any]) -> Any:
        if examples[0][0][0] == 7:
            raise ValueError(f"secret {examples}")
        return default_collate(examples)

    x, y = batch((5,), 3, 40)
    x[1] = 7  # which no probe reads
    parts = setup(tmp_path, loader=DataLoader(TensorDataset(x, y), 40, collate_fn=telling_later, num_workers=workers))
    with raises(RunError, "training-loop.withheld", names="collate_fn.* ValueError") as caught:
        loop(parts)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None
    shrinking = [(torch.zeros(5), torch.tensor(0)) for _ in range(40)]
    parts = setup(tmp_path, loader=DataLoader(shrinking, 40), ledger=tmp_path / "b")  # type: ignore[arg-type]
    del shrinking[20:]
    with raises(RunError, "training-loop.withheld", names="IndexError"):
        loop(parts)


@pytest.mark.parametrize("assigned", [False, True])
def test_no_buffer_carries_examples_out(assigned: bool, tmp_path: Path) -> None:
    class Averaging(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            if assigned:
                self.seen = 0.9 * self.seen + x.mean(0)
            else:
                self.seen.mul_(0.9).add_(x.mean(0))
            return super().forward(x)

    parts = setup(tmp_path, Averaging())
    loop(parts)
    with torch.no_grad():
        assert parts.model(data()[:][0]).shape == (40, 3)
    assert not parts.model.state_dict()["seen"].any()


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_a_forward_pass_keeps_leaves(grad: bool, tmp_path: Path) -> None:
    class Keeping(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.kept.append(x.mean(0).detach())
            with torch.no_grad():
                self.weight.add_(x.mean())
            return super().forward(x)

    parts = setup(tmp_path, model := Keeping())
    before = model.weight.clone()
    with torch.set_grad_enabled(grad):
        parts.model(data()[:][0])
    assert torch.equal(model.weight, before)
    assert not model.kept


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
def test_weights_that_are_made_of_others_are_trained(norm: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    parts = setup(tmp_path, norm(nn.Linear(5, 3)))
    before = {name: value.clone() for name, value in parts.model.named_parameters()}
    assert loop(parts) > 0
    assert all(not torch.equal(value, before[name]) for name, value in parts.model.named_parameters())


def test_a_gradient_from_before_is_forgotten(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    cross_entropy(model(data()[:][0]), data()[:][1]).backward()
    parts = setup(tmp_path, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    parts.close()


def test_one_example_and_none(tmp_path: Path) -> None:
    assert loop(setup(tmp_path, loader=DataLoader(data(1), 5))) == 1
    with raises(ScenarioError, "training-loop.loader", names="0 examples in batches of 5"):
        setup(tmp_path, loader=DataLoader(Subset(data(), []), 5))


def test_a_model_that_takes_no_single_example_is_named(tmp_path: Path) -> None:
    class Squeezing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(0)

    parts = setup(tmp_path, Squeezing(5, 3), loader=DataLoader(data(400), 100))
    with raises(ScenarioError, "training-loop.batch-of-one"):
        loop(parts)


# --- GroupNorm ---


def test_group_norm_takes_the_place_of_every_batch_norm() -> None:
    shared = nn.BatchNorm2d(12)
    nn.init.constant_(shared.weight, 3.0)
    odd = nn.BatchNorm2d(7, affine=False)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 12, 1), shared), "b": nn.Sequential(shared, odd)})
    assert group_norm(model, groups=4) is model
    norm = model["a"][1]
    assert norm is model["b"][0]
    assert (norm.num_groups, norm.num_channels, norm.weight.unique().item()) == (4, 12, 3.0)
    assert (model["b"][1].num_groups, model["b"][1].affine) == (1, False)
    assert not [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    assert isinstance(group_norm(nn.BatchNorm1d(8)), nn.GroupNorm)
    with raises(ScenarioError, "training-loop.groups", "groups=0"):
        group_norm(model, 0)
    with raises(ScenarioError, "training-loop.lazy-norm", "LazyBatchNorm2d"):
        group_norm(nn.LazyBatchNorm2d())


# --- in the shape of a Flower app's task.py ---

BEFORE = '''
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    def forward(self, x):
        return self.layers(x)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device)  # move model to GPU if available
    criterion = torch.nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for batch in trainloader:
            images = batch["img"].to(device)
            labels = batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))
'''
CHANGES = {
    "from torch.utils.data import DataLoader\n": (
        "from torch.utils.data import DataLoader\nfrom flower_privdec.training_loop import group_norm, private\n"
    ),
    "        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), "
    "nn.Linear(144, 10))\n": (
        "        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), "
        "nn.Linear(144, 10))\n        group_norm(self)\n"
    ),
    "def train(net, trainloader, epochs, lr, device):": "def train(net, trainloader, epochs, lr, device, ledger):",
    "    net.train()\n": (
        "    net, optimizer, trainloader, criterion = private(\n"
        "        net, optimizer, trainloader, criterion, ledger=ledger, epsilon=8, delta=1e-3, rounds=3, "
        "local_epochs=epochs, show_loss=True\n    )\n    net.train()\n"
    ),
}


def test_a_flower_task_becomes_private_in_eight_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    after = BEFORE
    for old, new in CHANGES.items():
        assert after.count(old) == 1
        after = after.replace(old, new)
    difference = list(difflib.ndiff(BEFORE.splitlines(), after.splitlines()))
    added, taken = (sum(line.startswith(sign) for line in difference) for sign in ("+ ", "- "))
    assert max(added, taken) <= 8
    names: dict[str, Any] = {"__name__": "task"}
    exec(after, names)
    digits = [{"img": torch.rand(1, 8, 8), "label": number % 10} for number in range(60)]
    state = names["Net"]().state_dict()
    for _ in range(3):  # each round a new model with what was received, as a client function has it
        net = names["Net"]()
        net.load_state_dict(state)
        loss = names["train"](net, DataLoader(digits, 20, shuffle=True), 2, 0.1, "cpu", tmp_path / "peer-3.jsonl")
        assert math.isfinite(loss)
        assert list(net.state_dict()) == list(state)
        assert not torch.equal(net.state_dict()["layers.4.weight"], state["layers.4.weight"])
        state = net.state_dict()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6
    assert "18 steps by Poisson sampling" in said[-1]
    assert "0 steps left" in said[-1]
    with raises(BudgetError, "ledger.budget-spent"):
        names["train"](names["Net"](), DataLoader(digits, 20), 2, 0.1, "cpu", tmp_path / "peer-3.jsonl")


def test_hardened_noise_is_exact_and_covers_rounding(tmp_path: Path) -> None:
    parts = setup(tmp_path, hardened=True)
    noise, plain = parts._steps, setup(tmp_path, ledger=tmp_path / "plain")._steps
    assert isinstance(noise._noise, ExactNoise)
    assert 1e-6 < noise._std / plain._std - 1 < 1e-3
    loop(parts)


def test_hardened_noise_refuses_large_batches_and_seeds(tmp_path: Path) -> None:
    many = TensorDataset(torch.zeros(2000, 5), torch.zeros(2000).long())
    with raises(ScenarioError, "training-loop.argument", "2000 examples in float32"):
        setup(tmp_path, loader=DataLoader(many, 2000), hardened=True)
    with raises(ScenarioError, "training-loop.argument", "insecure_seed"):
        setup(tmp_path, hardened=True, insecure_seed=1)


def test_a_full_disk_draws_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, read = setup(tmp_path), list[int]()

    def full(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ledger_module.os, "write", full)
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda dataset, index: read.append(index))
    with raises(BudgetError, "ledger.disk"):
        loop(parts)
    assert not read
