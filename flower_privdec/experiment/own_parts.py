"""The private parts of the peers that one process hosts: examples, batches, keys, clipping, noise and accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.core.cohort import LearningRate
from flower_privdec.data import Examples, Sampler
from flower_privdec.data.datasets import check_fit
from flower_privdec.experiment import run_name
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.correlation_plan import correlation_of, lasting_of
from flower_privdec.experiment.drawings import drawings_of, sampler_of_all
from flower_privdec.experiment.noise_balance import balance_before_pairs, capped_rate, protection_of
from flower_privdec.experiment.pair_plan import pair_plan
from flower_privdec.experiment.run_key import SYSTEM, noise_source, run_id, salted
from flower_privdec.experiment.run_name import name_run, read_own, with_features, without_content
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.correlation import Correlation
from flower_privdec.privacy.mechanism.declared import MOST_INFLATION, OTHER, Declares, Drawing, rounding_error
from flower_privdec.privacy.mechanism.peer_mechanism import each, is_always
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import CancellingSection, placed

ENGINE = "engine"  # the runtime in which one process hosts all peers
NETWORK = "network"  # the runtime in which each peer is a process of its own and agrees on secrets with its neighbours
STEP_BYTES = 100  # of every step of every peer, at the peak: clip norms, noise and what is made of them


@dataclass(frozen=True)
class OwnParts:
    """The own parts of the peers that one process hosts, and of no other; row i is peer `peers[i]`.

    Attributes:
        peers: global ids, int64 [m], ascending.
        examples: only those of these peers.
        keys: what each peer's noise and batches are drawn from, by global id, see `run_key`.
        run: what ledgers and checkpoints call their run.
        learning_rate: γ of all peers, with which the hosted ones take their steps; that of the agreement, unless peers
            count by their noise (`noise_balance`).
        protection: their clipping, noise and accounts; None without privacy.
        from_system: whether batches and noise come from the operating system, and never repeat.
        noise_inflation: by what share hardened noise is larger; None without `privacy.hardened`.
        elsewhere: keys of the peers hosted elsewhere, if a simulation draws noise of pairs from them.
        unsalted: `keys` and `elsewhere` before a salt went into them; None for a run without a salt.
    """

    peers: np.ndarray
    examples: Examples
    sampler: Sampler
    keys: Mapping[int, bytes]
    run: RunName
    learning_rate: LearningRate
    protection: Protection | None
    from_system: bool = False
    noise_inflation: float | None = None
    elsewhere: Mapping[int, bytes] = field(default_factory=dict)
    unsalted: tuple[Mapping[int, bytes], Mapping[int, bytes]] | None = None

    @staticmethod
    @placed
    def of(
        agreement: Agreement,
        peers: np.ndarray | None = None,
        secret: bytes | None = None,
        root: str | None = None,
        runtime: str = ENGINE,
        *,
        whole: bool = False,
        salt: str | None = None,
    ) -> OwnParts:
        """Read, name and protect the own parts of some peers.

        Args:
            peers: global ids; by default all.
            secret: for a deployed peer, known to no other: the run's name follows from it, and its batches and noise
                come from the operating system. None for a simulation, whose numbers can be drawn again unless the
                scenario has `compute.generator: system`.
            root: where their data lie, in place of the scenario's `data.root`.
            runtime: which processes of a simulation host which peers: it decides how sums are rounded, see `rounding`.
            whole: whether all data there belong to the one peer, so that nothing is partitioned.
            salt: that of the run, if other processes host other peers of it; a new one if all are hosted here.

        Raises:
            ScenarioError: when their data cannot be had or do not fit, or a budget cannot be kept.
        """
        scenario = agreement.scenario
        if peers is None:
            peers = np.arange(scenario.n_peers)
        peers = np.sort(np.asarray(peers, dtype=np.int64))
        _check_plan_fits_into_memory(scenario, len(peers))

        as_read = read_own(agreement, peers, root, whole=whole)
        examples = with_features(agreement, as_read)
        check_fit(examples, agreement.public, scenario.data.root if root is None else root)
        _check_least_size(scenario, peers, examples.sizes)

        deployed = runtime == NETWORK or secret is not None
        correlation = correlation_of(agreement, peers, examples.sizes, root, whole, deployed)
        from_system = secret is not None or scenario.compute.generator == SYSTEM
        named = name_run(agreement, as_read, peers, secret, from_system, runtime, root=root, whole=whole)
        own = OwnParts(
            peers=peers,
            examples=examples,
            sampler=_sampler(scenario, examples, peers, named.keys, correlation),
            keys=named.keys,
            run=named.name,
            learning_rate=agreement.learning_rate,
            protection=None,
            from_system=from_system,
            elsewhere=named.elsewhere,
        )
        if scenario.private is not None:
            own = _protected(own, agreement, deployed, root, whole, correlation)

        if from_system or not without_content(agreement):
            return own
        if salt is None:
            _check_hosts_all(agreement, peers, runtime)
            salt = run_name.new_salt()
        return replace(own, unsalted=(own.keys, own.elsewhere)).with_salt(salt)

    def with_salt(self, salt: str) -> OwnParts:
        """Return a copy whose keys have this salt; itself for a run without a salt."""
        if self.unsalted is None:
            return self
        unsalted_keys, unsalted_elsewhere = self.unsalted
        keys = salted(unsalted_keys, salt)
        elsewhere = salted(unsalted_elsewhere, salt)
        return replace(self, keys=keys, elsewhere=elsewhere, sampler=self.sampler.like(keys=keys))

    def with_new_salt(self) -> OwnParts:
        """Return a copy with keys that no other process has had; itself for a run without a salt."""
        return self.with_salt(run_name.new_salt())

    @property
    def draws_anew(self) -> bool:
        """Return whether each process that begins or resumes the run draws numbers of its own, and pays for them."""
        return self.from_system or self.unsalted is not None

    @property
    def pairs_id(self) -> str:
        """Return a hash of the keys from which a simulation draws noise of pairs; "" if it draws none from them."""
        return run_id({**self.elsewhere, **self.keys}) if self.elsewhere else ""

    @property
    def source(self) -> str:
        """Return where the noise comes from, as `run_key.environment` names it."""
        return noise_source(self.from_system, self.noise_inflation is not None)


def _check_plan_fits_into_memory(scenario: Scenario, n_peers: int) -> None:
    if scenario.private is None:
        return
    steps = scenario.rounds * scenario.algorithm.steps_per_round
    what = f"rounds={scenario.rounds}: the noise and clip norms of {steps:,} steps of {n_peers:,} peers"
    check_room(STEP_BYTES * steps * n_peers, what, "take fewer rounds, local steps or peers")


def _check_least_size(scenario: Scenario, peers: np.ndarray, sizes: np.ndarray) -> None:
    """Refuse a peer with fewer examples than all others plan for."""
    least = scenario.data.at_least
    smallest = int(np.argmin(sizes))
    if least is not None and sizes[smallest] < least:
        raise ScenarioError(
            f"data.at_least={least} must be <= {sizes[smallest]}, what peer {peers[smallest]} holds: "
            "lower it in the scenario of all peers, or leave this peer out",
            code="data.at-least",
        )


def _sampler(
    scenario: Scenario,
    examples: Examples,
    peers: np.ndarray,
    keys: Mapping[int, bytes],
    correlation: Correlation | None,
) -> Sampler:
    """Return how the peers draw batches: with privacy by the keys of the run, else by the seed, whatever is run."""
    if scenario.private is None:
        seeds = dict.fromkeys(peers.tolist(), scenario.seed_of("run"))
        return Sampler(scenario.data.batch, examples.sizes, seeds, peers)
    groups = 1 if correlation is None else correlation.bands
    return Sampler(scenario.data.batch, examples.sizes, keys, peers, groups)


def _protected(
    own: OwnParts,
    agreement: Agreement,
    deployed: bool,
    root: str | None,
    whole: bool,
    correlation: Correlation | None,
) -> OwnParts:
    """Solve the noise of some peers from their budgets, and check that its numbers can be held."""
    scenario = agreement.scenario
    private = scenario.private
    assert private is not None
    algorithm = agreement.algorithm

    if private.noise_cap is not None:
        everyone = own.sampler
        if len(own.peers) < scenario.n_peers or scenario.data.at_least:
            everyone = sampler_of_all(agreement, root, whole, own.sampler.groups, "privacy.noise_cap")
        balance = balance_before_pairs(agreement, everyone, correlation)
        capped = capped_rate(balance, agreement.learning_rate, private.noise_cap)
        own = replace(own, learning_rate=capped)
        agreement = replace(agreement, learning_rate=capped)

    # Noise that cancels is planned for all peers together, from what all know of each other.
    sampler = own.sampler
    cancels = isinstance(private.noise, CancellingSection)
    if cancels and (len(own.peers) < scenario.n_peers or scenario.data.at_least):
        sampler = sampler_of_all(agreement, root, whole, own.sampler.groups)
    plan_pairs: Callable[[np.ndarray], PairPlan] | None = None
    if cancels:
        lasting = lasting_of(agreement, correlation)
        plan_pairs = partial(pair_plan, agreement, sampler, deployed, lasting=lasting)

    protection = protection_of(agreement, sampler, correlation, plan_pairs)
    protection = replace(protection, correlation=correlation)
    if len(sampler.peers) > len(own.peers):
        protection = protection.part(int(own.peers[0]), int(own.peers[-1]) + 1)

    inflation = None
    if private.hardened:
        drawings = drawings_of(agreement, own.peers, own.sampler)
        steps = scenario.rounds * algorithm.steps_per_round
        inflation = noise_inflation(algorithm, drawings, steps, agreement.initial.dtype)

    rates = replace(own.learning_rate, base=own.learning_rate.base[own.peers])
    check_number_range(protection, rates, own.examples.sizes, own.sampler.normalizer)
    return replace(own, protection=protection, noise_inflation=inflation)


def _check_hosts_all(agreement: Agreement, peers: np.ndarray, runtime: str) -> None:
    """Refuse to make up a salt for some peers of a run: other processes, with others, would make up another."""
    if len(peers) == agreement.scenario.n_peers:
        return
    remedy = "set compute.generator=system, or run all peers in one process (`privdec run`)"
    if runtime == NETWORK:
        remedy = "leave --insecure-seeds out"
    raise ScenarioError(
        f"{' and '.join(without_content(agreement))}: a run with code of one's own has a random salt in the "
        f"keys of its noise, which this process of it was not given; {remedy}",
        code="run.salt",
    )


# What float32 holds is 2^-126 to 2^128; `gradients.protocol` says why the limits are narrower.
LEAST_FACTOR = 1e-15
MOST_FACTOR = 1e30


def check_number_range(plan: Protection, learning_rate: LearningRate, sizes: np.ndarray, batches: np.ndarray) -> None:
    """Check every number that a step multiplies clipped gradients and noise by.

    Args:
        sizes: examples of each peer, int64 [n_peers].
        batches: expected batch size of each peer, float64 [n_peers].

    Raises:
        ScenarioError: the message names the first quantity that is out of range.
    """
    rounds = len(plan.clip_norms) // plan.steps_per_round
    rates = each(learning_rate.of_rounds(rounds), plan.steps_per_round)  # [steps, n_peers]
    clip_norms = plan.clip_norms
    multipliers = plan.noise_multipliers
    if is_always(rates) and is_always(clip_norms) and is_always(multipliers):
        # All steps are as the first.
        rates = rates[:1]
        clip_norms = clip_norms[:1]
        multipliers = multipliers[:1]

    # Infinity is out of range like any other number that is too large, and needs no warning.
    with np.errstate(over="ignore"):
        one_example = rates / batches * clip_norms
        all_examples = one_example * sizes
        noises = [one_example * multipliers]
        if plan.receivers:  # what goes to each neighbour is not multiplied by the learning rate
            noises.append(clip_norms / batches * multipliers)

    _check("privacy.clip_norm", clip_norms)
    _check("algorithm.learning_rate, over the batch size, times privacy.clip_norm", one_example)
    _check("algorithm.learning_rate", rates)
    _check("the learning rate, times the clip norm, of all a peer's examples", all_examples)
    for noise in noises:
        _check("the noise of a step", noise[noise > 0])


def _check(what: str, values: np.ndarray) -> None:
    # Written so that NaN, which compares as neither, is out of range too.
    in_range = (values >= LEAST_FACTOR) & (values <= MOST_FACTOR)
    wrong = values[~in_range]
    if wrong.size:
        raise ScenarioError(
            f"{what} is {wrong.flat[0]:g} in some step and must be between {LEAST_FACTOR:g} and {MOST_FACTOR:g}; "
            "beyond that, numbers overflow or vanish and noise covers nothing: change algorithm.learning_rate or "
            "privacy.clip_norm",
            code="experiment.range",
        )


def noise_inflation(algorithm: Declares, drawings: Iterable[Drawing], steps: int, dtype: torch.dtype) -> float:
    """Return by what share hardened noise has to be larger: the largest share that some peers need.

    Args:
        drawings: how each of these peers draws its examples.
        steps: the number of steps of the run.
        dtype: in which sums are made.

    Raises:
        ScenarioError: rounding may change a sum by more than a tenth of what one example adds to it.

    Privacy: with a chance of 2^-64 a step a Poisson batch has more examples than are assumed here; δ includes that.
    """
    unit = torch.finfo(dtype).eps / 2
    largest = 0.0
    for drawing in dict.fromkeys(drawings):
        size = drawing.most
        inflation = rounding_error(size, unit)

        # A sum that remembers earlier gradients carries the rounding of all steps before.
        remembers = any(part.idle for part in algorithm.released(0, drawing) or ())
        if remembers:
            inflation += 4 * size * (steps * size + drawing.size) * unit

        if inflation > MOST_INFLATION:
            raise ScenarioError(
                f"privacy.hardened: rounding may change a sum of {size} examples in "
                f"{str(dtype).removeprefix('torch.')} by {inflation:.2g} clip norms, which must be <= "
                f"{MOST_INFLATION:g}; set compute.dtype=float64",
                code="privacy.hardened",
            )
        largest = max(largest, inflation)
    return largest + OTHER
