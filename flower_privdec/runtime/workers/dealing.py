"""Into how many blocks a cohort falls, and how many processes take them: by an estimate, never by timing.

The blocks are what decides the bits: the peers of a block are computed together, whoever hosts it, and how a product is
rounded depends on where its operands lie. So they follow from the scenario alone, and the number of workers from the
machine.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from dataclasses import dataclass

import numpy as np
from torch import nn

from flower_privdec.algorithms import Algorithm, Exchange
from flower_privdec.algorithms.cohort import Cohort
from flower_privdec.algorithms.exchange import Gather, Mix, Reply
from flower_privdec.data.sparse_rows import Features
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory import multiplications_per_example
from flower_privdec.machine import available_cores

HALVES, LEAST = 2e-3, 4e-3  # seconds of a round from which it is halved, and of a block that is halved once more
MOST_BLOCKS = 64
NUMBER, PRODUCT = 6e-10, 7e-11  # seconds, of a parameter's noise and mixing, and of a multiplication's gradient
TRIAL = 2.5e-11  # of a multiplication without a gradient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dealing:
    """How a cohort is dealt out.

    Attributes:
        cuts: where the blocks begin, and the last ends, among the rows.
        workers: processes, this one among them.
    """

    cuts: tuple[int, ...]
    workers: int

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Return the first row of each block and the one behind its last."""
        return list(zip(self.cuts, self.cuts[1:], strict=False))

    def of(self, worker: int) -> list[int]:
        """Return the numbers of a worker's blocks, which follow one another."""
        count = len(self.cuts) - 1
        return list(range(worker * count // self.workers, (worker + 1) * count // self.workers))


def deal(experiment: Experiment, cohort: Cohort, workers: int | None = None) -> Dealing:
    """Deal out an experiment's cohort as the scenario says.

    Args:
        cohort: of all its peers.
        workers: how many processes, in place of the scenario's.
    """
    wanted, blocks = experiment.scenario.compute.workers if workers is None else workers, 1
    if cohort.device.type == "cpu":
        multiplications = multiplications_for(experiment.module, experiment.public.x)
        blocks = block_count(experiment.algorithm, cohort, multiplications)
    if wanted == "auto":
        return Dealing(_cuts(cohort, blocks), min(blocks, affordable(experiment)))
    if wanted > 1 and not can_fork():
        raise ScenarioError(f"compute.workers={wanted} needs Linux, where a process can be forked safely; use auto")
    if wanted > blocks:
        _log.warning(
            "compute.workers=%d: a round of this run is worth %d, by its estimate, and so many take part; use auto",
            *(wanted, blocks),
        )
    elif wanted > available_cores():
        _log.warning("compute.workers=%d take turns on %d cores; use auto", wanted, available_cores())
    return Dealing(_cuts(cohort, blocks), min(blocks, wanted))


def affordable(experiment: Experiment) -> int:
    """Return how many processes `auto` may take here: one where others of ours run beside this one."""
    alone = multiprocessing.parent_process() is None
    return available_cores() if alone and experiment.scenario.compute.threads == 1 and can_fork() else 1


def can_fork() -> bool:
    """Return whether this system can fork a process whose libraries go on working, and end it with its parent."""
    return all(hasattr(os, name) for name in ("memfd_create", "eventfd", "pidfd_open"))


def multiplications_for(module: nn.Module, x: Features) -> int:
    """Return how often numbers are multiplied for one example: once a parameter, or more in a convolution."""
    return max(multiplications_per_example(module, x), sum(part.numel() for part in module.parameters()))


def block_count(algorithm: Algorithm, cohort: Cohort, multiplications: int) -> int:
    """Return how many blocks a cohort of all peers falls into: a power of two, and 1 where a round is short.

    Args:
        multiplications: for one example.
    """
    if not _known_exchanges(algorithm, cohort):
        return 1
    seconds = round_seconds(algorithm, cohort, multiplications)
    worth = max(1 + (seconds >= HALVES), int(seconds / LEAST))
    return 1 << (min(worth, MOST_BLOCKS, len(cohort.peers)).bit_length() - 1)


def _known_exchanges(algorithm: Algorithm, cohort: Cohort) -> bool:
    """Return whether rows that cross are among those that a run begins with, and cross in one of the three ways."""
    exchanges = [item for item in algorithm.program if isinstance(item, Exchange)]
    known = all(type(item) in (Mix, Gather, Reply) for item in exchanges)
    return known and (cohort.mixing is not None or not exchanges)


def round_seconds(algorithm: Algorithm, cohort: Cohort, multiplications: int) -> float:
    """Estimate what a round takes on one core: noise and mixing, gradients, and what is tried on public examples."""
    d, sampler, validation = len(cohort.initial), cohort.data.sampler, cohort.validation
    members = 1.0
    if algorithm.edge_slots and cohort.mixing is not None:
        members += float(cohort.mixing.heard(1).mean())
    examples = float(np.mean(sampler.normalizer))
    step = members * (d * NUMBER + examples * multiplications * PRODUCT)
    tried = 0 if validation is None else algorithm.trials(members) * len(validation)
    chance = float(cohort.participation.chances.mean())
    each = algorithm.steps_per_round * step + tried * multiplications * TRIAL
    return len(cohort.peers) * chance * each


def _cuts(cohort: Cohort, blocks: int) -> tuple[int, ...]:
    return tuple(number * len(cohort.peers) // blocks for number in range(blocks + 1))
