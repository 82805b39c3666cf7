"""Divide a cohort into blocks, and these among processes, by an estimate and never by timing.

The blocks decide the bits: the peers of a block are computed together in any process, and the rounding of a product
depends on where its operands lie. So the blocks follow from the scenario alone. Only the number of workers follows from
the machine.
"""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import nn

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import available_cores, can_fork
from flower_privdec.core import Exchange, Gather, Mix, Reply
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory_estimate import multiplications_per_example
from flower_privdec.rows.sparse_rows import Features

# Seconds on one core, measured once. They only have to be right within a factor: they decide how fine the blocks are,
# and every machine must decide the same.
HALVES = 2e-3  # a round that takes longer is halved
LEAST = 4e-3  # a round has a block for each of these, to the power of two below
MOST_BLOCKS = 64
NUMBER = 6e-10  # of the noise and mixing of one parameter
PRODUCT = 7e-11  # of one multiplication of a gradient
TRIAL = 2.5e-11  # of one multiplication without a gradient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioning:
    """How a cohort is partitioned.

    Attributes:
        cuts: the first row of each block, and the end of the last.
        workers: the number of processes, this one included.
    """

    cuts: tuple[int, ...]
    workers: int

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The first row of each block, and the one behind its last."""
        return list(pairwise(self.cuts))

    def of(self, worker: int) -> list[int]:
        """Return the numbers of a worker's blocks, which follow one another."""
        count = len(self.cuts) - 1
        first = worker * count // self.workers
        end = (worker + 1) * count // self.workers
        return list(range(first, end))


def partition_cohort(experiment: Experiment, workers: int | None = None) -> Partitioning:
    """Divide the peers of an experiment, which hosts its whole network, into blocks, and these among workers.

    Args:
        workers: the number of processes, in place of the scenario's.

    Raises:
        ScenarioError: this system cannot run so many.
    """
    wanted = experiment.scenario.compute.workers if workers is None else workers
    blocks = _blocks(experiment)
    cuts = tuple(number * experiment.scenario.n_peers // blocks for number in range(blocks + 1))
    if wanted == "auto":
        return Partitioning(cuts, min(blocks, affordable(experiment)))

    if wanted > 1 and not can_fork():
        raise ScenarioError(
            f"compute.workers={wanted} needs Linux, where a process can be forked safely; use auto",
            code="workers.no-fork",
        )

    if wanted > blocks:
        _log.warning(
            "compute.workers=%d: a round of this run is worth %d, by its estimate, and so many take part; use auto",
            *(wanted, blocks),
        )
    elif wanted > available_cores():
        _log.warning("compute.workers=%d take turns on %d cores; use auto", wanted, available_cores())
    return Partitioning(cuts, min(blocks, wanted))


def affordable(experiment: Experiment) -> int:
    """Return how many processes `auto` may take here."""
    # A process that multiprocessing started is one of several, such as a study's, which share the cores already.
    is_alone = multiprocessing.parent_process() is None
    if is_alone and experiment.scenario.compute.threads == 1 and can_fork():
        return available_cores()
    return 1


def _blocks(experiment: Experiment) -> int:
    """Return the number of blocks of an experiment: one on a GPU, or if it has exchanges of a user's own kind."""
    exchanges = [item for item in experiment.algorithm.program if isinstance(item, Exchange)]
    all_known = all(type(exchange) in (Mix, Gather, Reply) for exchange in exchanges)
    if experiment.device.type != "cpu" or not all_known:
        return 1
    return block_count(experiment.scenario.n_peers, _estimated(experiment))


def block_count(n_peers: int, seconds: float) -> int:
    """Return the number of blocks of a round of some seconds: a power of two.

    Examples:
        >>> block_count(16, 0.001), block_count(16, 0.003), block_count(16, 0.05), block_count(5, 0.05)
        (1, 2, 8, 4)
    """
    blocks = int(seconds / LEAST)
    if seconds >= HALVES:
        blocks = max(blocks, 2)
    blocks = max(1, min(blocks, MOST_BLOCKS, n_peers))
    return 1 << (blocks.bit_length() - 1)


def _estimated(experiment: Experiment) -> float:
    """Return the estimated seconds of a round on one core."""
    algorithm = experiment.algorithm

    # An algorithm with edges takes a gradient for each in-neighbour too.
    members = 1.0
    if algorithm.edge_slots and experiment.mixing is not None:
        members += float(experiment.mixing.heard(1).mean())

    tried = 0.0
    validation = experiment.public.validation
    if validation is not None:
        tried = algorithm.trials(members) * len(validation.y)

    return round_seconds(
        active=experiment.scenario.n_peers * float(experiment.participation.chances.mean()),
        d=len(experiment.initial),
        examples=float(np.mean(experiment.own.sampler.normalizer)),
        products=multiplications(experiment.module, experiment.public.x),
        steps=algorithm.steps_per_round * members,
        tried=tried,
    )


def multiplications(module: nn.Module, x: Features) -> int:
    """Return the number of multiplications for one example: one a parameter, and more in a convolution."""
    parameters = sum(part.numel() for part in module.parameters())
    return max(multiplications_per_example(module, x), parameters)


def round_seconds(active: float, d: int, examples: float, products: float, steps: float = 1, tried: float = 0) -> float:
    """Estimate the seconds of a round on one core: noise and mixing, gradients, and trials on public examples.

    Args:
        active: the number of active peers.
        d: the number of parameters.
        examples: the number of examples in a step.
        products: the multiplications for one of them.
        steps: the gradients that a peer takes.
        tried: the outputs that a peer computes, each for one public example.
    """
    step = d * NUMBER + examples * products * PRODUCT
    trials = tried * products * TRIAL
    return active * (steps * step + trials)
