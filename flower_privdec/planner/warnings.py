"""What a plan warns of: claims that do not hold, noise that drowns the signal, budgets that end early, costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flower_privdec.common.formatting import duration, epsilon_text, number, peer_ranges, setting
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.noise_balance import balance_note, balance_of, cap_note
from flower_privdec.experiment.spent import budget_note, json_number, shortfall
from flower_privdec.graph.participation import Leaving, activity
from flower_privdec.planner.peers import noise_std
from flower_privdec.privacy.accountant.accounting import epsilon, loose_delta
from flower_privdec.privacy.ledger.spending import spending_of
from flower_privdec.privacy.mechanism.protection import Protection, breaches

WEAK_EPSILON = 10.0
HOPELESS_SIGNAL = 1.5  # in trials, digits at 2.4 reached 38 %, at 1.1 no more than 22 %, near chance
LARGEST_EVALUATION_SHARE = 0.3
LEAST_EVALUATION = 10.0  # seconds, below which its share of the time does not matter
LEAST_INCREASE = 1.01  # of ε over Poisson sampling, below which there is no warning


def best_signal(experiment: Experiment) -> float:
    """Return the signal to noise ratio that a run could reach at best, averaged over the network.

        C sqrt(n T a) / (σ sqrt(d))

    The gradients of T steps, clipped at C and all in one direction, add up to C T; the noise of n peers, a share a of
    them active, with std σ on each of d coordinates, adds up to a norm of σ sqrt(d T / (n a)). C and σ are those of
    the middle round.
    """
    plan = experiment.own.protection
    scenario = experiment.scenario
    sigma = np.median(noise_std(experiment, scenario.rounds // 2))
    if plan is None or sigma == 0:
        return math.inf
    per_round = experiment.algorithm.steps_per_round
    clip = float(np.median(plan.clip_norm(scenario.rounds // 2 * per_round)))
    steps = scenario.rounds * per_round

    # Without an exchange each peer's noise is its own, and no mean makes it smaller.
    together = 1.0
    if experiment.mixing is not None:
        together = float(experiment.participation.chances.sum())  # n a
    return clip * math.sqrt(together * steps) / float(sigma * math.sqrt(experiment.initial.numel()))


def privacy_warnings(experiment: Experiment) -> list[str]:
    """Return warnings about noise and budgets, and about a paper's formula that does not hold."""
    plan = experiment.own.protection
    if plan is None:
        return ["privacy is none: ε = ∞, messages and models may reveal any example"]

    spent = plan.epsilons(experiment.scenario.rounds)
    warnings = [
        *_claims_that_fail(experiment, plan, spent),
        *breaches(plan, with_least=True).values(),
        *_loose_deltas(experiment),
        *_dear_sampling(plan, spent),
    ]
    drowning = balance_note(experiment.scenario, balance_of(experiment))
    if drowning is not None:
        warnings.append(drowning)
    weighing = cap_note(experiment)
    if weighing is not None:
        warnings.append(weighing)

    largest = max(spent)
    if largest > WEAK_EPSILON:
        warnings.append(
            f"ε reaches {epsilon_text(json_number(largest))}, above {WEAK_EPSILON:g}: a weak guarantee; "
            "lower privacy.epsilon or the rounds"
        )
    signal = best_signal(experiment)
    if signal < HOPELESS_SIGNAL:
        warnings.append(
            f"signal to noise over the whole run is {number(signal)} even if all gradients agree, too little "
            "to learn from; take larger batches, more examples a peer, a smaller model or a larger ε"
        )
    return warnings


def _claims_that_fail(experiment: Experiment, plan: Protection, spent: Sequence[float]) -> Iterator[str]:
    """Yield what is wrong with the claims of `calibration: paper`."""
    private = experiment.scenario.private
    rounds = experiment.scenario.rounds
    claims = {peer: claim for peer, claim in enumerate(plan.claims) if claim}
    if not claims or private is None:
        return

    above = [peer for peer, claim in claims.items() if spent[peer] > claim.epsilon]
    if above:
        claimed = [claim.epsilon for claim in claims.values()]
        exact = [spent[peer] for peer in above]
        claimed_text = _range(setting(min(claimed)), setting(max(claimed)))
        exact_text = _range(epsilon_text(json_number(min(exact))), epsilon_text(json_number(max(exact))))
        yield (
            f"calibration paper claims ε = {claimed_text}; the accountant gives ε = {exact_text} for the same noise "
            f"(peers {peer_ranges(above)}): the claim does not hold; calibration rigorous keeps the budget"
        )

    if any(claim.each_round for claim in claims.values()):
        yield (
            f"eq. 27 of PDSL is for one round, and there are {rounds:,}; it divides by φ̂_min, here taken to be "
            f"{setting(private.paper.phi_min)}, which the paper's own eq. 19 makes 0, and the noise infinite; use "
            "calibration rigorous"
        )

    gaussian = [claim for claim in claims.values() if claim.mu_total is not None]
    needed = 1 / float(experiment.own.sampler.sampling_rate.min()) ** 2  # (J/b)²
    if gaussian and rounds < needed:
        formula = "Proposition 4" if gaussian[0].mu_0 is None else "eq. 8"
        if needed < 2 * rounds:
            how_far = "below"
        else:
            how_far = f"{needed / rounds:,.0f} times below"
        yield (
            f"{formula} of Dyn-D2P is a limit for K far above (J/b)² = {needed:,.0f}, and rounds={rounds:,} is "
            f"{how_far} it; use calibration rigorous"
        )


def _range(low: str, high: str) -> str:
    """Return a range as text, or one number if its ends read alike."""
    return low if low == high else f"{low}–{high}"


def _loose_deltas(experiment: Experiment) -> Iterator[str]:
    """Yield a warning if δ is so large for some peer that publishing one of its examples at random would keep it."""
    private = experiment.scenario.private
    if private is None:
        return
    sizes = experiment.own.sampler.partition_sizes
    delta = np.broadcast_to(private.delta, sizes.shape)
    loose = np.flatnonzero(delta * sizes >= 1)
    if len(loose):
        first = loose[0]
        peers = f" (peers {peer_ranges(loose.tolist())})"
        yield loose_delta(float(delta[first]), int(sizes[first]), peers, int(sizes[loose].max()))


def _dear_sampling(plan: Protection, spent: Sequence[float]) -> Iterator[str]:
    """Yield a warning if batches of fixed size cost more ε than Poisson's would, at the dearest peer."""
    largest = max(spent)
    account = plan.accounts[int(np.argmax(spent))]
    releases = [spend.release for spend in account.spends]
    if math.isinf(largest) or not any(release.sampling == "uniform" for release in releases):
        return

    poisson = epsilon([replace(release, sampling="poisson") for release in releases], account.delta)
    if largest > LEAST_INCREASE * poisson:
        yield (
            f"data.batch.sampling uniform costs ε = {epsilon_text(largest)}, and poisson at the same noise costs "
            f"{epsilon_text(poisson)}; use poisson"
        )


def ledger_facts(experiment: Experiment) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what a shared ledger says of the run, and warnings about steps that a budget refuses.

    Returns:
        The ledger's folder and the largest ε of any peer before and after the run, None without a shared ledger; and
        a warning if a budget, or what other runs have spent of it, ends some peer's steps before the plan does.
    """
    private = experiment.scenario.private
    plan = experiment.own.protection
    if private is None or plan is None:
        return None, []

    facts = None
    note = None
    folder = private.ledger or experiment.inherited
    if folder is not None:
        name = experiment.public.name
        spending = spending_of(folder, name, experiment.own.run, plan.accounts, experiment.first_step)
        facts = {
            "folder": str(folder),
            "epsilon_before": json_number(float(spending.epsilons(0).max())),
            "epsilon_after": json_number(float(spending.epsilons(spending.steps).max())),
        }
        note = budget_note(spending, experiment.algorithm.steps_per_round)

    if note is None:
        # Noise from the scenario may use the budget up before the last round.
        rounds = experiment.scenario.rounds
        ends = np.array([account.spends[-1].to_step if account.spends else 0 for account in plan.accounts])
        if (ends < rounds * plan.steps_per_round).any():
            active = activity(experiment.participation, rounds)
            within_budget = np.arange(rounds)[:, None] * plan.steps_per_round < ends  # [rounds, n_peers]
            note = shortfall(experiment.participation, (active & within_budget).sum(axis=0).tolist(), rounds)
    return facts, [] if note is None else [note]


def network_warnings(experiment: Experiment, topology: dict[str, Any] | None) -> list[str]:
    """Return warnings about participation, graph, and the algorithm's settings on them."""
    scenario = experiment.scenario
    warnings = []

    active = int(experiment.participation.active(0).sum())
    if isinstance(experiment.participation, Leaving):
        warnings.append(
            f"{experiment.participation}; the others notice after {experiment.participation.noticed_after} rounds, and "
            "the figures are those of the peers that are there"
        )
    elif experiment.participation.kind != "all":
        warnings.append(
            f"{active} of {scenario.n_peers} peers are active in a round; an adversary sees who is active, so that "
            "amplifies no privacy, and a peer pays for each round in which it is active"
        )

    joint = topology["joint_connectivity"] if topology else None
    if joint is not None and joint > scenario.rounds:
        warnings.append(
            f"rounds={scenario.rounds} end before the graph has joined all peers ({joint} rounds): raise it"
        )

    server = scenario.topology.name == "server"
    return warnings + experiment.algorithm.cautions(active, scenario.n_peers, scenario.rounds, server=server)


def cost_warnings(shortage: str | None, seconds: float | None, evaluation_share: float) -> list[str]:
    """Return warnings about memory and time."""
    warnings = []
    if shortage is not None:
        warnings.append(f"a run would be refused here: {shortage}")

    evaluation = evaluation_share * (seconds or 0.0)
    if evaluation_share > LARGEST_EVALUATION_SHARE and evaluation > LEAST_EVALUATION:
        warnings.append(
            f"evaluation takes {100 * evaluation_share:.0f} % of the time, about {duration(evaluation)}; "
            "raise evaluation.every, or try a sample of the peers (evaluation.peers)"
        )
    return warnings
