"""One process's view of a run: what all know, the private parts of the peers that it hosts, and the memory it takes."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from flower_privdec import __version__
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import memory
from flower_privdec.common.machine import HEADROOM, available_bytes, check_room, cpu_model
from flower_privdec.common.user_code import without_tokens
from flower_privdec.core import Exchange, Mix, Reply, State
from flower_privdec.core.cohort import Cohort, LearningRate, Validation
from flower_privdec.data import Examples, PeerData, Sampler, read_examples
from flower_privdec.data.datasets import check_fit, sizes_of_parts
from flower_privdec.data.features import apply_features
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.run_key import (
    KEY_BYTES,
    SEEDED,
    all_data,
    data_id,
    edges_of,
    environment,
    fingerprints,
    is_known_by_its_edges,
    own_keys,
    partition_name,
    run_id,
    salted,
    shared_secret,
)
from flower_privdec.gradients.protocol import inputs_like, layer_outputs
from flower_privdec.graph.mixing import disagreement_left
from flower_privdec.graph.topology import build_topology
from flower_privdec.privacy.ledger.charges import RunName
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.mechanism.cancelling import PairPlan, Trade, best_strength, trades
from flower_privdec.privacy.mechanism.declared import (
    MOST_INFLATION,
    OTHER,
    Declaration,
    Declares,
    Drawing,
    rounding_error,
)
from flower_privdec.privacy.mechanism.protection import Protection, build_protection
from flower_privdec.privacy.noise import STATE_PREFIX, PairSecrets, build_deployed_noise, build_noise, noise_mechanism
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario import Scenario, numbers_hash, own_parts
from flower_privdec.scenario.sections import CancellingSection, own_modules, placed, steps_per_round

OWN_DIGITS = 6  # of factors of own noise: solvers on two machines differ by less than 1e-13
ENGINE = "engine"  # the runtime in which one process hosts all peers
NETWORK = "network"  # that in which each peer is a process of its own, and agrees on secrets with its neighbours
COMPARABLE = "comparable"  # the generator whose keys are the same in every runtime and on every machine
REPEATABLE = f"{SEEDED}, flower-privdec {__version__}"  # of the environment, what is in those keys


@dataclass(frozen=True)
class OwnParts:
    """The own parts of the peers that one process hosts, and of no other; row i is peer `peers[i]`.

    Attributes:
        peers: global ids, int64 [m], ascending.
        examples: theirs alone.
        keys: what each peer's noise and batches are drawn from, by global id, see `run_key`.
        elsewhere: keys of the peers hosted elsewhere, where a simulation draws noise of pairs from them.
        run: what ledgers and checkpoints call their run.
        protection: their clipping, noise and accounts; None without privacy.
        noise_inflation: by how much hardened noise is larger; None where it is not asked for.
        from_system: whether batches and noise are the operating system's, and never the same twice.
        unsalted: keys before a salt went into them, of these peers and of those elsewhere; None of a run without one.
    """

    peers: np.ndarray
    examples: Examples
    sampler: Sampler
    keys: Mapping[int, bytes]
    run: RunName
    protection: Protection | None
    from_system: bool = False
    noise_inflation: float | None = None
    elsewhere: Mapping[int, bytes] = field(default_factory=dict)
    unsalted: tuple[Mapping[int, bytes], Mapping[int, bytes]] | None = None

    def with_salt(self, salt: str) -> OwnParts:
        """Return the same with the keys of this salt; of a run without a salt as it is."""
        if self.unsalted is None:
            return self
        keys, elsewhere = (salted(some, salt) for some in self.unsalted)
        return replace(self, keys=keys, elsewhere=elsewhere, sampler=self.sampler.like(keys=keys))

    def with_new_salt(self) -> OwnParts:
        """Return the same with keys that no other process has had; of a run without a salt as it is."""
        return self.with_salt(new_salt())

    @property
    def draws_anew(self) -> bool:
        """Return whether each process that begins or resumes the run draws numbers of its own, and pays for them."""
        return self.from_system or self.unsalted is not None

    @property
    def pairs_id(self) -> str:
        """Return a hash of the keys from which a simulation draws noise of pairs; "" where it does not."""
        return run_id({**self.elsewhere, **self.keys}) if self.elsewhere else ""

    @property
    def source(self) -> str:
        """Return where the noise comes from, as `run_key.environment` names it."""
        return noise_source(self.from_system, self.noise_inflation is not None)

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
        """Read, name and protect what is some peers' own.

        Args:
            peers: global ids; by default all.
            secret: of a deployed peer, known to no other: its run's name follows from it, and its batches and
                noise come from the operating system. None is a simulation, whose numbers can be drawn again unless the
                scenario has `compute.generator: system`.
            root: where their data lie, in place of the scenario's `data.root`.
            runtime: which processes of a simulation host which peers: it decides how sums are rounded, see `rounding`.
            whole: whether all data there are the one peer's own, so that nothing is partitioned.
            salt: that of the run, where other processes host other peers of it; a new one if all are hosted here.

        Raises:
            ScenarioError: when their data cannot be had or do not fit, or a budget cannot be kept.
        """
        scenario = agreement.scenario
        peers = np.arange(scenario.n_peers) if peers is None else np.sort(np.asarray(peers, dtype=np.int64))
        if scenario.private is not None:
            steps = scenario.rounds * steps_per_round(scenario.algorithm)
            what = f"rounds={scenario.rounds}: the noise and clip norms of {steps:,} steps of {len(peers):,} peers"
            check_room(STEP_BYTES * steps * len(peers), what, "take fewer rounds, local steps or peers")
        examples = _read(agreement, peers, root, whole=whole)
        check_fit(examples, agreement.public, scenario.data.root if root is None else root)
        smallest = int(np.argmin(examples.sizes))
        least = scenario.data.at_least
        if least is not None and examples.sizes[smallest] < least:
            raise ScenarioError(
                f"data.at_least={least} must be <= {examples.sizes[smallest]}, what peer {peers[smallest]} holds: "
                "lower it in the scenario of all peers, or leave this peer out",
                code="data.at-least",
            )
        from_system = secret is not None or scenario.compute.generator == "system"
        keys, elsewhere, run = _name_run(
            agreement, examples, peers, secret, from_system, runtime, root=root, whole=whole
        )
        seeds = dict.fromkeys(peers.tolist(), scenario.seed_of("run"))
        # Keyed by the run where there is privacy; else by the seed, whatever is run with it.
        sampler = Sampler(scenario.data.batch, examples.sizes, seeds if scenario.private is None else keys, peers)
        protection = None
        larger = None
        if scenario.private is not None:
            drawings = drawings_of(agreement, peers, sampler)
            section = scenario.private.noise
            everyone = peers
            everybody = sampler
            if isinstance(section, CancellingSection) and (len(peers) < scenario.n_peers or scenario.data.at_least):
                everyone = np.arange(scenario.n_peers)
                everybody = sampler_of_all(agreement, root, whole)
            algorithm = agreement.algorithm
            mixing = agreement.mixing
            factor = 1.0 if mixing is None else algorithm.weight_factor(mixing, scenario.rounds)
            protection = build_protection(
                scenario,
                scenario.private,
                algorithm,
                drawings_of(agreement, everyone, everybody),
                agreement.participation,
                everyone,
                factor,
                noise_mechanism(scenario.private.noise).released,
                partial(pair_plan, agreement, everybody, runtime == NETWORK)
                if isinstance(section, CancellingSection)
                else None,
            )
            if len(everyone) > len(peers):
                protection = protection.part(int(peers[0]), int(peers[-1]) + 1)
            if scenario.private.hardened:
                steps = scenario.rounds * algorithm.steps_per_round
                larger = noise_inflation(algorithm, drawings, steps, agreement.initial.dtype)
            rates = agreement.learning_rate.base[peers]
            check_number_range(
                protection, replace(agreement.learning_rate, base=rates), examples.sizes, sampler.normalizer
            )
        own = OwnParts(peers, examples, sampler, keys, run, protection, from_system, larger, elsewhere)
        if not without_content(agreement) or from_system:
            return own
        if salt is None and len(peers) < scenario.n_peers:
            remedy = "set compute.generator=system, or run all peers in one process (`privdec run`)"
            if runtime == NETWORK:
                remedy = "leave --insecure-seeds out"
            raise ScenarioError(
                f"{' and '.join(without_content(agreement))}: a run with code of one's own has a random salt in the "
                f"keys of its noise, which this process of it was not given; {remedy}",
                code="run.salt",
            )
        return replace(own, unsalted=(keys, elsewhere)).with_salt(salt or new_salt())


def _read(agreement: Agreement, peers: np.ndarray, root: str | None, *, whole: bool = False) -> Examples:
    """Read the examples of some peers, as the model takes them."""
    scenario = agreement.scenario
    targets = agreement.loss.targets
    seed = scenario.seed_of("data")
    examples = read_examples(scenario.data, seed, scenario.n_peers, peers, root, targets, whole=whole)
    if scenario.features is None:
        return examples
    return replace(examples, x=apply_features(examples.x, scenario.features))


def without_content(agreement: Agreement) -> list[str]:
    """Return the keys of a private scenario that name code of a user's own, whose content cannot be in a run's key.

    Data are in it as they were read, and a graph by its edges, whichever code made them; metrics decide no number.
    """
    if agreement.scenario.private is None:
        return []
    mixing = agreement.mixing
    graph_known = mixing is None or is_known_by_its_edges(mixing.topology)
    names = []
    for key, module in own_modules(agreement.scenario):
        if key.startswith(("data.", "task.metrics.", "privacy.noise.secrets.")) or module.startswith("flower_privdec."):
            continue
        if not (key.startswith("topology.") and graph_known):
            names.append(f"{key}={without_tokens(module)!r}")
    return names


def _name_run(
    agreement: Agreement,
    examples: Examples,
    peers: np.ndarray,
    secret: bytes | None,
    from_system: bool,
    runtime: str,
    *,
    root: str | None,
    whole: bool,
) -> tuple[dict[int, bytes], dict[int, bytes], RunName]:
    """Name a run, without a salt.

    Returns:
        Every peer's key; those of peers hosted elsewhere, if a simulation needs them; and what ledgers and checkpoints
        call the run. Without privacy there are no keys.
    """
    scenario = agreement.scenario
    private = agreement.scenario.private
    hardened = private is not None and bool(private.hardened)
    name = public_name(agreement, noise_source(from_system, hardened))
    if private is None:
        # Nothing is drawn from it, and a run still does not go on with other data than it began with.
        return {}, {}, replace(name, id=data_id(agreement.public, agreement.initial, examples))

    comparable = not from_system and scenario.compute.generator == COMPARABLE
    if not (from_system or comparable):
        name = replace(name, environment=f"{name.environment}, {rounding(scenario, runtime)}")
    pairs = secret_pairs(scenario)
    topology = None if agreement.mixing is None else agreement.mixing.topology
    shared = shared_secret(
        name.scenario,
        REPEATABLE if comparable else name.environment,
        agreement.public,
        agreement.initial,
        agreement.module,
        [edges_of(topology), np.ascontiguousarray(pairs).tobytes()],
        own_parts(scenario),
    )
    prints = fingerprints(examples, peers)
    others = dict[int, bytes]()

    # A deployed peer knows its own data only, and its keys are secret. Those of a simulation follow from all data. Of
    # a device that was given data of its own, with --insecure-seeds, they follow from these: it cannot have others'.
    if not (from_system or whole):
        rest = np.setdiff1d(np.arange(scenario.n_peers), peers)
        if len(rest):
            others = fingerprints(_read(agreement, rest, root), rest)
        shared += all_data(prints | others)
    keys = own_keys(shared + (secret or b""), prints)
    elsewhere = own_keys(shared, others) if len(pairs) else {}
    return keys, elsewhere, replace(name, id=_id_of(keys, name), partition=partition_name(prints, secret))


def _id_of(keys: Mapping[int, bytes], name: RunName) -> str:
    """Return the id of a run with these keys, here: elsewhere comparable keys are the same, and it is charged again."""
    where = name.environment.encode()
    return run_id({peer: key + where for peer, key in keys.items()})


def rounding(scenario: Scenario, runtime: str) -> str:
    """Return what decides how a simulation rounds its sums, beside scenario, device and versions.

    Privacy: two runs that round differently under one noise show their data in the last digits of the difference. Into
    how many blocks an engine's peers fall follows from the scenario, and the number of workers rounds nothing.
    """
    compute = scenario.compute
    return f"{cpu_model()}, {runtime}, threads {compute.threads}, memory {compute.memory_mib} MiB"


def noise_source(from_system: bool, hardened: bool) -> str:
    """Return where noise comes from, as `run_key.environment` names it."""
    return ("exact" if hardened else "system") if from_system else SEEDED


MAY = "models may be published under this ε"
MUST_NOT = "models must not be published under this ε"


def new_salt() -> str:
    """Return a random salt for one run, or the part of it after a resume: 32 bytes in hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


SALTED = (
    "{parts}: what code of one's own computes cannot be known, so noise and batches are drawn for this run only: "
    "running the scenario again draws other numbers, and a run that is resumed draws others, and pays for them, from "
    "its checkpoint on"
)
NOISE = {
    SEEDED: f"drawn from keys, which anyone who knows the data can derive: {MUST_NOT}",
    "system": f"of the operating system's generator: {MAY}",
    "exact": f"of the operating system's generator, hardened (rounded exactly): {MAY}",
}


def noise_facts(sources: Collection[str]) -> dict[str, Any]:
    """Return what a summary states about the noise of peers, and whether their models may be published under their ε.

    Args:
        sources: the sources of all peers' noise, see `noise_source`.
    """
    texts = "; some peers': ".join(NOISE[source] for source in sorted(set(sources)))
    return {"noise": texts, "publishable": bool(sources) and SEEDED not in sources}


def public_name(agreement: Agreement, source: str = SEEDED) -> RunName:
    """Return the name of a run as a process without its keys computes it."""
    decided = numbers_hash(agreement.scenario)
    return RunName(decided[:32], decided, environment(source, agreement.device))


def drawings_of(agreement: Agreement, peers: np.ndarray, sampler: Sampler) -> list[Drawing]:
    """Return how some peers draw their examples, and how many neighbours they answer: what their releases depend on.

    Privacy: a peer that takes all its examples in every step draws none, whatever its sampling is called.
    """
    rates = sampler.sampling_rate.tolist()
    sizes = sampler.partition_sizes.tolist()
    answered: list[tuple[int, ...]] = [()] * len(peers)  # neighbours in each round, where the algorithm sends replies
    if agreement.mixing is not None and any(isinstance(item, Reply) for item in agreement.algorithm.program):
        answered = [tuple(c) for c in agreement.mixing.heard(agreement.scenario.rounds)[:, peers].T.tolist()]
    facts = zip(rates, sizes, sampler.normalizer.tolist(), answered, strict=True)
    return [
        Drawing(sampler.kind if rate < 1 else "full", rate, size, batch, counts) for rate, size, batch, counts in facts
    ]


def sampler_of_all(agreement: Agreement, root: str | None, whole: bool) -> Sampler:
    """Return how all peers draw, as far as all of them know: the plan of pairs follows from it.

    Args:
        root, whole: see `OwnParts.of`.

    Raises:
        ScenarioError: each peer has a file of its own, whose size the others do not know; or peers who know no more
            than a least number of examples would draw in ways for which nothing is proved.

    Privacy: with `data.at_least` peers are planned for, and charged, as if each had no more examples than that.
    """
    scenario = agreement.scenario
    where = "privacy.noise.kind=cancelling"
    batch = scenario.data.batch
    targets = agreement.loss.targets
    least = scenario.data.at_least
    if least is None and (scenario.data.each_its_own or whole):
        raise ScenarioError(
            f"{where} needs the number of every peer's examples, which is private where each has data of its own: give "
            "data.at_least, a number that each of them has, or partition one dataset (data.partition)",
            code="noise.cancelling-sizes",
        )
    everyone = np.arange(scenario.n_peers)
    if least is None:
        sizes = sizes_of_parts(scenario.data, scenario.seed_of("data"), scenario.n_peers, root, targets)
    else:
        sizes = np.full(scenario.n_peers, least)
        if batch.sampling != "poisson" or batch.size is None or batch.small_peers == "full":
            raise ScenarioError(
                f"{where} with data.at_least={least} needs batches of one expected size at all peers: set "
                "data.batch.sampling=poisson and data.batch.size, and leave data.batch.small_peers out",
                code="noise.cancelling-batches",
            )
        _check_sizes_change_no_release(agreement, least, batch.size)
        if np.ptp(agreement.algorithm.conserved_weights(everyone + 1)) > 0:
            raise ScenarioError(
                f"{where} with data.at_least={least} needs peers of equal weight, and algorithm.name="
                f"{agreement.algorithm.name} weighs them by their examples, whose number is private: set its weighting "
                "to uniform",
                code="noise.cancelling-weights",
            )
    keys = dict.fromkeys(everyone.tolist(), scenario.seed_of("run"))
    return Sampler(batch, sizes, keys, everyone)


def _check_sizes_change_no_release(agreement: Agreement, least: int, batch: float) -> None:
    """Refuse an algorithm that releases something else of peers with more examples than a least number.

    Such a peer is charged for the least number. That bounds what it spends because it draws an example more rarely and
    is else the same, see `mechanism.cancelling`; a table of past gradients moves by more where there are more.
    """
    algorithm = agreement.algorithm
    steps = min(agreement.scenario.rounds * algorithm.steps_per_round, MOST_DECLARED)

    def releases(size: int) -> list[Declaration]:
        drawing = Drawing("poisson", min(1.0, batch / size), size, batch)
        return [algorithm.released(step, drawing) for step in range(steps)]

    planned = releases(least)
    if any(releases(size) != planned for size in (least + 1, 2 * least, 1000 * least)):
        raise ScenarioError(
            f"privacy.noise.kind=cancelling with data.at_least={least}: what algorithm.name={algorithm.name} releases "
            "depends on the number of a peer's examples, which is private, so that a peer with more would spend more "
            "than is planned: take privsgp, or leave privacy.noise out",
            code="noise.cancelling-sizes",
        )


def pair_plan(agreement: Agreement, sampler: Sampler, deployed: bool, needed: np.ndarray) -> PairPlan:
    """Return the noise that pairs of peers share.

    Args:
        sampler: of all peers.
        deployed: whether each is a process of its own.
        needed: the noise that each peer needs by itself in every step, over the factor of its sums, [steps, n_peers].

    Raises:
        ScenarioError: the algorithm's exchanges do not conserve a sum.
    """
    scenario = agreement.scenario
    algorithm = agreement.algorithm
    assert scenario.private is not None
    assert isinstance(scenario.private.noise, CancellingSection)
    section = scenario.private.noise
    where = f"privacy.noise.kind=cancelling with algorithm.name={algorithm.name}"
    exchanges = [item for item in algorithm.program if isinstance(item, Exchange)]
    drawing = drawings_of(agreement, sampler.peers, sampler)[0]
    answered = any(part.to == "neighbour" for part in algorithm.released(0, drawing) or ())
    if not exchanges or answered or not all(isinstance(exchange, Mix) for exchange in exchanges):
        why = "exchanges nothing" if not exchanges else "sends more than what is mixed, of which no sum is conserved"
        raise ScenarioError(
            f"{where}, which {why}: leave privacy.noise out, or take privsgp", code="noise.cancelling-sum"
        )
    if section.colluding >= scenario.n_peers:
        raise ScenarioError(
            f"privacy.noise.colluding={section.colluding} must be < n_peers={scenario.n_peers}: all others are "
            f"{scenario.n_peers - 1}",
            code="noise.colluding",
        )
    edges = secret_pairs(scenario)
    steps = algorithm.steps_per_round
    rounds = scenario.rounds
    rates = np.abs(agreement.learning_rate.of_rounds(rounds)).repeat(steps, axis=0)
    weights = algorithm.conserved_weights(sampler.partition_sizes)
    needed = needed * weights * rates / sampler.normalizer
    choices: list[Trade] = []
    if section.strength == "auto":
        assert agreement.mixing is not None
        first = needed[int(needed.any(axis=1).argmax())]
        left = steps * disagreement_left(agreement.mixing) + (steps - 1) / 2  # local steps see those before them
        choices = trades(first, edges, section.colluding, left)
    return PairPlan(
        edges=edges,
        colluding=section.colluding,
        strength=best_strength(choices, deployed=deployed) if choices else float(section.strength),
        needed=needed,
        weights=weights,
        same_rates=bool(np.ptp(agreement.learning_rate.base) == 0),
        trades=tuple(choices),
        sizes=sampler.partition_sizes,
    )


def pair_run(experiment: Experiment) -> bytes:
    """Return what decides the plan of pairs: with another one, a peer would count on noise that others do not add."""
    plan = None if experiment.own.protection is None else experiment.own.protection.pairs
    sizes = [] if plan is None else plan.sizes.tolist()
    # Solved by each peer for itself: what every one adds has to be what the others count on.
    own = b"" if plan is None else np.round(plan.own, OWN_DIGITS).tobytes()
    return repr((numbers_hash(experiment.scenario), sizes, hashlib.sha256(own).hexdigest(), __version__)).encode()


def partners(scenario: Scenario, peers: np.ndarray) -> dict[int, int]:
    """Return the peers elsewhere that share a secret with some peers, and with each the first of these that does."""
    first = dict[int, int]()
    for own, other in sorted(
        (own, other) for pair in secret_pairs(scenario).tolist() for own, other in (pair, pair[::-1])
    ):
        if own in peers and other not in peers:
            first.setdefault(other, own)
    return dict(sorted(first.items()))


def secret_pairs(scenario: Scenario) -> np.ndarray:
    """Return the pairs of peers that share a secret, int64 [E, 2], the lower id first; none without such noise."""
    section = None if scenario.private is None else scenario.private.noise
    if not isinstance(section, CancellingSection) or scenario.n_peers == 1:
        return np.zeros((0, 2), dtype=np.int64)
    graph = build_topology(
        section.secrets.name, scenario.n_peers, seed=scenario.seed_of("run"), **section.secrets.options()
    )
    return np.asarray(np.unique(np.sort(graph.support(), axis=1), axis=0))


def noise_inflation(algorithm: Declares, drawings: Iterable[Drawing], steps: int, dtype: torch.dtype) -> float:
    """Return by how much hardened noise has to be larger, the most of some peers.

    Args:
        drawings: how each of these peers draws its examples.
        steps: of the run.
        dtype: in which sums are made.

    Raises:
        ScenarioError: the rounding of a sum may be as large as a tenth of what one example adds to it.

    Privacy: a Poisson batch has more examples than are counted on with a chance of 2^-64 a step, which adds to δ.
    """
    largest = 0.0
    for drawing in dict.fromkeys(drawings):
        size = drawing.most
        remembers = any(part.idle for part in algorithm.released(0, drawing) or ())
        unit = torch.finfo(dtype).eps / 2
        more = rounding_error(size, unit)
        more += 4 * size * (steps * size + drawing.size) * unit if remembers else 0.0
        if more > MOST_INFLATION:
            raise ScenarioError(
                f"privacy.hardened: a sum of {size} examples in {str(dtype).removeprefix('torch.')} may be wrong by "
                f"{more:.2g} times what one of them adds, which must be <= {MOST_INFLATION:g}; set "
                "compute.dtype=float64",
                code="privacy.hardened",
            )
        largest = max(largest, more)
    return largest + OTHER


LEAST_FACTOR, MOST_FACTOR = 1e-15, 1e30  # see `gradients.protocol`; 2^-126 to 2^128 is what float32 holds


def check_number_range(plan: Protection, learning_rate: LearningRate, sizes: np.ndarray, batches: np.ndarray) -> None:
    """Check what every step multiplies clipped gradients and noise by.

    Args:
        sizes: examples of each peer, int64 [n_peers].
        batches: the expected batch size of each, float64 [n_peers].

    Raises:
        ScenarioError: naming the first quantity that is out of range.
    """
    rounds = len(plan.clip_norms) // plan.steps_per_round
    rates = learning_rate.of_rounds(rounds).repeat(plan.steps_per_round, axis=0)
    with np.errstate(over="ignore"):
        one = rates / batches * plan.clip_norms
        _check("privacy.clip_norm", plan.clip_norms)
        _check("algorithm.learning_rate, over the batch size, times privacy.clip_norm", one)
        _check("algorithm.learning_rate", rates)
        _check("the learning rate, times the clip norm, of all a peer's examples", one * sizes)
        noises = [one * plan.noise_multipliers]
        if plan.receivers:  # what goes to each neighbour is not multiplied by the learning rate
            noises.append(plan.clip_norms / batches * plan.noise_multipliers)
        for noise in noises:
            _check("the noise of a step", noise[noise > 0])


def _check(what: str, values: np.ndarray) -> None:
    wrong = values[~((values >= LEAST_FACTOR) & (values <= MOST_FACTOR))]
    if wrong.size:
        raise ScenarioError(
            f"{what} is {wrong.flat[0]:g} in some step and must be between {LEAST_FACTOR:g} and {MOST_FACTOR:g}, "
            "beyond which numbers overflow or vanish and noise covers nothing; change algorithm.learning_rate or "
            "privacy.clip_norm",
            code="experiment.range",
        )


Budget = tuple[float, float]  # ε and δ


@dataclass(frozen=True)
class Experiment(Agreement):
    """An agreement, and what is the own of the peers hosted here: all of them in an engine, one on a deployed node.

    Attributes:
        own: of those peers alone; of others nothing is read, hashed or counted.
    """

    own: OwnParts

    @classmethod
    def build(cls, scenario: Scenario, peers: np.ndarray | None = None, salt: str | None = None) -> Experiment:
        """Build all parts of a simulated scenario, for the engine.

        Args:
            peers: global ids of those hosted here; by default all.
            salt: see `OwnParts.of`.

        Raises:
            ScenarioError: when a part cannot be had or two parts do not fit.
        """
        agreement = Agreement.of(scenario)
        return cls.joined(agreement, OwnParts.of(agreement, peers, salt=salt))

    @classmethod
    def joined(cls, agreement: Agreement, own: OwnParts) -> Experiment:
        """Return the view of those who hold these own parts."""
        return cls(**{field.name: getattr(agreement, field.name) for field in fields(Agreement)}, own=own)

    @placed
    def cohort(
        self, ledger_dir: Path | None = None, budget: Budget | None = None, start: int = 0, block: int = 1
    ) -> Cohort:
        """Return the cohort of the peers hosted here.

        Args:
            ledger_dir: where the ledger lies; None keeps none (for tests and timings).
            budget: ε and δ to hold the ledger to in place of the scenario's.
            start: the step from which a run goes on that draws other numbers each time (`OwnParts.draws_anew`): what it
                draws from there is new, examples and noise, and charged again.
            block: how many steps such a run charges ahead.

        Raises:
            ScenarioError: when their state does not fit into free memory.
            BudgetError: when the ledger cannot be trusted or is in use.
        """
        if too_large := shortage(self):
            raise ScenarioError(too_large, code="memory.short")
        own = self.own
        held = self.public.validation
        private = self.scenario.private
        hardened = own.noise_inflation is not None
        sampler = own.sampler.with_fresh_keys() if own.from_system else own.sampler
        pairs = {**own.elsewhere, **own.keys}
        if own.from_system:
            pairs = {peer: secrets.token_bytes(KEY_BYTES) for peer in own.keys}
        return Cohort(
            peers=own.peers,
            n_peers=self.scenario.n_peers,
            initial=self.initial,
            kernel=self.kernel,
            data=PeerData(own.examples, sampler, self.device, self.initial.dtype),
            mixing=self.mixing,
            participation=self.participation,
            noise=build_deployed_noise(hardened=hardened) if own.from_system else build_noise(own.keys, self.device),
            mechanism=noise_mechanism(
                private.noise if private else None, None if own.protection is None else own.protection.pairs
            ),
            secrets=PairSecrets(pairs, simulated=not own.from_system),
            learning_rate=self.learning_rate,
            steps_per_round=self.algorithm.steps_per_round,
            optimizer=self.algorithm.optimizer,
            protection=own.protection,
            ledger=None if ledger_dir is None else self._open_ledger(ledger_dir, budget, start, block),
            apart=own.from_system and own.protection is not None,
            noise_inflation=(own.noise_inflation or 0.0) if own.from_system else 0.0,
            seed=self.scenario.seed_of("run"),
            validation=None if held is None else Validation.of(held, self.loss, self.initial),
            every=min(self.scenario.evaluation.every, self.scenario.rounds),
        )

    def _open_ledger(self, folder: Path, budget: Budget | None, start: int, block: int) -> CohortLedger | None:
        own = self.own
        name = self.public.name
        if own.protection is None:
            return None
        accounts = own.protection.accounts
        if budget is not None:
            accounts = tuple(replace(account, budget=budget[0], delta=budget[1]) for account in accounts)
        if not own.draws_anew:
            return CohortLedger(folder, name, own.run, accounts, start=self.first_step)
        fresh = replace(own.run, id=secrets.token_hex(16))
        return CohortLedger(folder, name, fresh, accounts, block=block, fresh=True, start=start)

    @property
    def first_step(self) -> int:
        """Return the step with which the run begins: after the rounds before it, if it was given more rounds."""
        return self.scenario.first_round * self.algorithm.steps_per_round

    def initial_state(self, cohort: Cohort) -> State:
        """Return the state before round 0."""
        rows = self.algorithm.initial(cohort)
        for name in cohort.mechanism.state:
            rows[STATE_PREFIX + name] = torch.zeros(len(cohort.peers), *cohort.initial.shape).to(cohort.initial)
        if cohort.optimizer is not None:
            rows |= cohort.optimizer.initial(len(cohort.peers), cohort.initial)
        rows |= self.algorithm.initial_averages(rows)
        return State(peers=cohort.peers, rows=rows)


MOST_DECLARED = 10_000  # steps, whose declarations are compared
STEP_BYTES = 100  # of every step of every peer, at the peak: clip norms, noise and what is made of them
WORKER_BYTES = 48 << 20  # of a forked process's own, where it writes on what it shares with the one that forked it
CHECKPOINT_COPIES = 2  # of the state, while it is written: its tensors' bytes, and the file's


@dataclass(frozen=True)
class MemoryNeed:
    """What a run takes at its peak, in bytes; the interpreter and torch come on top.

    Attributes:
        state: as many buffers of m d numbers for m peers as the algorithm says: its rows, and where many peers are
            active one to mix into, one to work in; and what it holds for each neighbour.
        table: the memory of past gradients of variance reduction; 0 for other algorithms.
        data: the training and test examples, and a copy of the former where the run's number type or device
            is another.
        batch: for one round's batch of every peer, the input and twice the outputs of all leaf modules
            (forward and backward), capped by compute.memory_mib, to which the gradient kernel of each process keeps.
        checkpoint: the copies of rows and table that are made while a checkpoint is written.
        workers: what each process but the first takes beside its share of the rest.
    """

    state: int
    table: int
    data: int
    batch: int
    checkpoint: int
    workers: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return self.state + self.table + self.data + self.batch + self.checkpoint + self.workers


def memory_need(experiment: Experiment, workers: int = 1) -> MemoryNeed:
    """Estimate what a run of the peers hosted here takes, by so many processes."""
    scenario = experiment.scenario
    public = experiment.public
    examples = experiment.own.examples
    data = sum(t.nbytes for t in (examples.x, examples.y, public.x, public.y))
    inputs = math.prod(public.input_shape)
    if isinstance(public.x, SparseRows):  # what the longest row names, twice packed
        inputs = 2 * int(np.diff(public.x.matrix.indptr).max())
    per_example = inputs + 2 * outputs_per_example(experiment.module, public.x)
    batch = int(experiment.own.sampler.normalizer.sum() * per_example * experiment.initial.element_size())
    table = _chosen_table_bytes(experiment)
    return MemoryNeed(
        state=_state_bytes(experiment),
        table=table,
        data=data + _copy_bytes(experiment),
        batch=min(batch, workers * scenario.compute.memory_mib << 20),
        checkpoint=_checkpoint_bytes(experiment, table),
        workers=(workers - 1) * WORKER_BYTES,
    )


def _state_bytes(experiment: Experiment) -> int:
    algorithm = experiment.algorithm
    rows = len(experiment.own.peers)
    pairs = rows
    if algorithm.edge_slots and experiment.mixing is not None:
        pairs += int(experiment.mixing.heard(1)[0, experiment.own.peers].sum())
    private = experiment.scenario.private
    noise_rows = len(noise_mechanism(private.noise if private else None).state)
    buffers = algorithm.buffers(experiment.participation) + noise_rows + _moments(experiment)
    return (buffers * rows + algorithm.edge_slots * pairs) * experiment.initial.nbytes


def _moments(experiment: Experiment) -> int:
    optimizer = experiment.algorithm.optimizer
    averages = "x" in experiment.algorithm.averaged
    return averages + (0 if optimizer is None else len(optimizer.moments))


def _checkpoint_bytes(experiment: Experiment, table: int) -> int:
    copies = CHECKPOINT_COPIES + (experiment.device.type != "cpu")
    rows = len(experiment.own.peers)
    return copies * ((experiment.algorithm.slots + _moments(experiment)) * rows * experiment.initial.nbytes + table)


def _copy_bytes(experiment: Experiment) -> int:
    x = experiment.own.examples.x
    initial = experiment.initial
    if isinstance(x, SparseRows):
        return 0
    dtype = initial.dtype if x.is_floating_point() else x.dtype
    return 0 if (x.dtype, x.device) == (dtype, initial.device) else x.numel() * dtype.itemsize


def table_bytes(experiment: Experiment) -> dict[str, int | None]:
    """Return what each kind of table that the algorithm can keep would take for the peers hosted here.

    Returns:
        Bytes by name, at the scenario's batch size; None for a kind that the model cannot have.
    """
    sampler = experiment.own.sampler
    itemsize = experiment.initial.element_size()
    sizes = sampler.partition_sizes
    batch = round(float(sampler.normalizer.max()))
    counts = experiment.algorithm.table_sizes(experiment.kernel, sizes, experiment.initial.numel(), batch)
    return {name: None if count is None else count * itemsize for name, count in counts.items()}


def _chosen_table_bytes(experiment: Experiment) -> int:
    table = experiment.algorithm.table
    return 0 if table is None else table_bytes(experiment)[table] or 0


def _fits(experiment: Experiment, table: int) -> bool:
    """Return whether the peers with a table of so many bytes fit into what is free, checkpoint included."""
    there = _state_bytes(experiment) + table + _copy_bytes(experiment)
    host = _checkpoint_bytes(experiment, table)
    if experiment.device.type == "cpu":
        return there + host <= HEADROOM * available_bytes(experiment.device)
    on_device = there <= HEADROOM * available_bytes(experiment.device)
    return on_device and host <= HEADROOM * available_bytes(torch.device("cpu"))


def shortage(experiment: Experiment) -> str | None:
    """Say what of a run does not fit into free memory and what would, or return None where all fits.

    The data set is in memory already; counted are state, table, a copy of the examples, and checkpoints.
    """
    table = _chosen_table_bytes(experiment)
    state = _state_bytes(experiment)
    if _fits(experiment, table):
        return None
    needed = memory(state + table + _copy_bytes(experiment) + _checkpoint_bytes(experiment, table))
    free = f"about {needed}, checkpoints included, and {memory(available_bytes(experiment.device))} are free"
    configured = experiment.algorithm.table
    peers = len(experiment.own.peers)
    if configured is None or table <= state:
        return (
            f"n_peers={peers} with models of {experiment.initial.numel():,} parameters need {free}; use fewer peers, "
            "a smaller model or a larger machine"
        )
    others = table_bytes(experiment).items()
    fitting = [f"{name} ({memory(size)})" for name, size in others if size and _fits(experiment, size)]
    remedy = f"use {' or '.join(fitting)}" if fitting else "use fewer peers or a larger machine"
    return f"algorithm.table={configured!r} needs {free}; {remedy}"


def outputs_per_example(module: nn.Module, x: Features) -> int:
    """Count the numbers that all leaf modules together put out for one example, like those of x [N, ...]."""
    return sum(count for _, count in _outputs(module, x))


def multiplications_per_example(module: nn.Module, x: Features) -> int:
    """Estimate how often numbers are multiplied to try a model on one example, like those of x [N, ...].

    Each output of a linear layer or a convolution takes as many as it has weights, and those of others one.
    """
    total = 0
    for leaf, count in _outputs(module, x):
        kernels = [part for part in leaf.parameters(recurse=False) if part.ndim > 1]
        total += count * max(1, sum(part.numel() // len(part) for part in kernels))
    return total


def _outputs(module: nn.Module, x: Features) -> list[tuple[nn.Module, int]]:
    """Return how many numbers each leaf module puts out for one example."""
    one = torch.zeros_like(x[:1].dense() if isinstance(x, SparseRows) else x[:1])
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        return layer_outputs(module, lambda: module(inputs_like(one, next(module.parameters()))))
