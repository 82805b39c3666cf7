"""How much memory a run takes, part by part, and whether this machine has it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.formatting import memory
from flower_privdec.common.machine import HEADROOM, available_bytes, check_room
from flower_privdec.errors import ScenarioError
from flower_privdec.gradients.protocol import inputs_like
from flower_privdec.privacy.noise import noise_mechanism
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.sections import steps_per_round

if TYPE_CHECKING:
    from flower_privdec.experiment.view import Experiment

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


def check_steps(scenario: Scenario, peers: int) -> None:
    """Refuse so many rounds that the noise of every step of every peer does not fit into memory.

    Raises:
        ScenarioError: with the estimate.
    """
    if scenario.private is not None:
        steps = scenario.rounds * steps_per_round(scenario.algorithm)
        what = f"rounds={scenario.rounds}: the noise and clip norms of {steps:,} steps of {peers:,} peers"
        check_room(STEP_BYTES * steps * peers, what, "take fewer rounds, local steps or peers")


def memory_need(experiment: Experiment, workers: int = 1) -> MemoryNeed:
    """Estimate what a run of the peers hosted here takes, by so many processes."""
    scenario, public, examples = experiment.scenario, experiment.public, experiment.own.examples
    data = sum(t.nbytes for t in (examples.x, examples.y, public.x, public.y))
    inputs = math.prod(public.input_shape)
    if isinstance(public.x, SparseRows):  # what the longest row names, twice packed
        inputs = 2 * int(np.diff(public.x.matrix.indptr).max())
    per_example = inputs + 2 * outputs_per_example(experiment.module, public.x)
    batch = int(experiment.own.sampler.normalizer.sum() * per_example * experiment.initial.element_size())
    table, rows = _chosen_table_bytes(experiment), len(experiment.own.peers)
    return MemoryNeed(
        state=_state_bytes(experiment, rows),
        table=table,
        data=data + _copy_bytes(experiment),
        batch=min(batch, workers * scenario.compute.memory_mib << 20),
        checkpoint=_checkpoint_bytes(experiment, rows, table),
        workers=(workers - 1) * WORKER_BYTES,
    )


def _row_bytes(experiment: Experiment) -> int:
    return experiment.initial.numel() * experiment.initial.element_size()


def _state_bytes(experiment: Experiment, rows: int) -> int:
    algorithm, pairs = experiment.algorithm, rows
    if algorithm.edge_slots and experiment.mixing is not None:
        pairs += int(experiment.mixing.heard(1)[0, experiment.own.peers].sum())
    private = experiment.scenario.private
    buffers = algorithm.buffers(experiment.participation) + len(
        noise_mechanism(private.noise if private else None).state
    )
    return (buffers * rows + algorithm.edge_slots * pairs) * _row_bytes(experiment)


def _checkpoint_bytes(experiment: Experiment, rows: int, table: int) -> int:
    copies = CHECKPOINT_COPIES + (experiment.device.type != "cpu")
    return copies * (experiment.algorithm.slots * rows * _row_bytes(experiment) + table)


def _copy_bytes(experiment: Experiment) -> int:
    x, initial = experiment.own.examples.x, experiment.initial
    if isinstance(x, SparseRows):
        return 0
    if not x.is_floating_point():
        return 0 if x.device == initial.device else x.nbytes
    same = x.dtype == initial.dtype and x.device == initial.device
    return 0 if same else x.numel() * initial.element_size()


def table_bytes(experiment: Experiment) -> dict[str, int | None]:
    """Return what each kind of table that the algorithm can keep would take for the peers hosted here.

    Returns:
        Bytes by name, at the scenario's batch size; None for a kind that the model cannot have.
    """
    sampler, itemsize = experiment.own.sampler, experiment.initial.element_size()
    sizes, batch = sampler.partition_sizes, round(float(sampler.normalizer.max()))
    counts = experiment.algorithm.table_sizes(experiment.kernel, sizes, experiment.initial.numel(), batch)
    return {name: None if count is None else count * itemsize for name, count in counts.items()}


def _chosen_table_bytes(experiment: Experiment) -> int:
    table = experiment.algorithm.table
    return 0 if table is None else table_bytes(experiment)[table] or 0


def _fits(experiment: Experiment, rows: int, table: int) -> bool:
    """Return whether so many peers with a table of so many bytes fit into what is free, checkpoint included."""
    there = _state_bytes(experiment, rows) + table + _copy_bytes(experiment)
    host = _checkpoint_bytes(experiment, rows, table)
    if experiment.device.type == "cpu":
        return there + host <= HEADROOM * available_bytes(experiment.device)
    on_device = there <= HEADROOM * available_bytes(experiment.device)
    return on_device and host <= HEADROOM * available_bytes(torch.device("cpu"))


def shortage(experiment: Experiment) -> str | None:
    """Say what of a run does not fit into free memory and what would, or return None where all fits.

    The data set is in memory already; counted are state, table, a copy of the examples, and checkpoints.
    """
    rows, table = len(experiment.own.peers), _chosen_table_bytes(experiment)
    if _fits(experiment, rows, table):
        return None
    state = _state_bytes(experiment, rows)
    needed = memory(state + table + _copy_bytes(experiment) + _checkpoint_bytes(experiment, rows, table))
    free = f"about {needed}, checkpoints included, and {memory(available_bytes(experiment.device))} are free"
    configured = experiment.algorithm.table
    if configured is None or table <= state:
        return (
            f"n_peers={rows} with models of {experiment.initial.numel():,} parameters need {free}; use fewer peers, "
            "a smaller model or a larger machine"
        )
    others = table_bytes(experiment).items()
    fitting = [f"{name} ({memory(size)})" for name, size in others if size and _fits(experiment, rows, size)]
    remedy = f"use {' or '.join(fitting)}" if fitting else "use fewer peers or a larger machine"
    return f"algorithm.table={configured!r} needs {free}; {remedy}"


def check_memory(experiment: Experiment) -> None:
    """Refuse a run whose state and table do not fit into free memory.

    Raises:
        ScenarioError: naming what is too large, and what would fit.
    """
    message = shortage(experiment)
    if message is not None:
        raise ScenarioError(message)


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
    counts: list[tuple[nn.Module, int]] = []
    leaves = [leaf for leaf in module.modules() if not list(leaf.children())]
    handles = [leaf.register_forward_hook(lambda m, _i, out: counts.append((m, _numbers(out)))) for leaf in leaves]
    parameter = next(module.parameters())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            one = x[:1].dense() if isinstance(x, SparseRows) else x[:1]
            module(inputs_like(torch.zeros_like(one), parameter))
    finally:
        for handle in handles:
            handle.remove()
    return counts


def _numbers(out: Any) -> int:
    """Count the numbers of what a module returns: a tensor, or several, as a recurrent layer does."""
    if isinstance(out, Tensor):
        return out.numel()
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return sum(map(_numbers, parts))
