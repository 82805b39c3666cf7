"""Choose each peer's examples of a round, keyed by (the peer's key, round, global peer).

A peer's choice never depends on which other peers are asked for, nor on the order of the rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.rows import Secret, keyed_generator

SAMPLINGS: dict[str, str] = {
    "poisson": "each local example with probability size / count, independently: what amplification needs",
    "uniform": "exactly size distinct local examples, drawn afresh each round",
    "shuffle": "consecutive batches of size from each epoch's permutation, no incomplete one",
    "full": "all local examples",
    "blocks": "one of count // size fixed batches (all examples of equal position modulo that number), at random",
}
# A generator is keyed for a block of rounds, because keying costs more than one small batch. The block's
# length depends on the batch size alone, so that the numbers do not depend on the cohort.
_BLOCK_ROUNDS, _BLOCK_EXAMPLES = 128, 512
KEY_BYTES = 32


@dataclass(frozen=True)
class LocalBatch:
    """The local positions that m peers use in a round.

    Attributes:
        index: int64 [m, B], positions 0..J_i-1 in each peer's own examples, ascending, then 0 as padding.
        weight: float32 [m, B], 1 for an example, 0 for padding.
    """

    index: np.ndarray
    weight: np.ndarray


class Sampler:
    """Draws local positions.

    Attributes:
        kind, size, partition_sizes, keys: as given; size is 0 for full.
        normalizer: float64 [n_peers], the expected batch size, by which a sum of clipped gradients is
            divided; fixed, for the size that was drawn is private.
        sampling_rate: float64 [n_peers], the chance of one example to be in a round's batch.

    Privacy: amplification by sampling holds towards observers who do not know who was sampled. A deployed
    peer therefore gives bytes from the operating system for its key; the scenario's seed is for simulation.
    `shuffle` and `full` amplify nothing; with `shuffle` a peer uses an example at most once in an epoch of
    J_i // size rounds.
    """

    def __init__(
        self,
        kind: str,
        size: int | None,
        partition_sizes: Sequence[int] | np.ndarray,
        keys: Mapping[int, Secret],
    ) -> None:
        """Check the batch size against every peer's examples.

        Args:
            kind: a key of SAMPLINGS.
            size: examples a round (expected, for poisson); ignored for full.
            partition_sizes: how many examples each peer holds, [n_peers].
            keys: of each peer hosted here, by global id: its secret key, or the scenario's seed.

        Raises:
            ScenarioError: kind or size is wrong, or a peer holds fewer examples than `size`.
        """
        if kind not in SAMPLINGS:
            raise ScenarioError(f"data.batch.sampling={kind} is unknown: choose one of {', '.join(SAMPLINGS)}")
        self.kind, self.keys = kind, keys
        self.partition_sizes = np.asarray(partition_sizes, dtype=np.int64)
        counts = self.partition_sizes.astype(np.float64)
        self.size = _checked_size(kind, size, self.partition_sizes) if kind != "full" else 0
        self.normalizer = counts.copy() if kind == "full" else np.full_like(counts, self.size)
        self.sampling_rate = self.normalizer / counts
        if kind == "blocks":  # of J mod c of them one example more
            self.sampling_rate = 1 / self.blocks(np.arange(len(counts)))
            self.normalizer = counts * self.sampling_rate
        self._rounds = max(1, min(_BLOCK_ROUNDS, _BLOCK_EXAMPLES // max(1, self.size)))
        self._block = _Block(-1, len(counts), self._rounds)

    def afresh(self) -> Sampler:
        """Return a sampler of the same kind that draws what nobody drew before, by keys of the operating system's.

        Privacy: a step that is taken again must draw its examples again. Were they the same, all the releases would
        share one coin of chance q, and averaging them would show who was drawn, which no sum of their ε covers.
        """
        keys = {peer: os.urandom(KEY_BYTES) for peer in self.keys}
        return Sampler(self.kind, self.size or None, self.partition_sizes, keys)

    def batch(self, round_index: int, peers: Sequence[int] | np.ndarray) -> LocalBatch:
        """Return the positions that some peers use in a round.

        Args:
            round_index: the round, 0 or later; rounds may be asked for in any order.
            peers: their global ids, [m], in any order.

        Returns:
            The batch, as wide as the longest among these peers and at least 1; the padding alone depends on
            who else is asked for.

        Raises:
            ValueError: the round or a peer is negative, or a peer has no key here (`full` needs none).
        """
        peers = np.asarray(peers, dtype=np.int64)
        if round_index < 0 or (len(peers) and int(peers.min()) < 0):
            raise ValueError(f"round {round_index} and peers {peers} must be >= 0")
        if self.kind == "full":
            return _everything(self.partition_sizes[peers])
        if self.kind == "blocks":
            return self.block(peers, self._drawn_blocks(round_index, peers))
        number, step = divmod(int(round_index), self._rounds)
        rows = self._rows_of_block(number, peers)
        counts = self._block.counts[step].take(rows)
        width = int(counts.max(initial=1))
        index = self._block.index[step, :, :width].take(rows, axis=0)
        return LocalBatch(index, (np.arange(width) < counts[:, None]).astype(np.float32))

    def blocks(self, peers: np.ndarray) -> np.ndarray:
        """Return into how many fixed batches each peer's examples fall, int64 [m]: floor(J / b)."""
        return np.asarray(self.partition_sizes[peers] // max(1, self.size))

    def block(self, peers: np.ndarray, numbers: np.ndarray) -> LocalBatch:
        """Return one fixed batch of each peer: positions j, j + c, j + 2 c, ... below J for batch j of c."""
        sizes, counts = self.partition_sizes[peers], self.blocks(peers)
        longest = -(-(sizes - numbers) // counts)
        index = numbers[:, None] + counts[:, None] * np.arange(int(longest.max(initial=1)))
        inside = index < sizes[:, None]
        return LocalBatch(np.where(inside, index, 0), inside.astype(np.float32))

    def _drawn_blocks(self, round_index: int, peers: np.ndarray) -> np.ndarray:
        counts = self.blocks(peers)
        draws = [self._generator("blocks", round_index, int(peer)) for peer in peers]
        return np.array([g.integers(count) for g, count in zip(draws, counts, strict=True)], dtype=np.int64)

    def _rows_of_block(self, number: int, peers: np.ndarray) -> np.ndarray:
        """Return the rows of the cached block that hold some peers, drawing those not yet there."""
        if self._block.number != number:
            self._block = _Block(number, len(self.partition_sizes), self._rounds)
        rows = self._block.row_of.take(peers)
        if len(rows) and int(rows.min()) < 0:
            self._block.add(np.unique(peers[rows < 0]), self._draw)
            rows = self._block.row_of.take(peers)
        return rows

    def _generator(self, purpose: str, number: int, peer: int) -> np.random.Generator:
        if peer not in self.keys:
            raise ValueError(f"peer {peer} has no key here: ask only for peers hosted here")
        return keyed_generator(self.keys[peer], purpose, number, peer)

    def _draw(self, number: int, peer: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw one peer's block: how many examples in each of its rounds, and their positions end to end."""
        count = int(self.partition_sizes[peer])
        if self.kind == "shuffle":
            return self._draw_epochs(number, peer, count)
        generator = self._generator("sampling", number, peer)
        if self.kind == "poisson":
            return draw_poisson(generator, self._rounds, count, float(self.sampling_rate[peer]))
        positions = draw_distinct(generator, self._rounds, self.size, count)
        return np.full(self._rounds, self.size), positions.reshape(-1)

    def _draw_epochs(self, number: int, peer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        steps = count // self.size
        first = number * self._rounds
        epochs = np.arange(first // steps, (first + self._rounds - 1) // steps + 1)
        orders = [self._generator("shuffle", int(epoch), peer).permutation(count) for epoch in epochs]
        batches = np.concatenate([order[: steps * self.size].reshape(steps, self.size) for order in orders])
        start = first - int(epochs[0]) * steps
        chosen = np.sort(batches[start : start + self._rounds], axis=1)
        return np.full(self._rounds, self.size), chosen.reshape(-1)


def _checked_size(kind: str, size: int | None, counts: np.ndarray) -> int:
    if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
        raise ScenarioError(f"data.batch.size={size} must be a whole number >= 1 for sampling {kind}")
    short = np.flatnonzero(counts < size)
    if len(short):
        peer = int(short[0])
        raise ScenarioError(
            f"data.batch.size={size} must be at most {counts[peer]}, what peer {peer} holds: "
            f"lower it, use fewer peers or more data, or sampling full"
        )
    return int(size)


def draw_poisson(generator: np.random.Generator, rounds: int, count: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw Poisson samples of several rounds at once.

    Poisson sampling is one independent coin of chance `rate` for each (round, example). Laid end to end these
    are rounds · count Bernoulli trials, whose gaps from hit to hit are independent and geometric: summing
    geometric gaps gives exactly this distribution, at the cost of the hits instead of the trials.

    Args:
        generator: where the gaps come from.
        rounds: how many rounds.
        count: examples, J.
        rate: the chance of each, in (0, 1].

    Returns:
        Hits in each round, int64 [rounds], and their positions, ascending within each round, end to end.
    """
    total = rounds * count
    expected = total * rate
    ahead = int(expected + 4 * expected**0.5) + 8
    hits = np.cumsum(generator.geometric(rate, ahead)) - 1
    while hits[-1] < total:
        hits = np.concatenate([hits, hits[-1] + np.cumsum(generator.geometric(rate, ahead))])
    hits = hits[: int(hits.searchsorted(total))]
    ends = hits.searchsorted(np.arange(1, rounds + 1) * count)
    counts = np.diff(ends, prepend=0)
    return counts, hits % count


def draw_distinct(generator: np.random.Generator, rounds: int, size: int, count: int) -> np.ndarray:
    """Draw `size` distinct positions of `count` in each of several rounds, every set equally likely.

    Floyd's algorithm: for t = count - size .. count - 1 take a uniform position in 0..t, or t itself where
    that was taken before. A round without such a clash is its draws as they are; only the others are walked
    through.

    Args:
        generator: where the draws come from.
        rounds: how many rounds.
        size: positions a round.
        count: examples, J, at least `size`.

    Returns:
        Positions, int64 [rounds, size], ascending in each round.
    """
    tops = np.arange(count - size, count)
    draws = generator.integers(0, tops, size=(rounds, size), endpoint=True)
    if size == 1:
        return draws
    ordered = np.sort(draws, axis=1)
    for clash in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
        taken: set[int] = set()
        for draw, top in zip(draws[clash].tolist(), tops.tolist(), strict=True):
            taken.add(top if draw in taken else draw)
        ordered[clash] = sorted(taken)
    return ordered


def _everything(counts: np.ndarray) -> LocalBatch:
    positions = np.arange(int(counts.max(initial=1)))
    inside = positions < counts[:, None]
    return LocalBatch(np.where(inside, positions, 0), inside.astype(np.float32))


class _Block:
    """The positions drawn for some rounds in a row: a cache of what keys alone determine."""

    def __init__(self, number: int, n_peers: int, rounds: int) -> None:
        self.number = number
        self.row_of = np.full(n_peers, -1)
        self.counts = np.zeros((rounds, 0), np.int64)  # [rounds, rows]
        self.index = np.zeros((rounds, 0, 1), np.int64)  # [rounds, rows, longest], padded with 0

    def add(self, peers: np.ndarray, draw: Callable[[int, int], tuple[np.ndarray, np.ndarray]]) -> None:
        """Append a row for each of some new peers."""
        drawn = [draw(self.number, int(peer)) for peer in peers]
        counts = np.stack([part[0] for part in drawn])  # [new, rounds]
        positions = np.concatenate([part[1] for part in drawn])
        rounds, held, width = self.index.shape
        index = np.zeros((len(peers), rounds, max(width, int(counts.max(initial=1)))), np.int64)
        index[np.arange(index.shape[2]) < counts[..., None]] = positions
        grown = np.zeros((rounds, held + len(peers), index.shape[2]), np.int64)
        grown[:, :held, :width] = self.index
        grown[:, held:] = index.transpose(1, 0, 2)
        self.row_of[peers] = np.arange(held, held + len(peers))
        self.counts = np.ascontiguousarray(np.concatenate([self.counts, counts.T], axis=1))
        self.index = grown
