"""Audits of a loop under `private()`: what is printed holds, missing noise is found, a real ledger is refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from raising import raises
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.audits.loop import auditing
from flower_privdec.audits.one_run import OneRun
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.training_loop import private

CANARIES = 120


def train(ledger: Path, noise: float = 1.0, size: int = 240, epochs: int = 4) -> nn.Module:
    """Train on random features, by a loop that knows of no audit; from a seed, so that nothing is left to luck."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(size, 2000, generator=draws), torch.randint(0, 2, (size,), generator=draws)
    model = nn.Linear(2000, 2)
    given = model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x, y), 60), nn.CrossEntropyLoss()
    wrapped = private(*given, ledger=ledger, delta=1e-5, noise_multiplier=noise, report=lambda _: None, insecure_seed=7)
    net, optimizer, loader, criterion = wrapped
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(net(features), labels).backward()
            optimizer.step()
    wrapped.close()
    return model


def audited(folder: Path, noise: float) -> OneRun:
    with auditing(CANARIES) as audit:
        train(folder / "throwaway.jsonl", noise)
    return audit.result


def test_printed_epsilon_holds_and_little_noise_leaks(tmp_path: Path) -> None:
    plain, loose = audited(tmp_path, 2.0), audited(tmp_path / "loose", 0.02)
    assert 0 <= plain.epsilon_lower_bound < plain.epsilon
    assert 1 < loose.epsilon_lower_bound < loose.epsilon
    assert (loose.canaries, loose.guesses) == (CANARIES, 40)


def test_noise_that_is_missing_is_found(tmp_path: Path) -> None:
    def none(source: PhiloxNoise, out: Tensor, *_: object) -> None:
        pass

    with patch.object(PhiloxNoise, "add_", none):
        result = audited(tmp_path, 5.0)
    assert result.epsilon_lower_bound > result.epsilon


def test_a_real_ledger_is_refused_and_not_charged(tmp_path: Path) -> None:
    ledger = tmp_path / "real.jsonl"
    train(ledger, epochs=1)
    before = ledger.read_bytes()
    with raises(ScenarioError, "audit.real-ledger", "real.jsonl"), auditing(CANARIES):
        train(ledger)
    assert ledger.read_bytes() == before
    train(ledger, epochs=1)  # nothing of the audit is left


def test_unauditable_loops_are_refused(tmp_path: Path) -> None:
    with raises(ScenarioError, "audit.trials", "canaries=120"), auditing(CANARIES):
        train(tmp_path / "small.jsonl", size=100)
    with auditing(CANARIES) as audit:
        pass
    with raises(RunError, "audit.no-step"):
        _ = audit.result


def test_without_noise_excluded_examples_add_nothing(tmp_path: Path) -> None:
    """Without noise the sum of a batch is that of the examples that are in it."""
    sums: list[Tensor] = []

    def noted(source: PhiloxNoise, out: Tensor, *_: object) -> None:
        sums.append(out.clone())

    with patch.object(PhiloxNoise, "add_", noted), auditing(240) as audit:
        audit.coins = lambda number: np.zeros(240, dtype=bool)  # type: ignore[method-assign]
        train(tmp_path / "none.jsonl")
    assert sums
    assert all(not total.any() for total in sums)
