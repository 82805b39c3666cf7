"""Noise is normal and independent across peers, rounds, edges, sums and coordinates, of every generator and mechanism.

Seeds are fixed, and a test of noise that is as it should be fails with a chance below 1e-6: each of its statistics has
its part of that.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from flower_privdec.graph.participation import build_participation
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.noise import ExactNoise, NoisedSum, NoiseSource, PairSecrets, SystemNoise, build_noise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.rows.keys import seed_keys

FALSE_ALARM = 1e-6 / 40  # of one statistic, or of all correlations together
D, STEPS = 4000, range(5)
PAIRS = np.array([[0, 1], [2, 3], [4, 5]])  # that share no peer, so that a row is the draw of one edge


class Silent:
    """A source that adds nothing: a peer's own noise is left out."""

    def add_(self, out: Tensor, std: Tensor, *rest: object) -> None:
        pass


def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operating system's entropy follow from a seed."""
    draws = np.random.default_rng(3)
    monkeypatch.setattr(os, "urandom", lambda count: draws.bytes(count))


def of_source(source: NoiseSource) -> list[Tensor]:
    """Return a stream for each peer, step, sum and receiver."""
    rows = []
    for step, name, to in itertools.product(STEPS, ("noise", "personal"), (None, 0, 1)):
        out = torch.zeros(3, D, dtype=torch.float64)
        receivers = None if to is None else np.full(3, to)
        source.add_(out, torch.ones(3, dtype=torch.float64), step, np.arange(3), name, receivers)
        rows += list(out)
    return rows


def of_pairs(*, simulated: bool) -> list[Tensor]:
    """Return a stream for each edge, step and sum, over its planned noise; its other end has the same, negated."""
    n, secrets = 6, PairSecrets(seed_keys(7, range(6)), simulated=simulated)
    plan = PairPlan(PAIRS, 0, 1.0, np.ones((len(STEPS), n)), np.ones(n), True)
    mechanism, rows = CancellingNoise(plan), []
    ones, peers = torch.ones(n, dtype=torch.float64), np.arange(n)
    for step, name in itertools.product(STEPS, ("gradient", "personal")):
        out = torch.zeros(n, D, dtype=torch.float64)
        std = ones * torch.from_numpy(plan.own[step])
        what = NoisedSum(
            normals=Silent(),
            secrets=secrets,
            name=name,
            step=step,
            round_index=step,
            peers=peers,
            rows=peers,
            receivers=None,
            scale=ones,
            clip_norm=ones,
            participation=build_participation("all", n, 0),
            state={},
        )
        mechanism.add_(out, std, what)
        planned = plan.pair_std(step, peers, std.numpy())
        assert (planned > 0.1).all()
        assert torch.equal(out[PAIRS[:, 0]], -out[PAIRS[:, 1]])
        rows += list(out[PAIRS[:, 0]] / torch.from_numpy(planned)[:, None])
    return rows


STREAMS: dict[str, Callable[[], list[Tensor]]] = {
    "simulated": lambda: of_source(build_noise(seed_keys(5, range(3)))),
    "deployed": lambda: of_source(SystemNoise()),
    "deployed, exact": lambda: of_source(ExactNoise()),
    "pairs, simulated": lambda: of_pairs(simulated=True),
    "pairs, deployed": lambda: of_pairs(simulated=False),
}


def check(rows: list[Tensor]) -> None:
    """Check that streams are standard normal, and neither values nor squares correlate at lag 0 or a few."""
    streams = torch.stack(rows)
    values = streams.numpy().ravel()
    n, z = len(values), stats.norm.isf(FALSE_ALARM / 2)
    assert abs(values.mean()) < z / math.sqrt(n)
    assert abs(values.var() - 1) < z * math.sqrt(2 / n)
    assert abs((values**3).mean()) < z * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < z * math.sqrt(96 / n)
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    for row in streams:  # each stream by itself
        assert stats.kstest(row.numpy(), "norm").pvalue > FALSE_ALARM / len(rows)
    lags = (0, 1, 2, 16, 1024)
    bound = stats.norm.isf(FALSE_ALARM / 2 / (len(rows) ** 2 * 2 * len(lags)))
    for lag, (part, variance) in itertools.product(lags, ((streams, 1.0), ((streams**2 - 1).clamp(max=8), 4.0))):
        correlation = part[:, : D - lag] @ part[:, lag:].T / math.sqrt((D - lag) * variance)
        if lag == 0:
            correlation.fill_diagonal_(0)
        assert correlation.abs().max() < bound
    quads = streams.numpy().reshape(-1, 4).view("V32").ravel().tolist()
    assert len(set(quads)) == len(quads)  # nor does any number of one stand in another


@pytest.mark.parametrize("kind", STREAMS)
def test_noise_is_normal_and_independent_across_everything(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded(monkeypatch)
    check(STREAMS[kind]())


@pytest.mark.parametrize("kind", STREAMS)
def test_the_same_noise_again_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step before, of another edge or peer, negated, shifted by one coordinate, or too small by a fiftieth."""
    seeded(monkeypatch)
    rows = STREAMS[kind]()
    for broken in (
        [*rows[:-1], rows[0]],
        [*rows[:-1], -rows[1]],
        [*rows[:-1], torch.roll(rows[2], 1)],
        [*rows[:-1], (rows[-1] + 0.2 * rows[0]) / math.sqrt(1.04)],
        [row * 0.98 for row in rows],
    ):
        with pytest.raises(AssertionError):
            check(broken)
