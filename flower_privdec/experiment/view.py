"""One process's view of a run: what all know, and the own parts of the peers that it hosts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort, Validation
from flower_privdec.data import PeerData
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.memory import check_memory
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.experiment.run_key import KEY_BYTES
from flower_privdec.privacy.ledger.ledger import CohortLedger
from flower_privdec.privacy.noise import STATE_PREFIX, PairSecrets, build_deployed_noise, build_noise, noise_mechanism
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import placed

Budget = tuple[float, float]  # ε and δ


@dataclass(frozen=True)
class Experiment(Agreement):
    """An agreement, and what is the own of the peers hosted here: all of them in an engine, one on a deployed node.

    Attributes:
        own: of those peers alone; of others nothing is read, hashed or counted.
    """

    own: OwnParts

    @classmethod
    def build(cls, scenario: Scenario, peers: np.ndarray | None = None) -> Experiment:
        """Build all parts of a simulated scenario.

        Args:
            peers: global ids of those hosted here; by default all.

        Raises:
            ScenarioError: when a part cannot be had or two parts do not fit.
        """
        agreement = Agreement.of(scenario)
        return cls.joined(agreement, OwnParts.of(agreement, peers))

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
            start: the step from which a run goes on whose noise is the operating system's: what it draws from there is
                new, examples and noise, and charged again.
            block: how many steps such a run charges ahead.

        Raises:
            ScenarioError: when their state does not fit into free memory.
            BudgetError: when the ledger cannot be trusted or is in use.
        """
        check_memory(self)
        own, held, private = self.own, self.public.validation, self.scenario.private
        hardened = own.noise_inflation is not None
        sampler = own.sampler.with_fresh_keys() if own.from_system else own.sampler
        pairs = {peer: secrets.token_bytes(KEY_BYTES) for peer in own.keys} if own.from_system else own.keys
        return Cohort(
            peers=own.peers,
            n_peers=self.scenario.n_peers,
            initial=self.initial,
            kernel=self.kernel,
            data=PeerData(own.examples, sampler, self.device, self.initial.dtype),
            mixing=self.mixing,
            participation=self.participation,
            noise=build_deployed_noise(hardened=hardened) if own.from_system else build_noise(own.keys, self.device),
            mechanism=noise_mechanism(private.noise if private else None),
            secrets=PairSecrets(pairs),
            learning_rate=self.learning_rate,
            steps_per_round=self.algorithm.steps_per_round,
            protection=own.protection,
            ledger=None if ledger_dir is None else self._open_ledger(ledger_dir, budget, start, block),
            apart=own.from_system and own.protection is not None,
            noise_inflation=(own.noise_inflation or 0.0) if own.from_system else 0.0,
            seed=self.scenario.seed_of("run"),
            validation=None if held is None else Validation.of(held, self.loss, self.initial),
            every=min(self.scenario.evaluation.every, self.scenario.rounds),
        )

    def _open_ledger(self, folder: Path, budget: Budget | None, start: int, block: int) -> CohortLedger | None:
        own, name = self.own, self.public.name
        if own.protection is None:
            return None
        accounts = own.protection.accounts
        if budget is not None:
            accounts = tuple(replace(account, budget=budget[0], delta=budget[1]) for account in accounts)
        if not own.from_system:
            return CohortLedger(folder, name, own.run, accounts)
        fresh = replace(own.run, id=secrets.token_hex(16))
        return CohortLedger(folder, name, fresh, accounts, block=block, fresh=True, start=start)

    def initial_state(self, cohort: Cohort) -> State:
        """Return the state before round 0."""
        rows = self.algorithm.initial(cohort)
        for name in cohort.mechanism.state:
            rows[STATE_PREFIX + name] = torch.zeros(len(cohort.peers), *cohort.initial.shape).to(cohort.initial)
        return State(peers=cohort.peers, rows=rows)
