"""How the noise of a run is correlated over its steps: what its scenario says, or what is best for its budgets."""

from __future__ import annotations

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.data import Sampler
from flower_privdec.data.datasets import sizes_of_parts
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.privacy.mechanism.correlation import (
    CANDIDATES,
    BandChoice,
    Correlation,
    Workload,
    best_choice,
    best_correlation,
    choices,
)
from flower_privdec.scenario.sections import CorrelatedSection


def correlation_of(
    agreement: Agreement, peers: np.ndarray, sizes: np.ndarray, root: str | None, whole: bool
) -> Correlation | None:
    """Return how noise is correlated, the same at all peers; None if the scenario does not say so.

    Args:
        peers: the peers hosted here.
        sizes: how many examples these have.
        root, whole: see `OwnParts.of`.

    Raises:
        ScenarioError: `bands: auto`, and no one knows how many examples all peers have.
    """
    private = agreement.scenario.private
    if private is None or not isinstance(private.noise, CorrelatedSection):
        return None

    bands = private.noise.bands
    if bands == "auto":
        sizes = _sizes_of_all(agreement, peers, sizes, root, whole)
        return best_choice(choices_for(agreement, sizes)).correlation
    return best_correlation(bands, workload_of(agreement))


def workload_of(agreement: Agreement) -> Workload:
    """Return how the noise of steps enters the models: by the learning rate, and by the momentum of an optimizer."""
    scenario = agreement.scenario
    rates = np.abs(agreement.learning_rate.of_rounds(scenario.rounds)[:, 0])
    weights = (rates / rates.max()).repeat(agreement.algorithm.steps_per_round)

    momentum = 0.0
    optimizer = agreement.algorithm.optimizer
    if optimizer is not None and optimizer.section.name == "momentum":
        momentum = optimizer.section.momentum
    return Workload(tuple(weights.tolist()), momentum)


def choices_for(agreement: Agreement, sizes: np.ndarray) -> list[BandChoice]:
    """Return what different numbers of bands would do, at the budget of the peer with the median number of examples.

    Args:
        sizes: how many examples each peer has, or as many as any has for certain.
    """
    scenario = agreement.scenario
    private = scenario.private
    assert private is not None
    assert private.epsilon is not None

    # Only rates and sizes are read of this sampler; nothing is drawn from these keys.
    everyone = np.arange(len(sizes))
    sampler = Sampler(scenario.data.batch, sizes, dict.fromkeys(everyone.tolist(), scenario.seed_of("run")), everyone)
    most = int(1 / sampler.sampling_rate.max() * (1 + 1e-12))
    peer = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    return choices(
        workload_of(agreement),
        [bands for bands in CANDIDATES if bands <= most],
        size=int(sizes[peer]),
        rate=float(sampler.sampling_rate[peer]),
        batch=float(sampler.normalizer[peer]),
        epsilon=float(np.broadcast_to(private.epsilon, len(sizes))[peer]),
        delta=float(np.broadcast_to(private.delta, len(sizes))[peer]),
    )


def _sizes_of_all(
    agreement: Agreement, peers: np.ndarray, sizes: np.ndarray, root: str | None, whole: bool
) -> np.ndarray:
    """Return how many examples each peer has, as far as all know it: all have to find the same number of bands."""
    scenario = agreement.scenario
    data = scenario.data
    if data.at_least is not None:
        return np.full(scenario.n_peers, data.at_least)
    if len(peers) == scenario.n_peers:
        return sizes
    if data.each_its_own or whole:
        raise ScenarioError(
            "privacy.noise.bands=auto needs the number of every peer's examples, which is private if each has data of "
            "its own: give a number of bands (`privdec plan` shows what they do), or data.at_least",
            code="noise.bands",
        )
    return sizes_of_parts(data, scenario.seed_of("data"), scenario.n_peers, root, agreement.loss.targets)
