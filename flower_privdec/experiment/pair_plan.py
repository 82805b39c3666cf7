"""Which pairs of peers share secrets, and how much of their noise cancels between them."""

from __future__ import annotations

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Exchange, Mix
from flower_privdec.data import Sampler
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.drawings import KIND, drawings_of
from flower_privdec.graph.mixing_speed import disagreement_left
from flower_privdec.graph.participation import Leaving
from flower_privdec.graph.topology import build_topology
from flower_privdec.privacy.mechanism.cancelling import (
    AS_INDEPENDENT,
    Lasting,
    PairPlan,
    Trade,
    best_strength,
    solve_by_partners,
    solve_pairs,
    trades,
)
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CancellingSection


def secret_pairs(scenario: Scenario) -> np.ndarray:
    """Return the pairs of peers that share a secret, int64 [E, 2], the lower id first; none without such noise."""
    section = None if scenario.private is None else scenario.private.noise
    if not isinstance(section, CancellingSection) or scenario.n_peers == 1:
        return np.zeros((0, 2), dtype=np.int64)

    secrets = section.secrets
    graph = build_topology(secrets.name, scenario.n_peers, seed=scenario.seed_of("run"), **secrets.options())
    lower_id_first = np.sort(graph.support(), axis=1)
    return np.asarray(np.unique(lower_id_first, axis=0))


def partners(scenario: Scenario, peers: np.ndarray) -> dict[int, int]:
    """Return the peers elsewhere that share a secret with some of these, and for each the lowest of these that does."""
    first = dict[int, int]()
    both_ways = [pair for low, high in secret_pairs(scenario).tolist() for pair in ((low, high), (high, low))]
    for own, other in sorted(both_ways):
        if own in peers and other not in peers:
            first.setdefault(other, own)
    return dict(sorted(first.items()))


def pair_plan(
    agreement: Agreement,
    sampler: Sampler,
    deployed: bool,
    needed: np.ndarray,
    lasting: Lasting = AS_INDEPENDENT,
) -> PairPlan:
    """Plan the noise that pairs of peers share.

    Args:
        sampler: the sampler of all peers.
        deployed: whether each peer is a process of its own.
        needed: the noise that each peer needs by itself in every step, over the factor of its sums, [steps, n_peers].
        lasting: what correlation over steps makes of it.

    Raises:
        ScenarioError: the algorithm's exchanges do not conserve a sum.
    """
    scenario = agreement.scenario
    assert scenario.private is not None
    section = scenario.private.noise
    assert isinstance(section, CancellingSection)
    _check_sum_is_conserved(agreement, sampler)
    _check_enough_are_left(section, scenario.n_peers)
    by_partners = why_by_partners(scenario, deployed)

    steps_per_round = agreement.algorithm.steps_per_round
    rates = np.abs(agreement.learning_rate.of_rounds(scenario.rounds)).repeat(steps_per_round, axis=0)
    weights = agreement.algorithm.conserved_weights(sampler.partition_sizes)
    needed = needed * weights * rates / sampler.normalizer  # as it is in the conserved sum
    edges = secret_pairs(scenario)

    choices: list[Trade] = []
    if section.strength == "auto":
        first_step = int(needed.any(axis=1).argmax())
        left = left_by_mixing(agreement)
        if by_partners:
            choices = trades(needed[first_step], edges, section.colluding + section.absent, left, solve_by_partners)
        else:
            choices = trades(needed[first_step], edges, section.colluding, left, solve_pairs)

    if choices:
        # Peers that restart or leave keep some of what they share in the mean.
        may_leave = deployed or section.absent > 0 or bool(scenario.participation.leaving)
        strength = best_strength(choices, deployed=may_leave, lasting=lasting)
    else:
        strength = float(section.strength)

    return PairPlan(
        edges=edges,
        colluding=section.colluding,
        strength=strength,
        needed=needed,
        weights=weights,
        same_rates=bool(np.ptp(agreement.learning_rate.base) == 0),
        trades=tuple(choices),
        sizes=sampler.partition_sizes,
        by_partners=by_partners,
        absent=section.absent,
        dropped=_dropped(agreement),
        lasting=lasting,
    )


def left_by_mixing(agreement: Agreement) -> float:
    """Return how much of the noise of pairs is in the peers' models at their steps, over that of one step."""
    assert agreement.mixing is not None
    assert agreement.scenario.private is not None
    section = agreement.scenario.private.noise
    assert isinstance(section, CancellingSection)
    # A round's later local steps see the noise of those before them, whatever is mixed after.
    steps_per_round = agreement.algorithm.steps_per_round
    mixed = disagreement_left(agreement.mixing, section.absent)
    return steps_per_round * mixed + (steps_per_round - 1) / 2


def _dropped(agreement: Agreement) -> np.ndarray | None:
    """Return in which steps nobody counts on a peer that left, bool [steps, n_peers]; None if nobody leaves."""
    participation = agreement.participation
    if not isinstance(participation, Leaving):
        return None
    of_rounds = np.stack([participation.noticed(k) for k in range(agreement.scenario.rounds)])
    return of_rounds.repeat(agreement.algorithm.steps_per_round, axis=0)


def why_by_partners(scenario: Scenario, deployed: bool) -> str:
    """Return why noise is counted by each peer's own partners; "" if all peers are known to take every step."""
    assert scenario.private is not None
    section = scenario.private.noise
    assert isinstance(section, CancellingSection)
    if deployed:
        return "peers that are machines may restart, stay away or leave"
    if section.absent:
        return f"privacy.noise.absent={section.absent}"
    if scenario.participation.leaving:
        return "participation.leaving: some peers leave"
    if scenario.participation.kind != "all":
        return f"participation.kind={scenario.participation.kind}: not all peers take every step"
    return ""


def _check_enough_are_left(section: CancellingSection, n_peers: int) -> None:
    """Refuse more colluding and absent peers than leave somebody to hide a peer."""
    others = n_peers - 1
    if section.colluding > others:
        raise ScenarioError(
            f"privacy.noise.colluding={section.colluding} must be < n_peers={n_peers}: all others are {others}",
            code="noise.colluding",
        )
    if section.absent and section.colluding + section.absent >= others:
        raise ScenarioError(
            f"privacy.noise.absent={section.absent} and colluding={section.colluding} must leave at least one of the "
            f"{others} other peers, whose noise hides a peer: lower absent, or leave it out",
            code="noise.absent",
        )


def _check_sum_is_conserved(agreement: Agreement, sampler: Sampler) -> None:
    """Refuse an algorithm that does anything but mix: only in a sum that mixing conserves does noise cancel."""
    algorithm = agreement.algorithm
    exchanges = [item for item in algorithm.program if isinstance(item, Exchange)]
    drawing = drawings_of(agreement, sampler.peers, sampler)[0]
    sends_to_one = any(part.to == "neighbour" for part in algorithm.released(0, drawing) or ())
    only_mixes = all(isinstance(exchange, Mix) for exchange in exchanges)

    if exchanges and only_mixes and not sends_to_one:
        return
    why = "exchanges nothing"
    if exchanges:
        why = "sends more than what is mixed, of which no sum is conserved"
    raise ScenarioError(
        f"{KIND} with algorithm.name={algorithm.name}, which {why}: leave privacy.noise out, or take privsgp",
        code="noise.cancelling-sum",
    )
