"""Estimate a run's memory, and suggest what would fit if it does not.

All of it is an estimate from shapes: nothing is allocated. Sizes are in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import nn, torch
from flower_privdec.common.formatting import memory
from flower_privdec.common.machine import HEADROOM, available_bytes
from flower_privdec.gradients.protocol import inputs_like, layer_outputs
from flower_privdec.privacy.noise import noise_mechanism
from flower_privdec.rows.sparse_rows import Features, SparseRows

if TYPE_CHECKING:
    from flower_privdec.experiment.view import Experiment

WORKER_BYTES = 48 << 20  # a forked process's own, where it writes on what it shares with the one that forked it
CHECKPOINT_COPIES = 2  # of the state, while it is written: its tensors' bytes, and the file's


@dataclass(frozen=True)
class MemoryNeed:
    """The peak memory of a run in bytes, without that of the interpreter and torch.

    Attributes:
        state: as many buffers of m d numbers for m peers as the algorithm says: its rows, and if many peers are active
            one to mix into and one to work in; and what it holds for each neighbour.
        table: the memory of past gradients of variance reduction; 0 for other algorithms.
        data: the training and test examples, and a copy of the training examples if the run's number type or device
            is another.
        batch: for one round's batch of every peer, the input and twice the outputs of all leaf modules
            (forward and backward); at most compute.memory_mib for each process, to which its gradient kernel keeps.
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
    """Estimate what a run of the peers hosted here takes with so many processes."""
    public = experiment.public
    examples = experiment.own.examples
    data = sum(tensor.nbytes for tensor in (examples.x, examples.y, public.x, public.y))

    inputs = math.prod(public.input_shape)
    if isinstance(public.x, SparseRows):  # the numbers and places of the longest row
        inputs = 2 * int(np.diff(public.x.matrix.indptr).max())
    numbers_per_example = inputs + 2 * outputs_per_example(experiment.module, public.x)
    batch_size = experiment.own.sampler.normalizer.sum()  # of all peers together
    batch = int(batch_size * numbers_per_example * experiment.initial.element_size())
    most_in_batch = workers * experiment.scenario.compute.memory_mib << 20

    table = _chosen_table_bytes(experiment)
    return MemoryNeed(
        state=_state_bytes(experiment),
        table=table,
        data=data + _copy_bytes(experiment),
        batch=min(batch, most_in_batch),
        checkpoint=_checkpoint_bytes(experiment, table),
        workers=(workers - 1) * WORKER_BYTES,
    )


def _state_bytes(experiment: Experiment) -> int:
    algorithm = experiment.algorithm
    rows = len(experiment.own.peers)

    # A peer and each that it hears has a row for each edge slot.
    edge_rows = rows
    if algorithm.edge_slots and experiment.mixing is not None:
        edge_rows += int(experiment.mixing.heard(1)[0, experiment.own.peers].sum())

    noise_rows = _noise_rows(experiment)
    buffers = algorithm.buffers(experiment.participation) + noise_rows + _moments(experiment)
    rows_in_all = buffers * rows + algorithm.edge_slots * edge_rows + _told_models(experiment)
    return rows_in_all * experiment.initial.nbytes


def _noise_rows(experiment: Experiment) -> int:
    """Count the rows of each peer that the noise mechanism keeps, in the state or to itself."""
    private = experiment.scenario.private
    plan = experiment.own.protection
    if private is None or plan is None:
        return 0
    if plan.correlation is not None:
        return plan.correlation.bands - 1
    return len(noise_mechanism(private.noise).state)


def _told_models(experiment: Experiment) -> int:
    """Count the models that a codec that sends differences keeps for edges, and makes anew in an exchange."""
    if not experiment.arithmetic.remembers or experiment.mixing is None:
        return 0
    ends = experiment.mixing.topology.support()
    is_here = np.isin(ends, experiment.own.peers).any(axis=1)
    return 2 * int(is_here.sum())


def _moments(experiment: Experiment) -> int:
    """Count the rows of each peer that an optimizer and the averages add."""
    optimizer = experiment.algorithm.optimizer
    moments = 0 if optimizer is None else len(optimizer.moments)
    averages = "x" in experiment.algorithm.averaged
    return moments + averages


def _checkpoint_bytes(experiment: Experiment, table: int) -> int:
    copies = CHECKPOINT_COPIES
    if experiment.device.type != "cpu":
        copies += 1  # on the host
    slots = experiment.algorithm.slots + _moments(experiment)
    rows = len(experiment.own.peers)
    return copies * (slots * rows * experiment.initial.nbytes + table)


def _copy_bytes(experiment: Experiment) -> int:
    """Return the bytes of a copy of the examples in the run's dtype and on its device; 0 if no copy is made."""
    x = experiment.own.examples.x
    initial = experiment.initial
    if isinstance(x, SparseRows):
        return 0
    dtype = initial.dtype if x.is_floating_point() else x.dtype
    if (x.dtype, x.device) == (dtype, initial.device):
        return 0
    return x.numel() * dtype.itemsize


def table_bytes(experiment: Experiment) -> dict[str, int | None]:
    """Return the bytes that each kind of table would take for the peers hosted here.

    Returns:
        Bytes by name, at the scenario's batch size; None for a kind that the model cannot have.
    """
    sampler = experiment.own.sampler
    batch = round(float(sampler.normalizer.max()))
    counts = experiment.algorithm.table_sizes(
        experiment.kernel, sampler.partition_sizes, experiment.initial.numel(), batch
    )
    itemsize = experiment.initial.element_size()
    return {name: None if count is None else count * itemsize for name, count in counts.items()}


def _chosen_table_bytes(experiment: Experiment) -> int:
    table = experiment.algorithm.table
    if table is None:
        return 0
    return table_bytes(experiment)[table] or 0


def _fits(experiment: Experiment, table: int) -> bool:
    """Return whether the peers with a table of so many bytes fit into free memory, checkpoint included."""
    on_device = _state_bytes(experiment) + table + _copy_bytes(experiment)
    on_host = _checkpoint_bytes(experiment, table)
    if experiment.device.type == "cpu":
        return on_device + on_host <= HEADROOM * available_bytes(experiment.device)

    device_fits = on_device <= HEADROOM * available_bytes(experiment.device)
    return device_fits and on_host <= HEADROOM * available_bytes(torch.device("cpu"))


def shortage(experiment: Experiment) -> str | None:
    """Say what of a run does not fit into free memory, and what would; None if all fits.

    The data set is in memory already. What counts is state, table, a copy of the examples, and checkpoints.
    """
    table = _chosen_table_bytes(experiment)
    if _fits(experiment, table):
        return None

    state = _state_bytes(experiment)
    needed = memory(state + table + _copy_bytes(experiment) + _checkpoint_bytes(experiment, table))
    free = f"about {needed}, checkpoints included, and {memory(available_bytes(experiment.device))} are free"

    configured = experiment.algorithm.table
    if configured is None or table <= state:
        peers = len(experiment.own.peers)
        return (
            f"n_peers={peers} with models of {experiment.initial.numel():,} parameters need {free}; use fewer peers, "
            "a smaller model or a larger machine"
        )

    others = table_bytes(experiment).items()
    fitting = [f"{name} ({memory(size)})" for name, size in others if size and _fits(experiment, size)]
    remedy = "use fewer peers or a larger machine"
    if fitting:
        remedy = f"use {' or '.join(fitting)}"
    return f"algorithm.table={configured!r} needs {free}; {remedy}"


def outputs_per_example(module: nn.Module, x: Features) -> int:
    """Count the numbers that all leaf modules together put out for one example, like those of x [N, ...]."""
    return sum(count for _, count in _outputs(module, x))


def multiplications_per_example(module: nn.Module, x: Features) -> int:
    """Estimate how many multiplications it takes to try a model on one example, like those of x [N, ...].

    Each output of a linear layer or a convolution takes as many as it has weights, and any other output one.
    """
    total = 0
    for leaf, count in _outputs(module, x):
        weights = 0
        for part in leaf.parameters(recurse=False):
            if part.ndim > 1:  # a matrix or kernels, whose first axis is the output
                weights += part.numel() // len(part)
        total += count * max(1, weights)
    return total


def _outputs(module: nn.Module, x: Features) -> list[tuple[nn.Module, int]]:
    """Return how many numbers each leaf module puts out for one example."""
    first = x[:1].dense() if isinstance(x, SparseRows) else x[:1]
    zeros = torch.zeros_like(first)
    # Dropout may draw; the numbers that the process draws later must not depend on it.
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        return layer_outputs(module, lambda: module(inputs_like(zeros, next(module.parameters()))))
