"""Refuse to time what does not compute the same: float64, the same examples, the same injected noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.engine.engine import Engine
from flower_privdec.rows.keys import keyed_generator
from tools.bench.baselines import Baseline, PeerLoop
from tools.bench.workloads import SEED, Setup, Workload

ROUNDS = 2
TOLERANCE = 1e-9


class InjectedNoise:
    """Noise that everyone can replay: row i of round k is a fixed normal vector."""

    def __init__(self, d: int, device: torch.device) -> None:
        self.d = d
        self.device = device

    def draw(self, round_index: int, peer: int) -> Tensor:
        """Return the noise of a peer in a round, [d] float64."""
        generator = keyed_generator(SEED, "injected", round_index, peer)
        return torch.from_numpy(generator.standard_normal(self.d)).to(self.device)

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Subtract std[i] times the noise of peer i, for the baselines add it to what they subtract."""
        for row, scale, peer in zip(out, std, peers, strict=True):
            row.sub_(scale * self.draw(step, int(peer)))


def start(setup: Setup) -> tuple[Tensor, Tensor]:
    """Return parameters [n, d] and push weights [n] that differ from peer to peer."""
    generator = keyed_generator(SEED, "start")
    n = setup.workload.n_peers
    first = torch.cat([parameter.detach().flatten() for parameter in setup.module.parameters()])
    x = first + 0.02 * torch.from_numpy(generator.standard_normal((n, setup.d))).to(first)
    return x, torch.linspace(0.8, 1.25, n).to(first)


def check_equal(
    workload: Workload, device: torch.device | str, baselines: dict[str, type[Baseline]] | None = None
) -> None:
    """Check that the engine and its baselines make the loop's update, from peers that differ.

    Args:
        workload: what will be timed.
        device: where.
        baselines: more ways to check, by name.

    Raises:
        RunError: one does not; nothing should be timed then.
    """
    setup = Setup.build(workload, device, torch.float64)
    noise = InjectedNoise(setup.d, setup.device)
    x, w = start(setup)
    expected = _by_baseline(setup, noise, PeerLoop, x, w)
    results = {"engine": _by_engine(setup.engine(noise), x, w)}
    results |= {name: _by_baseline(setup, noise, kind, x, w) for name, kind in (baselines or {}).items()}
    for name, rows in results.items():
        for row, got, wanted in zip(("x", "w"), rows, expected, strict=True):
            compare(workload.name, name, row, got, wanted)


def _by_engine(engine: Engine, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    engine.state.rows.update(x=x.clone(), w=w.clone())
    for _ in range(ROUNDS):
        engine.round()
    return engine.state.rows["x"], engine.state.rows["w"]


def _by_baseline(
    setup: Setup, noise: InjectedNoise, kind: type[Baseline], x: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    def draw(round_index: int) -> tuple[Tensor, Tensor]:
        batch = setup.data.batch(round_index, np.arange(setup.workload.n_peers))
        return batch.x, batch.y

    baseline = kind(setup, noise.draw, draw)
    baseline.load(x.clone(), w.clone())
    for _ in range(ROUNDS):
        baseline.round()
    return baseline.rows()


def compare(workload: str, name: str, row: str, got: Tensor, expected: Tensor) -> None:
    """Refuse rows that differ from the plain loop's.

    Raises:
        RunError: naming the workload, who differs, where, and by how much.
    """
    error = float((got - expected.to(got)).abs().max())
    if not error <= TOLERANCE:
        raise RunError(
            f"{workload}: after {ROUNDS} rounds the {name}'s {row} differs from the plain loop's by {error:.1e} "
            f"in float64, more than {TOLERANCE:.0e}; nothing was timed: run the tests of the gradients",
            code="bench.differs",
        )
