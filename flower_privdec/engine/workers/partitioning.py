"""Into how many blocks a cohort falls, and how many processes take them: by an estimate, never by timing.

The blocks decide the bits: the peers of a block are computed together in any process, and how a product is
rounded depends on where its operands lie. So they follow from the scenario alone, and the number of workers from the
machine.
"""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass

import numpy as np
from torch import nn

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import available_cores, can_fork
from flower_privdec.core import Exchange, Gather, Mix, Reply
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory_estimate import multiplications_per_example
from flower_privdec.rows.sparse_rows import Features

HALVES, LEAST = 2e-3, 4e-3  # seconds of a round from which it is halved, and of a block that is halved once more
MOST_BLOCKS = 64
NUMBER, PRODUCT = 6e-10, 7e-11  # seconds, of a parameter's noise and mixing, and of a multiplication's gradient
TRIAL = 2.5e-11  # of a multiplication without a gradient

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioning:
    """How a cohort is partitioned.

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


def partition_cohort(experiment: Experiment, workers: int | None = None) -> Partitioning:
    """Partition the peers of an experiment, which are all of its network's, into blocks and workers.

    Args:
        workers: how many processes, in place of the scenario's.

    Raises:
        ScenarioError: so many cannot be had on this system.
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
    """Return how many processes `auto` may take here: one where others of ours run beside this one."""
    alone = multiprocessing.parent_process() is None
    return available_cores() if alone and experiment.scenario.compute.threads == 1 and can_fork() else 1


def _blocks(experiment: Experiment) -> int:
    """Return into how many blocks an experiment falls: one on a GPU, and where exchanges are of a user's own kind."""
    exchanges = [item for item in experiment.algorithm.program if isinstance(item, Exchange)]
    known = all(type(item) in (Mix, Gather, Reply) for item in exchanges)
    if experiment.device.type != "cpu" or not known:
        return 1
    return block_count(experiment.scenario.n_peers, _estimated(experiment))


def block_count(n_peers: int, seconds: float) -> int:
    """Return into how many blocks a round of some seconds falls: a power of two.

    Examples:
        >>> block_count(16, 0.001), block_count(16, 0.003), block_count(16, 0.05), block_count(5, 0.05)
        (1, 2, 8, 4)
    """
    worth = max(1 + (seconds >= HALVES), int(seconds / LEAST))
    return 1 << (min(worth, MOST_BLOCKS, n_peers).bit_length() - 1)


def _estimated(experiment: Experiment) -> float:
    algorithm = experiment.algorithm
    members = 1.0
    validation = experiment.public.validation
    if algorithm.edge_slots and experiment.mixing is not None:
        members += float(experiment.mixing.heard(1).mean())
    return round_seconds(
        experiment.scenario.n_peers * float(experiment.participation.chances.mean()),
        len(experiment.initial),
        float(np.mean(experiment.own.sampler.normalizer)),
        multiplications(experiment.module, experiment.public.x),
        algorithm.steps_per_round * members,
        0.0 if validation is None else algorithm.trials(members) * len(validation.y),
    )


def multiplications(module: nn.Module, x: Features) -> int:
    """Return how often numbers are multiplied for one example: once a parameter, or more in a convolution."""
    return max(multiplications_per_example(module, x), sum(part.numel() for part in module.parameters()))


def round_seconds(active: float, d: int, examples: float, products: float, steps: float = 1, tried: float = 0) -> float:
    """Estimate what a round takes on one core: noise and mixing, gradients, and what is tried on public examples.

    Args:
        active: peers.
        d: parameters.
        examples: of a step.
        products: multiplications for one of them.
        steps: gradients that a peer takes.
        tried: outputs for one public example each that it computes.
    """
    return active * (steps * (d * NUMBER + examples * products * PRODUCT) + tried * products * TRIAL)
