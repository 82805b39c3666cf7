"""The loss that a private training loop pays for: what it is, what it costs, and that a step gives no second one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.audits.loop import auditing
from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.models.layers.model_outputs import Output
from flower_privdec.training_loop import ExamplePrivacy, private
from flower_privdec.training_loop.clipped_sum import ClippedSum, PaidLoss

N, BATCH = 40, 10


class Score(nn.Module):
    """A loss that is what the targets say, with hardly any gradient."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets + 1e-7 * outputs[:, 0]).mean()


def setup(ledger: Path, y: Tensor | None = None, criterion: Any = None, **options: Any) -> ExamplePrivacy:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=draws)
    if y is None:
        y = torch.randint(0, 3, (N,), generator=draws)
    torch.manual_seed(2)
    model = nn.Linear(5, 3)
    parts = model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x, y), BATCH)
    usual = {"delta": 1e-3, "noise_multiplier": 1.0, "loss_bound": 2.0, "report": lambda line: None}
    return private(*parts, criterion or nn.CrossEntropyLoss(), ledger=ledger, **usual | options)


def losses_of(parts: ExamplePrivacy, passes: int = 1) -> list[float]:
    """Train as anybody would who watches the loss; return what the loop was given."""
    net, optimizer, loader, criterion = parts
    read = []
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            read.append(loss.item())
            loss.backward()
            optimizer.step()
    return read


def test_without_noise_it_is_the_mean_of_clipped_losses(tmp_path: Path) -> None:
    """Over the expected batch; losses that are too large, infinite or NaN count as the bound or as nothing."""
    y = torch.rand(N, generator=torch.Generator().manual_seed(3)) * 3 - 1.5
    y[:4] = torch.tensor([1e25, -1e25, 2.5, -0.5])
    parts = setup(tmp_path / "a.jsonl", y, Score(), noise_multiplier=1e-9)
    net, optimizer, loader, criterion = parts
    seen = 0
    for x, targets in loader:
        optimizer.zero_grad()
        loss = criterion(net(x), targets)
        assert loss.item() == pytest.approx(float(targets.clamp(-2, 2).sum()) / BATCH, abs=1e-5)
        loss.backward()
        optimizer.step()
        seen += 1
    assert (seen, len(parts.losses)) == (4, 4)

    paid = PaidLoss(2.0, 0.05)
    column = paid.column(torch.tensor([math.nan, math.inf, -math.inf]), 1.0)
    assert [round(paid.mean(float(one), 1.0, 1.0), 4) for one in column] == [0.0, 2.0, -2.0]


@settings(max_examples=40, deadline=None)
@given(
    loss=st.floats(allow_nan=True, allow_infinity=True, width=32),
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e18]),
    share=st.sampled_from([1e-3, 0.05, 0.5, 0.99]),
    bound=st.sampled_from([1e-12, 1.0, 1e9]),
)
@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_one_example_moves_all_that_leaves_as_charged(
    way: str, loss: float, scale: float, share: float, bound: float
) -> None:
    """Gradient and loss together by no more than the norm to which the noise is scaled."""
    model = nn.Linear(2, 1, bias=False)
    paid = PaidLoss(bound, share)

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        return (scale * outputs.sum() + targets).sum()

    summed = ClippedSum(model, {"weight": model.weight}, criterion, 0.7, way=way, paid_loss=paid)
    total, _ = summed([torch.ones(1, 2)], {}, [Output(), torch.tensor([loss])])
    assert len(total) == 3
    assert float(total.double().norm()) <= paid.norm(0.7) * (1 + 1e-12)


def test_steps_with_losses_cost_what_independent_accounting_says(tmp_path: Path) -> None:
    """Each is two Gaussian releases on one Poisson batch, of the printed noises; ε is that of both together."""
    parts = setup(tmp_path / "a.jsonl", loss_share=0.2)
    losses_of(parts, passes=3)
    loss_noise = parts.loss_std * BATCH / 2.0
    assert parts.noise_multiplier == pytest.approx(1.0)
    both = 1 / math.sqrt(1 / parts.noise_multiplier**2 + 1 / loss_noise**2)
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(BATCH / N, GaussianDpEvent(both)), 12))
    assert accountant.get_epsilon(1e-3) == pytest.approx(parts.epsilon, rel=0.02)

    without = setup(tmp_path / "b.jsonl", loss_bound=None)
    net, optimizer, loader, criterion = without
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            optimizer.step()
    assert without.epsilon < parts.epsilon
    assert (without.losses, without.loss_std) == ([], None)


def test_the_loss_has_noise_of_its_own(tmp_path: Path) -> None:
    """Neither smaller than its share pays for, nor the gradient's, nor drawn twice; empty batches have it too."""
    parts = setup(tmp_path / "a.jsonl", torch.zeros(N), Score(), insecure_seed=5)
    gradients: list[Tensor] = []
    parts.optimizer.register_step_pre_hook(lambda optimizer, *_: gradients.append(parts.model.module.bias.grad.clone()))
    losses_of(parts, passes=100)
    losses = np.array(parts.losses)
    assert len(losses) == len(gradients) == 400
    assert losses.std() == pytest.approx(parts.loss_std, rel=0.1)
    beside = np.array([float(gradient[0]) for gradient in gradients])
    assert beside.std() == pytest.approx(parts.noise_multiplier / BATCH, rel=0.1)
    assert abs(np.corrcoef(losses, beside)[0, 1]) < 0.15
    assert len(set(losses)) == 400


def test_a_solved_noise_pays_for_the_losses_too(tmp_path: Path) -> None:
    """The budget is kept to, passes go on in one ledger, and no loss leaves a step that is not paid for."""
    solved: dict[str, Any] = {"noise_multiplier": None, "epsilon": 4.0, "rounds": 3}
    parts = setup(tmp_path / "a.jsonl", **solved)
    for _ in range(3):  # as in three rounds, each in a process of its own
        parts = setup(tmp_path / "a.jsonl", **solved)
        assert losses_of(parts) == pytest.approx(parts.losses)
    assert 3.9 < parts.epsilon <= 4
    with raises(BudgetError, "ledger.budget-spent"):
        losses_of(parts)
    assert len(parts.losses) == 4
    plain = setup(tmp_path / "b.jsonl", loss_bound=None, **solved)
    assert parts.noise_multiplier / plain.noise_multiplier == pytest.approx(1 / math.sqrt(0.95))
    assert "releases its mean loss" in str(parts)


def test_a_loss_is_paid_for_before_it_leaves(tmp_path: Path) -> None:
    parts = setup(tmp_path / "a.jsonl", loss_share=0.5)
    x, y = next(iter(parts.data_loader))
    assert not list(tmp_path.iterdir())
    parts.criterion(parts.model(x), y)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_a_batch_gives_one_loss_and_whole(tmp_path: Path) -> None:
    """A second one, or that of a part, would be a release that nobody paid for."""
    parts = setup(tmp_path / "a.jsonl")
    x, y = next(iter(parts.data_loader))
    with raises(RunError, "training-loop.one-step-a-batch"):
        parts.criterion(parts.model(x[1:]), y[1:])
    assert parts.losses == []
    parts.criterion(parts.model(x), y)
    with raises(RunError, "training-loop.one-step-a-batch", names="the criterion came twice"):
        parts.criterion(parts.model(x), y)
    assert len(parts.losses) == 1


def test_a_scheduler_may_follow_a_paid_loss(tmp_path: Path) -> None:
    parts = setup(tmp_path / "a.jsonl", hardened=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(parts.optimizer, patience=0)
    before = parts.epsilon
    for loss in losses_of(parts):
        scheduler.step(loss)
    assert before < parts.epsilon


@pytest.mark.parametrize(
    "options",
    [
        {"show_loss": True},
        {"loss_bound": 0.0},
        {"loss_bound": math.nan},
        {"loss_bound": math.inf},
        {"loss_bound": 1e25},
        {"loss_share": 0.0},
        {"loss_share": 1.0},
        {"loss_share": None},
    ],
    ids=str,
)
def test_wrong_options_of_a_loss_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with raises(ScenarioError, "training-loop.argument", names=next(iter(options))):
        setup(tmp_path / "a.jsonl", **options)
    assert not list(tmp_path.iterdir())


def test_an_audit_sees_gradient_and_loss_together(tmp_path: Path) -> None:
    """Losses that give every canary away are found if nearly all of the cost is theirs and the noise is small."""

    def result(noise: float) -> Any:
        y = torch.full((N,), 2.0)
        with auditing(N) as audit:
            options = {"noise_multiplier": noise, "loss_share": 0.9, "insecure_seed": 1}
            parts = setup(tmp_path / f"{noise}.jsonl", y, Score(), **options)
            net, optimizer, loader, criterion = parts
            for x, targets in loader:
                optimizer.zero_grad()
                criterion(net(x), targets).backward()
                optimizer.step()
            parts.close()
        return audit.result

    found = result(2.0)
    assert not found.defects
    assert found.epsilon_lower_bound <= found.epsilon
