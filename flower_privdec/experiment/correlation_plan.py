"""How the noise of a run is correlated over its steps: what its scenario says, or what is best for its budgets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.data import Sampler
from flower_privdec.data.datasets import sizes_of_parts
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.pair_plan import left_by_mixing, secret_pairs, why_by_partners
from flower_privdec.graph.mixing_speed import MOST_MEASURED
from flower_privdec.privacy.mechanism.cancelling import (
    AS_INDEPENDENT,
    HORIZON,
    LEFT_BY_RESTART,
    STRENGTHS,
    Lasting,
    Trade,
    solve_by_partners,
    solve_pairs,
    trades,
)
from flower_privdec.privacy.mechanism.correlation import (
    CANDIDATES,
    INDEPENDENT_STEPS,
    BandChoice,
    Correlation,
    Workload,
    best_choice,
    best_correlation,
    choices,
)
from flower_privdec.scenario.sections import CancellingSection


def correlation_of(
    agreement: Agreement, peers: np.ndarray, sizes: np.ndarray, root: str | None, whole: bool, deployed: bool = False
) -> Correlation | None:
    """Return how noise is correlated, the same at all peers; None if the scenario does not say so.

    Args:
        peers: the peers hosted here.
        sizes: how many examples these have.
        root, whole: see `OwnParts.of`.
        deployed: whether each peer is a process of its own.

    Raises:
        ScenarioError: `bands: auto`, and no one knows how many examples all peers have.
    """
    private = agreement.scenario.private
    if private is None or private.correlated_noise is None:
        return None

    bands = private.correlated_noise.bands
    if bands == "auto":
        sizes = _sizes_of_all(agreement, peers, sizes, root, whole)
        return best_choice(choices_for(agreement, sizes, deployed)).correlation
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


def lasting_of(agreement: Agreement, correlation: Correlation | None) -> Lasting:
    """Return how correlation changes the variances by which strengths of shared noise are compared."""
    if correlation is None or correlation.bands == 1:
        return AS_INDEPENDENT

    workload = workload_of(agreement)
    mean = (workload.on_average(correlation) / workload.on_average(INDEPENDENT_STEPS)) ** 2
    step = float(np.square(correlation.response).sum())

    # When a partner is gone, rest[i] of a draw of i steps before is still to come from only one end: of a draw that it
    # misses now, rest[0], the sum of all of a. `Trade.restart` is of LEFT_BY_RESTART draws that it misses.
    rest = np.cumsum(correlation.response[::-1])[::-1]
    earlier = float(np.square(rest[1:]).sum())
    missed = float(rest[0]) ** 2 + earlier / LEFT_BY_RESTART
    return Lasting(mean, step, missed)


def choices_for(agreement: Agreement, sizes: np.ndarray, deployed: bool = False) -> list[BandChoice]:
    """Return what different numbers of bands would do, at the budget of the peer with the median number of examples.

    Args:
        sizes: how many examples each peer has, or a number that all are known to have.
        deployed: whether each peer is a process of its own.
    """
    scenario = agreement.scenario
    private = scenario.private
    assert private is not None
    assert private.epsilon is not None

    # Nothing is drawn by this sampler: it is here for its rates and sizes.
    everyone = np.arange(len(sizes))
    sampler = Sampler(scenario.data.batch, sizes, dict.fromkeys(everyone.tolist(), scenario.seed_of("run")), everyone)
    most = int(1 / sampler.sampling_rate.max() * (1 + 1e-12))
    peer = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    workload = workload_of(agreement)
    found = choices(
        workload,
        [bands for bands in CANDIDATES if bands <= most],
        size=int(sizes[peer]),
        rate=float(sampler.sampling_rate[peer]),
        batch=float(sampler.normalizer[peer]),
        epsilon=float(np.broadcast_to(private.epsilon, len(sizes))[peer]),
        delta=float(np.broadcast_to(private.delta, len(sizes))[peer]),
    )
    if not isinstance(private.noise, CancellingSection):
        return found

    shared = _Shared(agreement, deployed)
    return [replace(one, in_models=shared.in_models(one.correlation, one.noise_multiplier)) for one in found]


def noise_in_models(agreement: Agreement, correlation: Correlation, noise: float) -> float:
    """Return the noise in the models as `choices_for` does (`BandChoice.in_models`), for a noise multiplier of z."""
    private = agreement.scenario.private
    assert private is not None
    if isinstance(private.noise, CancellingSection):
        return _Shared(agreement, deployed=False).in_models(correlation, noise)
    return noise * workload_of(agreement).on_average(correlation)


class _Shared:
    """The noise in the models if peers share noise, for any correlation over steps.

    Correlation has two effects. The noise in the mean, which stays, gets less. What peers share, which is gone after
    some exchanges, gets more, because each single step is noisier. All peers are taken to be alike.
    """

    def __init__(self, agreement: Agreement, deployed: bool) -> None:
        scenario = agreement.scenario
        private = scenario.private
        assert private is not None
        section = private.noise
        assert isinstance(section, CancellingSection)
        if scenario.n_peers > MOST_MEASURED:
            raise ScenarioError(
                f"privacy.noise.bands=auto must have {MOST_MEASURED} peers at most, not n_peers={scenario.n_peers}: "
                "give it a number",
                code="noise.bands",
            )

        by_partners = bool(why_by_partners(scenario, deployed))
        self._agreement = agreement
        self._may_miss = deployed or section.absent > 0
        self._trades: list[Trade] = trades(
            np.ones(scenario.n_peers),
            secret_pairs(scenario),
            section.colluding + by_partners * section.absent,
            left_by_mixing(agreement),
            solve_by_partners if by_partners else solve_pairs,
            STRENGTHS if section.strength == "auto" else [section.strength],
        )

    def in_models(self, correlation: Correlation, noise: float) -> float:
        """Return the noise in the models at the best strength, in the unit of `BandChoice.in_models`."""
        lasting = lasting_of(self._agreement, correlation)
        error = min(trade.error(deployed=self._may_miss, lasting=lasting) for trade in self._trades)
        return noise * math.sqrt(error / HORIZON)


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
