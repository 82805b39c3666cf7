"""One process's view of a run: what all peers know, and the own parts of the peers that it hosts.

How the room `experiment` fits together:

    Scenario ──> Agreement.of        what all peers know: graph, model, test set            agreement.py
                     │
                     ├──> OwnParts.of        what only these peers have                     own_parts.py
                     │        reads their examples, names the run and makes keys            run_name.py, run_key.py
                     │        solves noise from budgets, and the noise of pairs             drawings.py, pair_plan.py
                     │        checks that no number is out of range                         own_parts.py
                     │
                     └──> Experiment.joined  both together                                  here
                              .cohort()          the rows of these peers, with a ledger
                              .initial_state()   those rows before round 0

The engine builds an `Experiment` of all peers, a shard one of some, and a deployed peer one of itself. No process
reads, hashes or counts the examples of a peer that it does not host, with one exception: a simulation hashes all data
into its keys, see `run_key`. Whether a run fits into memory is told by memory_estimate.py, before its rows are made.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from flower_privdec import __version__
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Edges, Mix, State
from flower_privdec.core.algorithm import check_initial
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.robust_mix import RobustMix
from flower_privdec.core.validation import Validation
from flower_privdec.data import PeerData
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.memory_estimate import shortage
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.experiment.run_key import KEY_BYTES
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.noise import (
    INDEPENDENT,
    STATE_PREFIX,
    PairSecrets,
    build_deployed_noise,
    keyed_noise,
    noise_mechanism,
)
from flower_privdec.scenario import Scenario, numbers_hash
from flower_privdec.scenario.sections import placed

OWN_DIGITS = 6  # of factors of own noise: solvers on two machines differ by less than 1e-13

Budget = tuple[float, float]  # ε and δ


@dataclass(frozen=True)
class Experiment(Agreement):
    """An agreement with the own parts of the peers hosted here: all of them in an engine, one on a deployed node.

    Attributes:
        own: only of those peers; nothing of others is read, hashed or counted.
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
        agreed = {field.name: getattr(agreement, field.name) for field in fields(Agreement)}
        agreed["learning_rate"] = own.learning_rate
        return cls(**agreed, own=own)

    @property
    def first_step(self) -> int:
        """Return the step with which the run begins: after the rounds before it, if it was given more rounds."""
        return self.scenario.first_round * self.algorithm.steps_per_round

    @placed
    def cohort(
        self, ledger_dir: Path | None = None, budget: Budget | None = None, start: int = 0, block: int = 1
    ) -> Cohort:
        """Return the cohort of the peers hosted here.

        Args:
            ledger_dir: where the ledger lies; None keeps none (for tests and timings).
            budget: ε and δ to hold the ledger to in place of the scenario's.
            start: the step from which a resumed run continues that draws other numbers each time
                (`OwnParts.draws_anew`): from there on examples and noise are new, and charged again.
            block: how many steps such a run charges ahead.

        Raises:
            ScenarioError: when their state does not fit into free memory.
            BudgetError: when the ledger cannot be trusted or is in use.
        """
        if too_large := shortage(self):
            raise ScenarioError(too_large, code="memory.short")

        own = self.own
        private = self.scenario.private
        if self.scenario.attack is not None and len(own.peers) < self.scenario.n_peers:
            raise ScenarioError(
                "attack is for simulations of all peers in one process (privdec run, Flower's simulation): leave it "
                "out here; a rehearsal of a network has faults of kind lie",
                code="attack.apart",
            )
        mechanism = INDEPENDENT
        if private is not None and own.protection is not None:
            plan = own.protection
            mechanism = noise_mechanism(private.noise, plan.pairs, plan.correlation, draws_anew=own.draws_anew)

        # Deployed peers, and a simulation with compute.generator=system, draw what no one can draw again.
        if own.from_system:
            sampler = own.sampler.with_fresh_keys()
            noise = build_deployed_noise(hardened=own.noise_inflation is not None)
            pair_keys = {peer: secrets.token_bytes(KEY_BYTES) for peer in own.keys}
            noise_inflation = own.noise_inflation or 0.0
        else:
            sampler = own.sampler
            noise = keyed_noise(own.keys, self.device)
            pair_keys = {**own.elsewhere, **own.keys}
            noise_inflation = 0.0

        validation = None
        if self.public.validation is not None:
            validation = Validation.of(self.public.validation, self.loss, self.initial)

        # The ledger is opened last: nothing that can fail comes after it and would leave it locked.
        data = PeerData(own.examples, sampler, self.device, self.initial.dtype)
        ledger = None
        if ledger_dir is not None:
            ledger = self._open_ledger(ledger_dir, budget, start, block)

        return Cohort(
            peers=own.peers,
            n_peers=self.scenario.n_peers,
            initial=self.initial,
            kernel=self.kernel,
            data=data,
            mixing=self.mixing,
            participation=self.participation,
            noise=noise,
            mechanism=mechanism,
            secrets=PairSecrets(pair_keys, simulated=not own.from_system),
            learning_rate=self.learning_rate,
            steps_per_round=self.algorithm.steps_per_round,
            optimizer=self.algorithm.optimizer,
            protection=own.protection,
            ledger=ledger,
            apart=own.from_system and own.protection is not None,
            noise_inflation=noise_inflation,
            seed=self.scenario.seed_of("run"),
            validation=validation,
            every=min(self.scenario.evaluation.every, self.scenario.rounds),
        )

    def _open_ledger(self, folder: Path, budget: Budget | None, start: int, block: int) -> CohortLedger | None:
        own = self.own
        name = self.public.name
        if own.protection is None:
            return None

        accounts = own.protection.accounts
        if budget is not None:
            epsilon, delta = budget
            accounts = tuple(replace(account, budget=epsilon, delta=delta) for account in accounts)

        if not own.draws_anew:
            return CohortLedger(folder, name, own.run, accounts, start=self.first_step)

        # New draws are charged again, so no earlier charge may count for them: the run has a name of its own.
        fresh = replace(own.run, id=secrets.token_hex(16))
        return CohortLedger(folder, name, fresh, accounts, block=block, fresh=True, start=start)

    def initial_state(self, cohort: Cohort) -> State:
        """Return the state before round 0."""
        n_rows = len(cohort.peers)
        rows = self.algorithm.initial(cohort)
        check_initial(self.algorithm, rows, n_rows)
        for name in cohort.mechanism.state:
            rows[STATE_PREFIX + name] = torch.zeros(n_rows, *cohort.initial.shape).to(cohort.initial)
        if cohort.optimizer is not None:
            rows |= cohort.optimizer.initial(n_rows, cohort.initial)
        rows |= self.algorithm.initial_averages(rows)

        edges: dict[str, Edges] = {}
        mixes = [item for item in self.algorithm.program if isinstance(item, Mix)]
        for mix in (*mixes, self.algorithm.robustly(self.algorithm.final_exchange)):
            if isinstance(mix, RobustMix) and self.mixing is not None:
                # Members know the scenario and its seed, and must not know by what they are measured.
                secret = secrets.randbelow(2**53) if self.own.from_system else None
                edges |= mix.first_edges(cohort.peers, self.mixing, secret)
        return State(peers=cohort.peers, rows=rows, edges=edges)


def pair_run(experiment: Experiment) -> bytes:
    """Return everything that decides the plan of pairs.

    Peers with different plans must not meet: one would count on noise that the others do not add.
    """
    protection = experiment.own.protection
    plan = None if protection is None else protection.pairs
    sizes: list[int] = []
    own = b""
    if plan is not None:
        sizes = plan.sizes.tolist()
        # Each peer solves the plan for itself, so all must get the same result: a peer counts on the noise of others.
        own = np.round(plan.own, OWN_DIGITS).tobytes()
    return repr((numbers_hash(experiment.scenario), sizes, hashlib.sha256(own).hexdigest(), __version__)).encode()
