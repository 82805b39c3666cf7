"""Sampling: the law of each kind, and batches that no cohort and no order of rounds can change."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from scipy.stats import chi2

from flower_privdec.common.catalogue import SAMPLINGS
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.data import Examples, LocalBatch, PeerData, Sampler
from flower_privdec.data.sampling import draw_distinct, draw_poisson
from flower_privdec.rows.keys import keyed_generator, seed_keys
from flower_privdec.scenario.sections import BatchSection

SIZES = np.array([12, 30, 7, 25, 19, 40, 8, 16, 33, 21])
KINDS = [*SAMPLINGS, "rate", *(f"{kind}, small peers in full" for kind in SAMPLINGS if kind != "full")]
FALSE_ALARM = 1e-7


def sampling(kind: str, size: Any, sizes: Any, keys: Any, peers: Any = None, **options: Any) -> Sampler:
    section = BatchSection(sampling=kind, size=None if kind == "full" else size, **options)
    return Sampler(section, sizes, keys, peers)


def seeded(kind: str, size: Any, sizes: Any, seed: int) -> Sampler:
    """A sampler that hosts every peer and draws by the scenario's seed; some peers hold fewer than 10 + size."""
    keys = dict.fromkeys(range(len(sizes)), seed)
    if kind == "rate":
        return sampling("poisson", None, sizes, keys, rate=size / 10)
    if kind.endswith("in full"):
        return sampling(kind.partition(",")[0], 10 + size, sizes, keys, small_peers="full")
    return sampling(kind, size, sizes, keys)


def used(batch: LocalBatch) -> list[list[int]]:
    """Return each row's positions without its padding, after checking how the padding looks."""
    assert batch.index.dtype == np.int64
    assert batch.weight.dtype == np.float32
    assert batch.index.shape == batch.weight.shape
    assert set(np.unique(batch.weight)) <= {0.0, 1.0}
    assert (np.diff(batch.weight, axis=1) <= 0).all()  # padding is at the end
    assert (batch.index[batch.weight == 0] == 0).all()
    return [row[weight > 0].tolist() for row, weight in zip(batch.index, batch.weight, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@given(
    round_index=st.integers(0, 3000),
    peers=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
    size=st.integers(1, 7),
    seed=st.integers(0, 2**128),
)
@settings(max_examples=12)
def test_rows_do_not_depend_on_the_cohort(kind: str, round_index: int, peers: list[int], size: int, seed: int) -> None:
    everyone = used(seeded(kind, size, SIZES, seed).batch(round_index, np.arange(10)))
    some = seeded(kind, size, SIZES, seed).batch(round_index, peers)
    assert used(some) == [everyone[peer] for peer in peers]
    assert some.index.shape[1] == max(1, *(len(everyone[peer]) for peer in peers))


@pytest.mark.parametrize("kind", KINDS)
@given(asked=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 2**10 - 1)), min_size=2, max_size=6))
@settings(max_examples=8)
def test_rounds_may_be_asked_for_in_any_order(kind: str, asked: list[tuple[int, int]]) -> None:
    sampler = seeded(kind, 5, SIZES, 1)
    for round_index, mask in asked:
        peers = [peer for peer in range(10) if mask >> peer & 1]
        fresh = seeded(kind, 5, SIZES, 1).batch(round_index, peers)
        assert used(sampler.batch(round_index, peers)) == used(fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_distinct_and_local(kind: str) -> None:
    sampler = seeded(kind, 6, SIZES, 3)
    for round_index in range(200):
        for peer, row in enumerate(used(sampler.batch(round_index, np.arange(10)))):
            assert len(set(row)) == len(row)
            assert row == sorted(row)
            assert not row or 0 <= row[0] <= row[-1] < SIZES[peer]
            if kind in ("uniform", "shuffle"):
                assert len(row) == 6


@pytest.mark.parametrize("kind", ["poisson", "uniform", "shuffle"])
def test_seeds_rounds_and_peers_differ(kind: str) -> None:
    sizes = np.full(4, 1000)
    first = used(seeded(kind, 20, sizes, 1).batch(0, range(4)))
    other_seed = used(seeded(kind, 20, sizes, 2).batch(0, range(4)))
    other_round = used(seeded(kind, 20, sizes, 1).batch(1, range(4)))
    rows = [tuple(row) for row in (*first, *other_seed, *other_round)]
    assert len(set(rows)) == 12


@pytest.mark.parametrize("kind", ["poisson", "uniform", "shuffle", "blocks"])
def test_keys_decide_and_differ(kind: str) -> None:
    """Two runs draw differently, whoever hosts a peer draws the same, and bytes are not the seed."""
    sizes, one, two = np.full(4, 1000), seed_keys(1, range(4)), seed_keys(2, range(4))

    def drawn(keys: Any, peers: Any) -> list[list[list[int]]]:
        """Return the positions of five rounds for each peer."""
        sampler = sampling(kind, 20, sizes, keys)
        return [list(rounds) for rounds in zip(*(used(sampler.batch(k, peers)) for k in range(5)), strict=True)]

    everyone = [peer for keys in (one, two, dict.fromkeys(range(4), 1)) for peer in drawn(keys, range(4))]
    assert len({repr(rounds) for rounds in everyone}) == 12
    assert drawn({2: one[2]}, [2]) == [everyone[2]]


@pytest.mark.parametrize("kind", ["poisson", "uniform", "shuffle", "blocks"])
def test_a_peer_without_a_key_is_refused(kind: str) -> None:
    sampler = sampling(kind, 5, SIZES, {2: bytes(range(16)), 5: bytes(16)})
    first = used(sampler.batch(0, [5, 2]))
    with raises(ArgumentError, "keys.missing", "peer 3"):
        sampler.batch(0, [2, 3])
    assert used(sampler.batch(0, [5, 2])) == first


def test_full_batches_need_no_key() -> None:
    assert used(sampling("full", None, SIZES, {}).batch(0, [2])) == [list(range(7))]


@pytest.mark.parametrize("secret", [11, bytes(range(20))])
def test_draws_follow_from_the_generator_of_the_peers_key(secret: Any) -> None:
    """With a seed for its key a peer draws what it always drew."""
    keys = dict.fromkeys(range(10), secret)
    counts, positions = draw_poisson(keyed_generator(secret, "sampling", 3, 4), 102, 19, 5 / 19)
    ends = np.cumsum(counts)
    sampler = sampling("poisson", 5, SIZES, keys)
    for step in range(102):
        row = positions[ends[step] - counts[step] : ends[step]].tolist()
        assert used(sampler.batch(3 * 102 + step, [4])) == [row]
    distinct = draw_distinct(keyed_generator(secret, "sampling", 0, 4), 102, 5, 19)
    assert used(sampling("uniform", 5, SIZES, keys).batch(7, [4])) == [distinct[7].tolist()]


@pytest.mark.parametrize("count", [1, 2, 19, 1000])
def test_single_examples_are_drawn_as_several_would_be(count: int) -> None:
    tops = np.arange(count - 1, count)
    expected = keyed_generator(3, "sampling", 0, 4).integers(0, tops, size=(130, 1), endpoint=True)
    assert draw_distinct(keyed_generator(3, "sampling", 0, 4), 130, 1, count).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_cannot_spoil_the_cache(kind: str) -> None:
    sampler = seeded(kind, 5, SIZES, 1)
    first = sampler.batch(0, np.arange(10))
    before = used(first)
    first.index[:] = -5
    first.weight[:] = 7
    assert used(sampler.batch(0, np.arange(10))) == before


def draws(kind: str, size: int, count: int, n_peers: int, rounds: int) -> list[tuple[int, ...]]:
    sampler = seeded(kind, size, [count] * n_peers, 11)
    return [tuple(row) for k in range(rounds) for row in used(sampler.batch(k, np.arange(n_peers)))]


def statistic(seen: Counter[Any], expected: dict[Any, float]) -> float:
    assert set(seen) <= set(expected)
    return sum((seen[key] - mean) ** 2 / mean for key, mean in expected.items())


def test_poisson_is_an_independent_coin_for_each_example() -> None:
    count, size, n = 5, 2, 20 * 1000
    rate = size / count
    seen = Counter(draws("poisson", size, count, 20, 1000))
    expected = {
        subset: n * rate ** len(subset) * (1 - rate) ** (count - len(subset))
        for k in range(count + 1)
        for subset in itertools.combinations(range(count), k)
    }
    assert min(expected.values()) > 100
    assert statistic(seen, expected) < chi2.isf(FALSE_ALARM, len(expected) - 1)


def test_poisson_rounds_are_independent() -> None:
    """Consecutive rounds of a block share one stream: an example's coin says nothing about its next one."""
    count, size, rounds = 8, 2, 4000
    sampler, coins = seeded("poisson", size, [count] * 5, 3), np.zeros((rounds, 5, count))
    for k in range(rounds):
        for peer, row in enumerate(used(sampler.batch(k, range(5)))):
            coins[k, peer, row] = 1
    centred = (coins - 0.25) / np.sqrt(0.25 * 0.75)
    for lag in (1, 2, 7):
        products = centred[lag:] * centred[:-lag]
        assert abs(products.mean() * np.sqrt(products.size)) < 5.5
    neighbours = centred[1:, :, 0] * centred[:-1, :, -1]  # the last example of a round, the first of the next
    assert abs(neighbours.mean() * np.sqrt(neighbours.size)) < 5.5


@pytest.mark.parametrize(("count", "size"), [(1200, 1), (3750, 64), (60_000, 300)])
def test_poisson_counts_are_binomial(count: int, size: int) -> None:
    sampler = seeded("poisson", size, [count] * 4, 5)
    counts = np.array([sampler.batch(k, range(4)).weight.sum(axis=1) for k in range(600)])
    rate, n = size / count, counts.size
    variance = count * rate * (1 - rate)
    assert abs(counts.mean() - size) < 5.5 * np.sqrt(variance / n)
    fourth = variance * (1 + 3 * variance)  # at least the fourth central moment
    assert abs(((counts - size) ** 2).mean() - variance) < 6 * np.sqrt(fourth / n)


def test_poisson_sampling_is_seamless_at_block_ends() -> None:
    n_peers, count = 4000, 6
    sampler = seeded("poisson", 2, [count] * n_peers, 8)
    for round_index in (0, 127, 128, 255):
        seen = np.zeros(count)
        for row in used(sampler.batch(round_index, range(n_peers))):
            seen[row] += 1
        deviation = (seen - n_peers / 3) / np.sqrt(n_peers * (1 / 3) * (2 / 3))
        assert np.abs(deviation).max() < 5.5, round_index


def test_poisson_draws_on_when_more_are_hit_than_expected() -> None:
    class EveryCoin:
        def geometric(self, rate: float, size: int) -> np.ndarray:
            return np.ones(size, np.int64)

    counts, positions = draw_poisson(EveryCoin(), 30, 40, 0.01)  # type: ignore[arg-type]
    assert counts.tolist() == [40] * 30
    assert positions.tolist() == list(range(40)) * 30


def test_poisson_of_everything_is_everything() -> None:
    assert used(seeded("poisson", 9, [9, 9], 1).batch(17, [0, 1])) == [list(range(9))] * 2


def test_an_empty_cohort_batch_is_one_padded_column() -> None:
    sampler = seeded("poisson", 1, [50], 1)
    batches = [sampler.batch(k, [0]) for k in range(100)]
    empty = [batch for batch in batches if batch.weight.sum() == 0]
    assert len(empty) > 10
    assert all(batch.index.tolist() == [[0]] for batch in empty)
    assert sampler.batch(3, []).index.shape == (0, 1)


def test_uniform_makes_every_set_equally_likely() -> None:
    for count, size in ((6, 2), (6, 4), (5, 1), (4, 4)):
        n = 20 * 500
        subsets = list(itertools.combinations(range(count), size))
        seen = Counter(draws("uniform", size, count, 20, 500))
        limit = chi2.isf(FALSE_ALARM, len(subsets) - 1) if len(subsets) > 1 else 1e-9
        assert statistic(seen, {subset: n / len(subsets) for subset in subsets}) <= limit


@pytest.mark.parametrize(("count", "size"), [(12, 4), (10, 3), (300, 2), (5, 5), (9, 1)])
def test_shuffle_uses_each_example_once_an_epoch(count: int, size: int) -> None:
    sampler, steps = seeded("shuffle", size, [count], 1), count // size
    epochs = [
        [position for k in range(steps) for position in used(sampler.batch(epoch * steps + k, [0]))[0]]
        for epoch in range(6)
    ]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == steps * size
    if steps > 1:
        assert len({tuple(epoch) for epoch in epochs}) == 6
    if count % size:
        assert len({frozenset(range(count)) - set(epoch) for epoch in epochs}) > 1  # not always the same left out


def test_full_takes_all_local_examples() -> None:
    batch = seeded("full", None, SIZES, 1).batch(5, [2, 5])
    assert used(batch) == [list(range(7)), list(range(40))]


def test_normalizer_and_rate() -> None:
    for kind in ("poisson", "uniform", "shuffle"):
        sampler = seeded(kind, 5, SIZES, 1)
        np.testing.assert_array_equal(sampler.normalizer, np.full(10, 5.0))
        np.testing.assert_allclose(sampler.sampling_rate, 5 / SIZES)
    sampler = seeded("full", None, SIZES, 1)
    np.testing.assert_array_equal(sampler.normalizer, SIZES)
    np.testing.assert_array_equal(sampler.sampling_rate, np.ones(10))


@pytest.mark.parametrize("kind", ["poisson", "uniform", "shuffle"])
def test_a_batch_larger_than_a_peers_data_is_refused(kind: str) -> None:
    with raises(ScenarioError, "batch.too-large", "size=8 .* 7, .* 2,"):
        seeded(kind, 8, SIZES, 1)


def test_a_rate_gives_every_peer_its_own_expected_batch() -> None:
    sampler = sampling("poisson", None, SIZES, dict.fromkeys(range(10), 1), rate=0.13)
    np.testing.assert_array_equal(sampler.sampling_rate, np.full(10, 0.13))  # as given, for ε is the accountant's at it
    np.testing.assert_allclose(sampler.normalizer, 0.13 * SIZES, rtol=1e-15)
    drawn = np.array([sampler.batch(k, range(10)).weight.sum(axis=1) for k in range(3000)])
    error = np.sqrt(0.13 * 0.87 * SIZES / len(drawn))
    assert (np.abs(drawn.mean(axis=0) - sampler.normalizer) < 5.5 * error).all()


def test_a_rate_is_an_independent_coin_for_each_example() -> None:
    n = 20 * 1000
    sampler = sampling("poisson", None, [4] * 20, dict.fromkeys(range(20), 11), rate=0.3)
    seen = Counter(tuple(row) for k in range(1000) for row in used(sampler.batch(k, range(20))))
    expected = {
        subset: n * 0.3 ** len(subset) * 0.7 ** (4 - len(subset))
        for k in range(5)
        for subset in itertools.combinations(range(4), k)
    }
    assert statistic(seen, expected) < chi2.isf(FALSE_ALARM, len(expected) - 1)


@pytest.mark.parametrize("kind", ["poisson", "uniform", "shuffle", "blocks"])
def test_small_peers_take_everything_and_others_are_unchanged(kind: str) -> None:
    sampler = sampling(kind, 15, SIZES, dict.fromkeys(range(10), 1), small_peers="full")
    small = np.flatnonzero(SIZES <= 15)
    np.testing.assert_array_equal(sampler.sampling_rate[small], np.ones(len(small)))
    np.testing.assert_array_equal(sampler.normalizer[small], SIZES[small])
    large = np.flatnonzero(SIZES > 15)
    others = sampling(kind, 15, SIZES[large], dict.fromkeys(large, 1), large)
    np.testing.assert_array_equal(sampler.sampling_rate[large], others.sampling_rate)
    for step in (0, 1, 200):
        assert used(sampler.batch(step, small)) == [list(range(count)) for count in SIZES[small]]
        assert used(sampler.batch(step, large)) == used(others.batch(step, range(len(large))))


def test_the_smallest_rate_draws_without_overflow() -> None:
    sampler = sampling("poisson", None, [50], {0: 1}, rate=1e-9)
    assert all(used(sampler.batch(k, [0])) == [[]] for k in range(0, 3000, 32))


@pytest.mark.parametrize(("round_index", "peers"), [(-1, [0]), (0, [-1])])
def test_negative_rounds_and_peers_are_refused(round_index: int, peers: list[int]) -> None:
    for kind in KINDS:
        with raises(ArgumentError, "batch.negative"):
            seeded(kind, 2, SIZES, 1).batch(round_index, peers)


# --- examples on the device


def peer_data(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PeerData:
    return PeerData(some_examples(), seeded(kind, 5, SIZES, 1), device, dtype)


def some_examples() -> Examples:
    total = int(SIZES.sum()) + 9  # some rows are nobody's
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 2, 3, generator=generator)
    y = torch.randint(0, 4, (total,), generator=generator)
    order = np.random.default_rng(1).permutation(total)
    parts = [np.sort(part) for part in np.split(order, np.cumsum(SIZES))[:-1]]
    return Examples(x, y, tuple(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_the_sampled_examples(kind: str, dtype: torch.dtype) -> None:
    examples, data = some_examples(), peer_data(kind, dtype=dtype)
    for round_index in (0, 1, 200):
        local = data.sampler.batch(round_index, [7, 3])
        batch = data.batch(round_index, [7, 3])
        assert batch.x.shape == (*local.index.shape, 2, 3)
        assert (batch.x.dtype, batch.weight.dtype, batch.y.dtype) == (dtype, dtype, torch.int64)
        np.testing.assert_array_equal(batch.index.numpy(), local.index)
        np.testing.assert_array_equal(batch.weight.numpy(), local.weight)
        for row, peer in enumerate((7, 3)):
            rows = torch.from_numpy(examples.parts[peer][local.index[row]])
            assert torch.equal(batch.x[row], examples.x[rows].to(dtype))
            assert torch.equal(batch.y[row], examples.y[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_with_few_peers_draws_the_same(kind: str) -> None:
    everyone, examples, few = peer_data(kind), some_examples(), [2, 3, 7]
    own = replace(examples, parts=tuple(examples.parts[peer] for peer in few))
    sampler = everyone.sampler.like(partition_sizes=SIZES[few])
    sampler.peers = np.array(few)
    hosted = PeerData(own, sampler, "cpu", torch.float32)
    for step in (0, 5):
        one, other = everyone.batch(step, [3, 7]), hosted.batch(step, [1, 2])
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert torch.equal(one.weight, other.weight)


def test_full_batches_are_gathered_once() -> None:
    data = peer_data("full")
    first = data.batch(0, np.arange(10))
    assert data.batch(9, np.arange(10)) is first
    assert data.batch(9, [1]).x.shape == (1, 30, 2, 3)


def test_the_sampler_must_fit_the_partition() -> None:
    examples = some_examples()
    with raises(ArgumentError, "batch.sampler"):
        PeerData(replace(examples, parts=examples.parts[:-1]), seeded("poisson", 5, SIZES, 1), "cpu", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="BATCHES ON CUDA NOT TESTED: no GPU here")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_on_a_gpu_are_those_on_the_cpu(kind: str) -> None:
    one, other = peer_data(kind).batch(4, [1, 5]), peer_data(kind, "cuda").batch(4, [1, 5])
    for name in ("x", "y", "weight", "index"):
        assert getattr(other, name).is_cuda
        assert torch.equal(getattr(other, name).cpu(), getattr(one, name))


def test_groups_are_drawn_in_turn_at_their_rate() -> None:
    """Step t draws from positions t mod 3, each by itself, as often as batches of the expected size ask for."""
    count, groups, steps = 31, 3, 6000
    section = BatchSection(sampling="poisson", size=6)
    sampler = Sampler(section, [count], seed_keys(4, range(1)), groups=groups)
    drawn = np.zeros((groups, count))
    sizes = []
    for step in range(steps):
        (positions,) = used(sampler.batch(step, [0]))
        sizes.append(len(positions))
        drawn[step % groups, positions] += 1
    own = np.arange(count) % groups == np.arange(groups)[:, None]
    assert not drawn[~own].any()
    rate = 6 * groups / count
    assert sampler.sampling_rate == pytest.approx([rate])
    chance = drawn[own] / (steps / groups)
    assert np.abs(chance - rate).max() < 5 * np.sqrt(rate * (1 - rate) / (steps / groups))
    assert np.mean(sizes) == pytest.approx(6, rel=0.02)
