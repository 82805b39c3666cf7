"""The examples of a step: chosen by (the peer's key, step, global peer), and gathered on the device.

`Sampler` chooses them, and `PeerData` gathers what it chose.

A peer's choice never depends on which other peers are hosted or requested, nor on the order of the steps. A row is a
peer's position among those hosted here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.data.datasets import Examples
from flower_privdec.rows.keys import Secret, keyed_generator
from flower_privdec.rows.sparse_rows import Features, SparseRows
from flower_privdec.scenario.sections import BatchSection

if TYPE_CHECKING:
    from torch import Tensor


# A generator is keyed for a block of steps, because keying costs more than one small batch. The block's
# length depends only on the scenario's batch size, so that the numbers do not depend on the cohort.
_BLOCK_STEPS = 128
_BLOCK_EXAMPLES = 512
_RATE_STEPS = 32  # in a block, if a rate makes the batch size each peer's own
KEY_BYTES = 32


@dataclass(frozen=True)
class LocalBatch:
    """The local positions that m peers use in a step.

    Attributes:
        index: int64 [m, B], positions 0..J_i-1 in each peer's own examples, ascending, then 0 as padding.
        weight: float32 [m, B], 1 for an example, 0 for padding.
    """

    index: np.ndarray
    weight: np.ndarray


class Sampler:
    """Draws local positions.

    Attributes:
        sizes: int64 [m], examples in each peer's batch, expected for poisson; 0 if a rate decides, and for full.
        normalizer: float64 [m], the expected batch size, by which a sum of clipped gradients is
            divided; fixed, for the size that was drawn is private. With a rate q it is q J_i, no whole number.
        sampling_rate: float64 [m], the chance of one example to be in the batch of a step that draws from its group.
        groups: b, into which a peer's examples are divided by their position modulo b, with poisson; step t draws from
            group t mod b.

    Privacy: amplification by sampling holds towards observers who do not know who was sampled. A deployed
    peer's key is therefore bytes from the operating system; the scenario's seed is for simulation.
    `shuffle` and `full` amplify nothing; with `shuffle` a peer uses an example at most once in an epoch of
    J_i // size steps.
    """

    def __init__(
        self,
        section: BatchSection,
        partition_sizes: Sequence[int] | np.ndarray,
        keys: Mapping[int, Secret],
        peers: Sequence[int] | np.ndarray | None = None,
        groups: int = 1,
    ) -> None:
        """Check the batch size against every peer's examples.

        Args:
            section: how examples are drawn.
            partition_sizes: how many examples each peer holds, [m].
            keys: of each peer, by global id: its secret key, or the scenario's seed.
            peers: their global ids, [m]; by default 0 to m - 1.
            groups: into how many groups examples are divided; only with poisson.

        Raises:
            ScenarioError: a peer holds fewer examples than the batch size and is refused, or too few for the groups.
        """
        self.section = section
        self.kind = section.sampling
        self.groups = groups
        self.keys = keys
        self.partition_sizes = np.asarray(partition_sizes, dtype=np.int64)
        count = len(self.partition_sizes)
        if peers is None:
            self.peers = np.arange(count)
        else:
            self.peers = np.asarray(peers, dtype=np.int64)

        size = section.size
        if size is None:
            self.sizes = np.zeros(count, dtype=np.int64)
            self._steps = _RATE_STEPS
        else:
            self.sizes = self._sizes(size)
            self._steps = max(1, min(_BLOCK_STEPS, _BLOCK_EXAMPLES // size))
        self.sampling_rate, self.normalizer = self._rates()
        if groups > 1:
            self._check_groups()
            self.sampling_rate = np.minimum(self.sampling_rate * groups, 1.0)
        self._block = _Block(-1, count, self._steps)

    def _rates(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each peer's sampling rate and its expected batch size, float64 [m]."""
        held = self.partition_sizes
        if self.kind == "full":
            rates = np.full(len(held), 1.0)
            return rates, held * rates
        if self.section.rate is not None:
            rates = np.full(len(held), self.section.rate)
            return rates, held * rates
        if self.kind == "blocks":
            # Of c blocks, J mod c hold one example more than the others, so a batch has J / c on average.
            rates = np.asarray(1 / self.blocks(np.arange(len(held))))
            return rates, held * rates

        # The quotient times J would round: the size itself is exact.
        return np.asarray(self.sizes / held), self.sizes.astype(np.float64)

    def _check_groups(self) -> None:
        """Refuse groups that are smaller than a batch."""
        batches = 1 / self.sampling_rate  # that a peer's examples would fill
        row = int(batches.argmin())
        most = int(batches[row] * (1 + 1e-12))
        if self.groups > most:
            raise ScenarioError(
                f"privacy.noise.bands={self.groups} must be at most {most}: peer {self.peers[row]} has "
                f"{self.partition_sizes[row]} examples, which fill {most} batches; lower it, or data.batch",
                code="noise.bands",
            )

    def _sizes(self, size: int) -> np.ndarray:
        """Return each peer's batch size; refuse peers that hold less, unless they take all they hold."""
        counts = self.partition_sizes
        short = int((counts < size).sum())
        if short and self.section.small_peers != "full":
            row = int(counts.argmin())
            holds = f"what the smallest peer, {self.peers[row]}, holds"
            or_rate = ""
            if self.kind == "poisson":
                or_rate = "a rate (data.batch.rate) in its place, "

            raise ScenarioError(
                f"data.batch.size={size} must be at most {counts[row]}, {holds} ({short} of {len(counts)} hold fewer "
                f"than {size}): lower it, use {or_rate}"
                "data.batch.small_peers: full, data.partition.min_size, fewer peers or more data",
                code="batch.too-large",
            )

        return np.minimum(size, counts)

    def like(self, **changes: Any) -> Sampler:
        """Return a sampler of the same kind over other examples or peers, or with other keys."""
        names = ("section", "partition_sizes", "keys", "peers", "groups")
        return Sampler(**{name: getattr(self, name) for name in names} | changes)

    def part(self, start: int, stop: int) -> Sampler:
        """Return a sampler of the peers [start, stop), which draws for them what this one does."""
        return self.like(partition_sizes=self.partition_sizes[start:stop], peers=self.peers[start:stop])

    def with_fresh_keys(self) -> Sampler:
        """Return a sampler of the same kind with fresh keys from the operating system.

        Privacy: a repeated step must draw its examples again. Were they the same, all the releases would
        share one coin of chance q, and their average would reveal which examples were drawn, which no sum of their ε
        covers.
        """
        return self.like(keys={peer: os.urandom(KEY_BYTES) for peer in self.keys})

    def batch(self, step: int, rows: Sequence[int] | np.ndarray) -> LocalBatch:
        """Return the positions that some peers use in a step.

        Args:
            step: its number in the run, 0 or later; in any order.
            rows: of the peers, [r], in any order.

        Returns:
            The batch, as wide as the longest among these peers and at least 1; only the padding depends on which other
            peers are requested.

        Raises:
            ValueError: the step or a row is negative, or a peer has no key here (`full` needs none).
        """
        rows = np.asarray(rows, dtype=np.int64)
        if step < 0 or (len(rows) and int(rows.min()) < 0):
            raise ArgumentError(f"step {step} and rows {rows} must be >= 0", code="batch.negative")

        if self.kind == "full":
            sizes = self.partition_sizes[rows]
            return padded(np.arange(int(sizes.max(initial=1))), sizes)

        if self.kind == "blocks":
            numbers = []
            for row, count in zip(rows.tolist(), self.blocks(rows), strict=True):
                numbers.append(self._generator("blocks", step, row).integers(count))
            return self.block(rows, np.array(numbers, dtype=np.int64))

        # The other kinds draw a block of steps at once, for a peer as soon as it is requested.
        number, within = divmod(int(step), self._steps)
        if self._block.number != number:
            self._block = _Block(number, len(self.partition_sizes), self._steps)
        places = self._block.place_of.take(rows)
        if len(places) and int(places.min()) < 0:
            self._block.add(np.unique(rows[places < 0]), self._draw)
            places = self._block.place_of.take(rows)

        counts = self._block.counts[within].take(places)
        width = int(counts.max(initial=1))
        index = self._block.index[within, :, :width].take(places, axis=0)
        weight = (np.arange(width) < counts[:, None]).astype(np.float32)
        return LocalBatch(index, weight)

    def blocks(self, rows: np.ndarray) -> np.ndarray:
        """Return into how many fixed batches each peer's examples fall, int64 [r]: floor(J / b)."""
        return np.asarray(self.partition_sizes[rows] // self.sizes[rows])

    def block(self, rows: np.ndarray, numbers: np.ndarray) -> LocalBatch:
        """Return one fixed batch of each peer: positions j, j + c, j + 2 c, ... below J for batch j of c."""
        sizes = self.partition_sizes[rows]
        counts = self.blocks(rows)
        lengths = -(-(sizes - numbers) // counts)
        width = int(lengths.max(initial=1))
        index = numbers[:, None] + counts[:, None] * np.arange(width)
        return padded(index, sizes)

    def _generator(self, purpose: str, number: int, row: int) -> np.random.Generator:
        peer = int(self.peers[row])
        if peer not in self.keys:
            raise ArgumentError(f"peer {peer} has no key here: request only peers hosted here", code="keys.missing")
        return keyed_generator(self.keys[peer], purpose, number, peer)

    def _draw(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw one peer's block: how many examples in each of its steps, and their positions end to end."""
        count = int(self.partition_sizes[row])
        size = int(self.sizes[row])
        if self.kind == "shuffle":
            return np.full(self._steps, size), self._shuffled(number * self._steps, row)

        generator = self._generator("sampling", number, row)
        if self.kind == "poisson":
            rate = float(self.sampling_rate[row])
            if self.groups > 1:
                return draw_from_groups(generator, number * self._steps, self._steps, count, rate, self.groups)
            return draw_poisson(generator, self._steps, count, rate)
        positions = draw_distinct(generator, self._steps, size, count)
        return np.full(self._steps, size), positions.reshape(-1)

    def _shuffled(self, first: int, row: int) -> np.ndarray:
        """Return one peer's positions in the steps of a block that begins at step `first`, end to end.

        Each epoch is one permutation, cut into batches. A block may begin and end within an epoch, and span several.
        """
        count = int(self.partition_sizes[row])
        size = int(self.sizes[row])
        steps_per_epoch = count // size
        first_epoch = first // steps_per_epoch
        last_epoch = (first + self._steps - 1) // steps_per_epoch

        batches = []
        for epoch in range(first_epoch, last_epoch + 1):
            order = self._generator("shuffle", epoch, row).permutation(count)
            batches.append(order[: steps_per_epoch * size].reshape(steps_per_epoch, size))

        start = first - first_epoch * steps_per_epoch
        chosen = np.concatenate(batches)[start : start + self._steps]
        return np.sort(chosen, axis=1).reshape(-1)


def draw_poisson(generator: np.random.Generator, steps: int, count: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw Poisson samples of several steps at once.

    Poisson sampling is one independent coin of chance `rate` for each (step, example). Laid end to end these
    are steps · count Bernoulli trials, whose gaps from hit to hit are independent and geometric: summing
    geometric gaps gives exactly this distribution, at the cost of the hits instead of the trials.

    Args:
        count: examples, J.
        rate: the chance of each, in (0, 1].

    Returns:
        Hits in each step, int64 [steps], and their positions, ascending within each step, end to end.
    """
    total = steps * count
    expected = total * rate
    ahead = int(expected + 4 * expected**0.5) + 8  # is nearly always enough
    hits = np.cumsum(generator.geometric(rate, ahead)) - 1
    while hits[-1] < total:
        more = hits[-1] + np.cumsum(generator.geometric(rate, ahead))
        hits = np.concatenate([hits, more])
    hits = hits[: int(hits.searchsorted(total))]

    ends = hits.searchsorted(np.arange(1, steps + 1) * count)
    counts = np.diff(ends, prepend=0)
    return counts, hits % count


def draw_from_groups(
    generator: np.random.Generator, first: int, steps: int, count: int, rate: float, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw Poisson samples of several steps, each from the examples whose position is its number modulo `groups`.

    Args:
        first: the number of the first step.
        rate: the chance of each example of the step's group.

    Returns:
        See `draw_poisson`.
    """
    largest = -(-count // groups)  # the size of the first group; others may have one example less
    counts, within = draw_poisson(generator, steps, largest, rate)
    step = np.repeat(np.arange(steps), counts)
    positions = (first + step) % groups + groups * within
    exists = positions < count
    return np.bincount(step[exists], minlength=steps), positions[exists]


def draw_distinct(generator: np.random.Generator, steps: int, size: int, count: int) -> np.ndarray:
    """Draw `size` distinct positions of `count` in each of several steps, every set equally likely.

    Floyd's algorithm: for t = count - size .. count - 1 take a uniform position in 0..t, or t itself if
    that was taken before. A step without such a clash is its draws as they are; only the others take a loop.

    Args:
        size: positions a step.
        count: examples, J, at least `size`.

    Returns:
        Positions, int64 [steps, size], ascending in each step.
    """
    if size == 1:
        return generator.integers(0, count, size=(steps, 1))  # the same numbers, for one bound is drawn faster

    tops = np.arange(count - size, count)
    draws = generator.integers(0, tops, size=(steps, size), endpoint=True)
    ordered = np.sort(draws, axis=1)
    has_clash = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    for clash in np.flatnonzero(has_clash):
        taken: set[int] = set()
        for draw, top in zip(draws[clash].tolist(), tops.tolist(), strict=True):
            taken.add(top if draw in taken else draw)
        ordered[clash] = sorted(taken)
    return ordered


def padded(positions: np.ndarray, sizes: np.ndarray) -> LocalBatch:
    """Return positions [B] or [m, B], those below each peer's size [m]; 0 in place of the others."""
    inside = positions < sizes[:, None]
    return LocalBatch(np.where(inside, positions, 0), inside.astype(np.float32))


class _Block:
    """The positions drawn for some steps in a row: a cache of what keys alone determine."""

    def __init__(self, number: int, n_rows: int, steps: int) -> None:
        self.number = number
        self.place_of = np.full(n_rows, -1)
        self.counts = np.zeros((steps, 0), np.int64)  # [steps, places]
        self.index = np.zeros((steps, 0, 1), np.int64)  # [steps, places, longest], padded with 0

    def add(self, rows: np.ndarray, draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]]) -> None:
        """Append a place for each of some new rows."""
        drawn = [draw(self.number, int(row)) for row in rows]
        counts = np.stack([part[0] for part in drawn])  # [new, steps]
        positions = np.concatenate([part[1] for part in drawn])

        # Positions end to end fill the places below each count, in the same order.
        steps, n_places, width = self.index.shape
        new_width = max(width, int(counts.max(initial=1)))
        index = np.zeros((len(rows), steps, new_width), np.int64)
        index[np.arange(new_width) < counts[..., None]] = positions

        grown = np.zeros((steps, n_places + len(rows), new_width), np.int64)
        grown[:, :n_places, :width] = self.index
        grown[:, n_places:] = index.transpose(1, 0, 2)

        self.place_of[rows] = np.arange(n_places, n_places + len(rows))
        self.counts = np.ascontiguousarray(np.concatenate([self.counts, counts.T], axis=1))
        self.index = grown


@dataclass(frozen=True)
class Batch:
    """The examples that m peers use in a step, on the device.

    Attributes:
        x: features [m, B, *input_shape], of compressed rows packed [m, B, 2, L], or tokens, int64.
        y: classes, int64 [m, B]; or numbers or labels [m, B, k].
        weight: [m, B] in the run's dtype, 1 for an example, 0 for padding (whose x and y are some example's).
        index: int64 [m, B], local positions.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    index: Tensor

    def repeated(self, row: int, times: int) -> Batch:
        """Return one peer's batch repeated, without a copy."""
        parts = (self.x, self.y, self.weight, self.index)
        return Batch(*(part[row].expand(times, *part.shape[1:]) for part in parts))


class PeerData:
    """The peers' training examples on a device, from which the batch of each step is gathered.

    Attributes:
        sampler: what decides which examples a step uses.
    """

    def __init__(self, examples: Examples, sampler: Sampler, device: torch.device | str, dtype: torch.dtype) -> None:
        """Move the training examples of the peers hosted here to the device, once."""
        sizes = examples.sizes
        if not np.array_equal(sizes, sampler.partition_sizes):
            raise ArgumentError(
                f"the sampler is for peers of {sampler.partition_sizes} examples, not {sizes}", code="batch.sampler"
            )

        self.sampler = sampler
        self.device = torch.device(device)
        self.dtype = dtype
        self.input_shape = tuple(examples.x.shape[1:])

        # The examples of all peers by peer: where each peer's begin, and which rows of x and y they are.
        self._start = np.cumsum([0, *sizes])[:-1]
        self._row = np.concatenate(examples.parts)

        # Compressed rows stay on the CPU; those of a batch are moved.
        x = examples.x
        self._x: Features = x
        if isinstance(x, torch.Tensor):
            self._x = self._placed(x).reshape(len(x), -1)
        self._y = self._placed(examples.y)
        self._full: tuple[bytes, Batch] | None = None

    def part(self, start: int, stop: int) -> PeerData:
        """Return some of the peers' examples, which are not copied."""
        some = copy(self)
        some.sampler = self.sampler.part(start, stop)
        some._start = self._start[start:stop]
        some._full = None
        return some

    def _placed(self, values: Tensor) -> Tensor:
        """Move values to the device, and what is not a whole number into the number type."""
        dtype = self.dtype if values.is_floating_point() else values.dtype
        return values.to(self.device, dtype)

    def batch(self, step: int, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return the examples that some peers, [r] in any order, use in a step, as `Sampler.batch` chooses them.

        Returns:
            The batch, to be read only: with sampling `full` the same tensors come back every step.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self.sampler.kind != "full":
            return self._gather(rows, self.sampler.batch(step, rows))

        key = rows.tobytes()
        if self._full is None or self._full[0] != key:
            self._full = None  # frees the last one before the next is made
            self._full = (key, self._gather(rows, self.sampler.batch(step, rows)))
        return self._full[1]

    def examples(self, rows: Sequence[int] | np.ndarray, start: int, stop: int) -> Batch:
        """Return the local examples [start, stop) of some peers; weight 0 past a peer's last one."""
        rows = np.asarray(rows, dtype=np.int64)
        return self._gather(rows, padded(np.arange(start, stop), self.sampler.partition_sizes[rows]))

    def block(self, rows: Sequence[int] | np.ndarray, numbers: np.ndarray) -> Batch:
        """Return one fixed batch of each peer, as `Sampler.block` numbers them."""
        rows = np.asarray(rows, dtype=np.int64)
        return self._gather(rows, self.sampler.block(rows, numbers))

    def _gather(self, rows: np.ndarray, local: LocalBatch) -> Batch:
        # One transfer to the device instead of three.
        packed = np.empty((3, *local.index.shape), np.int64)
        starts = self._start.take(rows)[:, None]
        self._row.take(starts + local.index, out=packed[0])
        packed[1] = local.index
        packed[2] = local.weight
        places, index, weight = torch.from_numpy(packed).to(self.device).unbind(0)

        flat = places.reshape(-1)
        if isinstance(self._x, SparseRows):
            x = self._x.packed(packed[0]).to(self.device)
        else:
            x = self._x.index_select(0, flat).view(*places.shape, *self.input_shape)
        y = self._y.index_select(0, flat).view(*places.shape, *self._y.shape[1:])
        return Batch(x, y, weight.to(self.dtype), index)
