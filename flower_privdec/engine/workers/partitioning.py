"""Divide the peers into blocks and the blocks among processes, by an estimate and never by timing.

A run must give the same bits on every machine, and blocks decide the bits: the peers of a block are computed in one
operation, and how a product is rounded depends on where its operands lie in memory. So the blocks depend only on the
scenario. The number of processes may depend on the machine, because a block is computed the same way in each.
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

# Seconds on one core, measured once. Rough values are good enough, but a machine must not measure its own: all of them
# have to find the same blocks.
SPLIT_FROM = 2e-3  # a round of this length has two blocks
BLOCK_SECONDS = 4e-3  # a longer one has a block for each of these, rounded down to a power of two
PARAMETER_SECONDS = 6e-10  # noise and mixing, for each parameter
GRADIENT_SECONDS = 7e-11  # a multiplication of a forward and backward pass
FORWARD_SECONDS = 2.5e-11  # a multiplication of a forward pass only

MOST_BLOCKS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioning:
    """The division of a cohort's rows into blocks, and of the blocks among processes.

    Attributes:
        cuts: the first row of each block, and at last the number of rows.
        workers: the number of processes, including this one, which is number 0.
    """

    cuts: tuple[int, ...]
    workers: int

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Each block as (first row, end row); the end row is excluded."""
        return list(pairwise(self.cuts))

    def of(self, worker: int) -> list[int]:
        """Return the numbers of a worker's blocks, which are consecutive."""
        count = len(self.cuts) - 1
        first = worker * count // self.workers
        end = (worker + 1) * count // self.workers
        return list(range(first, end))


def partition_cohort(experiment: Experiment, workers: int | None = None) -> Partitioning:
    """Divide the peers of an experiment into blocks, and the blocks among processes.

    Args:
        experiment: must host all peers of its network.
        workers: the number of processes; None takes it from the scenario. There are never more than blocks.

    Raises:
        ScenarioError: the system cannot run more than one process.
    """
    wanted = experiment.scenario.compute.workers if workers is None else workers
    n_peers = experiment.scenario.n_peers
    blocks = _blocks(experiment)
    cuts = tuple(number * n_peers // blocks for number in range(blocks + 1))

    if wanted == "auto":
        return Partitioning(cuts, min(blocks, affordable(experiment)))

    if wanted > 1 and not can_fork():
        raise ScenarioError(
            f"compute.workers={wanted} needs Linux, because only there a process can be forked safely; use auto",
            code="workers.no-fork",
        )

    if wanted > blocks:
        _log.warning(
            "compute.workers=%d: a round of this run is estimated to be so short that it uses only %d; use auto",
            wanted,
            blocks,
        )
    elif wanted > available_cores():
        _log.warning("compute.workers=%d must share %d cores; use auto", wanted, available_cores())

    return Partitioning(cuts, min(blocks, wanted))


def affordable(experiment: Experiment) -> int:
    """Return how many processes `auto` may use on this machine."""
    # A process that multiprocessing started is one of several, such as those of a study, which share the cores already.
    is_alone = multiprocessing.parent_process() is None
    if is_alone and experiment.scenario.compute.threads == 1 and can_fork():
        return available_cores()
    return 1


def _blocks(experiment: Experiment) -> int:
    """Return the number of blocks of an experiment."""
    # A GPU computes all peers at once.
    if experiment.device.type != "cpu":
        return 1

    # Workers can perform only these exchanges. A subclass does not count: it may be a user's and do something else.
    exchanges = [item for item in experiment.algorithm.program if isinstance(item, Exchange)]
    if any(type(exchange) not in (Mix, Gather, Reply) for exchange in exchanges):
        return 1

    return block_count(experiment.scenario.n_peers, _estimated(experiment))


def block_count(n_peers: int, seconds: float) -> int:
    """Return the number of blocks of a round that takes so many seconds: a power of two, at most one for each peer.

    Examples:
        >>> block_count(16, 0.001), block_count(16, 0.003), block_count(16, 0.05), block_count(5, 0.05)
        (1, 2, 8, 4)
    """
    blocks = int(seconds / BLOCK_SECONDS)
    if seconds >= SPLIT_FROM:
        blocks = max(blocks, 2)
    blocks = max(1, min(blocks, MOST_BLOCKS, n_peers))
    return 1 << (blocks.bit_length() - 1)


def _estimated(experiment: Experiment) -> float:
    """Return the estimated seconds of a round on one core."""
    algorithm = experiment.algorithm

    # How many models a peer takes gradients of: its own, and with vectors on edges also each in-neighbour's.
    members = 1.0
    if algorithm.edge_slots and experiment.mixing is not None:
        members += float(experiment.mixing.heard(1).mean())

    outputs_tried = 0.0
    validation = experiment.public.validation
    if validation is not None:
        outputs_tried = algorithm.trials(members) * len(validation.y)

    return round_seconds(
        active=experiment.scenario.n_peers * float(experiment.participation.chances.mean()),
        d=len(experiment.initial),
        examples=float(np.mean(experiment.own.sampler.normalizer)),
        products=multiplications(experiment.module, experiment.public.x),
        gradients=algorithm.steps_per_round * members,
        outputs_tried=outputs_tried,
    )


def multiplications(module: nn.Module, x: Features) -> int:
    """Return the number of multiplications for one example: at least one per parameter, more in a convolution."""
    parameters = sum(part.numel() for part in module.parameters())
    return max(multiplications_per_example(module, x), parameters)


def round_seconds(
    active: float, d: int, examples: float, products: float, gradients: float = 1, outputs_tried: float = 0
) -> float:
    """Estimate the seconds of a round on one core: noise and mixing, gradients, and trials on public examples.

    Args:
        active: the number of active peers.
        d: the number of parameters.
        examples: the number of examples in a batch.
        products: the multiplications for one example.
        gradients: how many gradients, each of a batch, a peer computes.
        outputs_tried: how many outputs a peer computes without a gradient, each for one public example.
    """
    gradient = d * PARAMETER_SECONDS + examples * products * GRADIENT_SECONDS
    trials = outputs_tried * products * FORWARD_SECONDS
    return active * (gradients * gradient + trials)
