"""The share of a run's wall time that its privacy ledger takes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.ledger.segments import RunName
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.events import Release, Spend
from tools.bench.timing import once, quiet
from tools.bench.workloads import NOISE_MULTIPLIER, Setup

RUN = RunName("benchmark", "none", "none")
SECONDS = 10.0
TRIALS = 5


class TimedLedger:
    """A cohort's ledger that counts the wall time it takes of every round."""

    def __init__(self, ledger: CohortLedger) -> None:
        self.ledger = ledger
        self.seconds = 0.0

    def charge(self, step: int, rows: np.ndarray) -> None:
        """See CohortLedger."""
        started = time.perf_counter()
        self.ledger.charge(step, rows)
        self.seconds += time.perf_counter() - started

    def allowed(self, step: int) -> np.ndarray:
        """See CohortLedger."""
        started = time.perf_counter()
        result = self.ledger.allowed(step)
        self.seconds += time.perf_counter() - started
        return result


def ledger_share(setup: Setup, seconds: float = SECONDS) -> dict[str, Any]:
    """Run the engine with a ledger for every peer, and say what they take.

    Returns:
        rounds and seconds of the run, and the share of its wall time that went to the ledgers.
    """
    engine = setup.engine()
    with quiet(), tempfile.TemporaryDirectory() as folder:
        took = min(once(engine.round, setup.device)[1] for _ in range(TRIALS))
        rounds = max(1, round(seconds / took))
        engine = setup.engine()
        with CohortLedger(Path(folder), "synthetic", RUN, _accounts(setup, rounds)) as ledger:
            timed = TimedLedger(ledger)
            engine.cohort.ledger = cast(CohortLedger, timed)
            started = time.perf_counter()
            for _ in range(rounds):
                engine.round()
            wall = time.perf_counter() - started
    return {"rounds": rounds, "seconds": wall, "share": timed.seconds / wall}


def _accounts(setup: Setup, rounds: int) -> list[Account]:
    sampler = setup.data.sampler
    size = setup.workload.examples
    rate = float(sampler.sampling_rate[0])
    release = Release("uniform", rate, size, int(sampler.sizes[0]), NOISE_MULTIPLIER, rounds)
    spends = (Spend(0, rounds, release),)
    return [Account(peer, spends, None, 1e-5) for peer in range(setup.workload.n_peers)]
