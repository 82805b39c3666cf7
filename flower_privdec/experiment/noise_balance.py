"""What each peer's noise costs the model that all share, and weights that bound it.

In a step the mean of the peers' models moves by the mean of their noised gradients, in which peer i *counts* A_i / Σ A:
its learning rate, times its number of examples if the algorithm weighs peers by them. With u_i the noise of its own
gradient, that of the mean is

    N(A) = sqrt(Σ A_i² u_i²) / Σ A_i,     at best 1 / sqrt(Σ 1 / u_i²), for A_i in proportion to 1 / u_i².

A peer with few examples at a common rate, a small budget, a large clip norm or learning rate can have an u_i a hundred
times that of the others, and then it alone decides N. Their quotient, N(A) over the best, is the `excess` here.

`privacy.noise_cap` bounds it. Peer i then takes s_i times its step, with

    s_i in proportion to min(1, t / (A_i u_i²)),

t the largest for which the excess is within the cap, and Σ s_i A_i = Σ A_i. So peers count as they would without the
cap, up to a point, and beyond it as in the best mean. Among all weights that favour no peer more (whose largest
s_i / Σ s A is no larger), none has less noise: it is the minimum of Σ (s_i A_i u_i)² on a simplex with upper bounds,
whose solution is cut off at those. ∎

What is then computed is the mean of the peers' gradients with the weights s_i A_i: the model fits the data of noisy
peers less. It is no unbiased estimate of the mean with the weights A_i, and has no need to be of any other.

Privacy: s_i multiplies a peer's sum after its noise was added, so it costs no ε. It follows from clip norms, noise
multipliers, learning rates, sampling rates and expected batch sizes, which all are public here (adjacency is zero-out,
under which the number of a peer's examples is). If that number is private, all peers count as if they had the least
that all know of (`data.at_least`), or the key is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import number, peers_named, percent
from flower_privdec.core.cohort import LearningRate
from flower_privdec.data import Sampler
from flower_privdec.data.datasets import sizes_of_parts
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.correlation_plan import correlation_of
from flower_privdec.experiment.drawings import drawings_of, sampler_of_all
from flower_privdec.graph.participation import activity
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.correlation import Correlation
from flower_privdec.privacy.mechanism.protection import Protection, build_protection
from flower_privdec.privacy.noise import noise_mechanism
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import why_no_noise_cap

if TYPE_CHECKING:
    from flower_privdec.experiment.view import Experiment

MOST_EXCESS = 1.4  # above which there is a warning: the mean has twice the variance that it need have
ADVISED = 1.2  # the cap that the warning names
LEAST_SHARE = 1e-9  # of its step, below which a peer does not take part in any sense
HARDLY = 0.1  # of what it counts without a cap, below which a peer's data are hardly learned
HALVINGS = 200


@dataclass(frozen=True)
class Balance:
    """How the noise of all peers adds up in the mean of their models.

    Attributes:
        counts: A_i, how much each peer's gradient counts, float64 [n_peers]; 0 for one that takes no step.
        noise: u_i, the standard deviation of the noise of each peer's mean gradient, in a coordinate.
        rounds: in how many rounds each peer is active.
        multipliers, clip_norms, batches, rates: what the noise follows from: noise multiplier, clip norm, expected
            batch size and learning rate.
    """

    counts: np.ndarray
    noise: np.ndarray
    rounds: np.ndarray
    multipliers: np.ndarray
    clip_norms: np.ndarray
    batches: np.ndarray
    rates: np.ndarray

    @classmethod
    def of(
        cls, agreement: Agreement, sampler: Sampler, protection: Protection, learning_rate: LearningRate
    ) -> Balance | None:
        """Return the balance of all peers; None if they share no model, or nothing has noise.

        Args:
            sampler, protection: of all peers.
            learning_rate: the rate by which their steps are taken.
        """
        if agreement.mixing is None:
            return None

        # The schedule of clip norms, noise and rates is common to all, so that any step shows how peers differ.
        step = len(protection.clip_norms) - 1
        clip_norms = protection.clip_norm(step)
        multipliers = protection.noise_multiplier(step)
        noise = clip_norms * multipliers / sampler.normalizer
        takes_steps = np.array([bool(account.spends) for account in protection.accounts])
        if not takes_steps.any() or not (noise[takes_steps] > 0).all():
            return None

        of_examples = agreement.algorithm.conserved_weights(sampler.partition_sizes)
        return cls(
            counts=np.where(takes_steps, of_examples * learning_rate.base, 0.0),
            noise=noise,
            rounds=activity(agreement.participation, agreement.scenario.rounds).sum(axis=0),
            multipliers=multipliers,
            clip_norms=clip_norms,
            batches=sampler.normalizer,
            rates=learning_rate.base,
        )

    @property
    def excess(self) -> float:
        """N over the least that any weights allow, >= 1."""
        return excess(self.counts, self.noise)

    @property
    def weights(self) -> np.ndarray:
        """A / Σ A: how much each peer's gradient counts in the mean, [n_peers]."""
        return np.asarray(self.counts / self.counts.sum())

    @property
    def shares(self) -> np.ndarray:
        """The share of the noise in the final mean that each peer causes, as variance, [n_peers]."""
        # Divided first, so that squares of small numbers do not vanish.
        amounts = self.counts * self.noise
        variance = np.square(amounts / amounts.max()) * self.rounds
        return np.asarray(variance / max(variance.sum(), 1e-300))

    @property
    def loud(self) -> np.ndarray:
        """The peers that count more than twice what they would in the best mean, ascending."""
        best = np.where(self.counts > 0, np.square(self.noise.min() / self.noise), 0.0)
        is_loud = self.weights > 2 * best / best.sum()
        return np.flatnonzero(is_loud)


def excess(counts: np.ndarray, noise: np.ndarray) -> float:
    """Return N(A) over its least value, for A and u of the peers; those with A = 0 do not exist."""
    there = counts > 0
    counts = counts[there] / counts.max()
    noise = noise[there] / noise[there].min()
    std = math.sqrt(float(np.square(counts * noise).sum())) / float(counts.sum())
    best = 1 / math.sqrt(float((1 / np.square(noise)).sum()))
    return std / best


def capped(counts: np.ndarray, noise: np.ndarray, cap: float) -> np.ndarray:
    """Return s, [n_peers]: by how much each peer's step is multiplied so that the excess is within a cap >= 1.

    Args:
        counts: A, 0 for a peer that takes no step, whose s is 1.
        noise: u.
    """
    if excess(counts, noise) <= cap:
        return np.ones(len(counts))

    there = counts > 0
    small = counts[there] / counts.max()
    alone = np.square(noise[there].min() / noise[there]) / small  # s of the best mean, in some unit

    # Between the best mean and the one without a cap the excess grows with t. Logarithms, for t spans any range.
    low = math.log(float(alone.max())) * -1
    high = -math.log(float(alone.min()))

    def shares(log_t: float) -> np.ndarray:
        return np.asarray(np.minimum(1.0, np.exp(np.log(alone) + log_t)))

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if excess(small * shares(middle), noise[there]) <= cap:
            low = middle
        else:
            high = middle

    shared = shares(low)
    factors = np.ones(len(counts))
    factors[there] = shared * float(small.sum()) / float((small * shared).sum())
    return factors


def protection_of(
    agreement: Agreement,
    sampler: Sampler,
    correlation: Correlation | None,
    plan_pairs: Callable[[np.ndarray], PairPlan] | None = None,
) -> Protection:
    """Return the clipping, noise and accounts of the peers of a sampler, solved from their budgets.

    Args:
        plan_pairs: see `build_protection`.
    """
    scenario = agreement.scenario
    private = scenario.private
    assert private is not None

    weight_factor = 1.0
    if agreement.mixing is not None:
        weight_factor = agreement.algorithm.weight_factor(agreement.mixing, scenario.rounds)
    return build_protection(
        scenario,
        private,
        agreement.algorithm,
        drawings_of(agreement, sampler.peers, sampler),
        agreement.participation,
        sampler.peers,
        weight_factor,
        noise_mechanism(private.noise, correlation=correlation).released,
        plan_pairs,
    )


def balance_before_pairs(agreement: Agreement, sampler: Sampler, correlation: Correlation | None) -> Balance | None:
    """Return the balance of the noise that each peer would need by itself.

    Args:
        sampler: of all peers, as far as all know them.
    """
    protection = protection_of(agreement, sampler, correlation)
    return Balance.of(agreement, sampler, protection, agreement.learning_rate)


def balance_of(experiment: Experiment) -> Balance | None:
    """Return the balance of an experiment of all peers; None if some are elsewhere, or nothing has noise."""
    own = experiment.own
    if own.protection is None or len(own.peers) < experiment.scenario.n_peers:
        return None
    return Balance.of(experiment, own.sampler, own.protection, own.learning_rate)


def public_balance(agreement: Agreement) -> Balance | None:
    """Return the balance as a process knows it that holds no peer's examples; None if it depends on what is private."""
    scenario = agreement.scenario
    data = scenario.data
    if scenario.private is None or data.each_its_own or data.at_least is not None:
        return None

    sizes = sizes_of_parts(data, scenario.seed_of("data"), scenario.n_peers, None, agreement.loss.targets)
    correlation = correlation_of(agreement, np.arange(scenario.n_peers), sizes, None, whole=False)
    groups = 1 if correlation is None else correlation.bands
    sampler = sampler_of_all(agreement, None, whole=False, groups=groups)
    balance = balance_before_pairs(agreement, sampler, correlation)
    if balance is None or scenario.private.noise_cap is None:
        return balance
    capped = capped_rate(balance, agreement.learning_rate, scenario.private.noise_cap)
    return replace(balance, counts=balance.counts * capped.base / agreement.learning_rate.base, rates=capped.base)


def capped_rate(balance: Balance | None, learning_rate: LearningRate, cap: float) -> LearningRate:
    """Return the learning rate with which the noise of the mean is within a cap.

    Raises:
        ScenarioError: a peer has so much noise that it would not take part.
    """
    if balance is None:
        return learning_rate
    factors = capped(balance.counts, balance.noise, cap)
    least = int(factors.argmin())
    if factors[least] < LEAST_SHARE:
        raise ScenarioError(
            f"privacy.noise_cap={cap:g}: peer {least} has {number(float(balance.noise[least] / balance.noise.min()))} "
            "times the noise of another and would count for nothing; give it more examples or a larger budget, or "
            "leave it out",
            code="privacy.noise-cap-nothing",
        )
    return replace(learning_rate, base=learning_rate.base * factors)


def balance_note(scenario: Scenario, balance: Balance | None) -> str | None:
    """Return a warning about peers whose noise drowns the others, with remedies; None if there are none."""
    if balance is None or balance.excess <= MOST_EXCESS or not len(balance.loud):
        return None

    loud = balance.loud
    named = peers_named(loud.tolist())
    cause, remedy = _cause(balance, loud)
    if why_no_noise_cap(scenario) is not None:
        # What part of it ends up in the model depends on more than rates.
        others = np.setdiff1d(np.flatnonzero(balance.counts > 0), loud)
        times = float(np.median(balance.noise[loud]) / np.median(balance.noise[others]))
        return f"{named} may drown the others in noise, with {number(times)} times theirs ({cause}): {remedy}"

    share = percent(float(balance.shares[loud].sum()))
    return (
        f"{named} may drown the others in noise: {share} of the noise in the model that all share comes from there, "
        f"and makes it {number(balance.excess)} times what it need be ({cause}); set privacy.noise_cap={ADVISED:g}, by "
        f"which peers with more noise count less, or {remedy}"
    )


def cap_note(experiment: Experiment) -> str | None:
    """Return a warning about a noise cap that changes nothing, or leaves some peers' data hardly learned."""
    private = experiment.scenario.private
    balance = balance_of(experiment)
    if private is None or private.noise_cap is None or balance is None:
        return None

    # What the cap made of each peer's rate, and so of what it counts.
    uncapped = experiment.algorithm.step_sizes(experiment.scenario.n_peers, experiment.scenario.rounds)
    factors = balance.rates / uncapped.base
    named = f"privacy.noise_cap={private.noise_cap:g}"
    if (factors == 1).all():
        return (
            f"{named} has no effect: the noise in the mean is {number(balance.excess)} times the least without it; "
            "remove it, or lower it"
        )

    hardly = np.flatnonzero(factors < HARDLY)
    if not len(hardly):
        return None
    before = balance.counts / factors
    share = float(before[hardly].sum() / before.sum())
    verb = "counts" if len(hardly) == 1 else "count"
    return (
        f"{named}: {peers_named(hardly.tolist())} {verb} for {percent(float(balance.weights[hardly].sum()))} of the "
        f"model that all share, and for {percent(share)} without the cap, so that hardly anything is learned from "
        "there; raise the cap, or give such peers a larger budget or more examples"
    )


def _cause(balance: Balance, loud: Sequence[int] | np.ndarray) -> tuple[str, str]:
    """Return why some peers have so much noise, as the quotient that is farthest from the others', and the remedy."""
    others = np.setdiff1d(np.flatnonzero(balance.counts > 0), loud)

    def quotient(values: np.ndarray) -> float:
        return float(np.median(values[loud]) / np.median(values[others]))

    batch = quotient(balance.batches)
    multiplier = quotient(balance.multipliers)
    clip_norm = quotient(balance.clip_norms)
    rate = quotient(balance.rates)
    causes = [
        (
            1 / batch,
            f"batches of {number(float(np.median(balance.batches[loud])))} examples on average, where the others have "
            f"{number(float(np.median(balance.batches[others])))}",
            "give more examples there, or leave such peers out",
        ),
        (
            multiplier,
            f"their budgets and sampling ask for {number(multiplier)} times the others' noise multiplier",
            "raise privacy.epsilon there, or draw a smaller share of the examples",
        ),
        (clip_norm, f"{number(clip_norm)} times the others' clip norm", "lower privacy.clip_norm there"),
        (rate, f"{number(rate)} times the others' learning rate", "lower algorithm.learning_rate there"),
    ]
    _, text, remedy = max(causes)
    return text, remedy
