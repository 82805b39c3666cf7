"""Noise of pairs for an app's updates: what hides an update whoever else is there, and whose secrets they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import RunError
from flower_privdec.peer.app_pairs import (
    MAC,
    Introductions,
    PairSession,
    PairTerms,
    StepPairs,
    add_drawn_,
    best_strength,
    check_pairs,
    least_own,
    own_at_least,
    own_noise,
    pair_square,
    partners_of,
    planned_terms,
)
from flower_privdec.peer.app_updates import PeerLedger
from flower_privdec.peer.identity import KEY, Identity, KnownPeers
from flower_privdec.privacy.mechanism.events import Adversary, Release
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.scenario.app_sections import AppNoiseSection, AppPrivacySection

RUN = b"run"
TERMS = PairTerms(needed=3.0, own=0.5, strength=2.0, partners=2)


def honest_noise(terms: list[PairTerms], chosen: np.ndarray, colluders: Iterable[int], colluding: int) -> np.ndarray:
    """Return the noise left at each honest peer of a step, over what it needs, whitened from the whole covariance.

    Args:
        chosen: whom each peer takes for its partners, bool [n, n]; the two ends need not agree.
    """
    honest = [peer for peer in range(len(terms)) if peer not in set(colluders)]
    own = np.array(
        [own_noise(mine, [terms[j] for j in np.flatnonzero(chosen[i])], colluding) for i, mine in enumerate(terms)]
    )
    needed = np.array([mine.needed for mine in terms])
    covariance = np.diag((own * needed) ** 2)
    for i, j in combinations(honest, 2):
        square = pair_square(terms[i], terms[j])
        covariance[i, i] += square * chosen[i, j]
        covariance[j, j] += square * chosen[j, i]
        if chosen[i, j] and chosen[j, i]:
            covariance[i, j] -= square
            covariance[j, i] -= square
    part = covariance[np.ix_(honest, honest)]
    return np.asarray(np.diagonal(np.linalg.inv(part)) ** -0.5 / needed[honest])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[PairTerms], np.ndarray, int]:
    n = draw(st.integers(2, 6))
    number = st.floats(0.05, 1.0)
    terms = [
        PairTerms(draw(st.floats(0.3, 3.0)), draw(number), 8 * draw(number), draw(st.integers(1, 8))) for _ in range(n)
    ]
    chosen = np.array([[i != j and draw(st.booleans()) for j in range(n)] for i in range(n)])
    return terms, chosen, draw(st.integers(0, n - 1))


@given(steps())
@settings(max_examples=150, deadline=None)
def test_updates_are_hidden_whoever_takes_part_or_colludes(step):
    terms, chosen, colluding = step
    for colluders in combinations(range(len(terms)), colluding):
        assert (honest_noise(terms, chosen, colluders, colluding) >= 1 - 1e-9).all()


@pytest.mark.parametrize(("partners", "hidden"), [(1, 1), (7, 6), (15, 10), (999, 990)])
@pytest.mark.parametrize("strength", [0.25, 2.0, 16.0])
def test_planned_noise_is_the_least_that_suffices(partners, hidden, strength):
    own = least_own(partners, hidden, strength)
    terms = PairTerms(1.0, own, strength, partners)
    assert own_noise(terms, [terms] * partners, partners - hidden) == own
    less = replace(terms, own=own - 2e-6)
    assert own_noise(less, [less] * partners, partners - hidden) > less.own


def test_absent_peers_are_planned_for_and_more_cost_noise():
    noise = AppNoiseSection(kind="cancelling", colluding=1, absent=2, strength=4.0)
    terms = planned_terms(noise, 1.0, 16, 16, 0.0)
    assert own_noise(terms, [terms] * 13, 1) == terms.own
    assert terms.own < own_noise(terms, [terms] * 12, 1) < own_noise(terms, [terms] * 1, 1) == 1.0
    # A strategy can only make a peer add more noise of its own.
    told = [planned_terms(noise, 1.0, 16, size, 0.0).own for size in (0, 2, 8, 16, 10**6)]
    assert min(told) == terms.own
    assert told[-1] == terms.own


@pytest.mark.parametrize("strength", ["auto", 0.25, 64.0])
def test_lost_lines_cost_the_least_own_noise(strength, tmp_path):
    """A strategy that tells other sizes changes a peer's own noise, and so that of lines which are lost later."""
    noise = AppNoiseSection(kind="cancelling", colluding=1, absent=2, strength=strength)
    told = [
        planned_terms(noise, 1.0, 16, size, left).own for size in (0, 2, 8, 16, 10**6) for left in (-1.0, 0.0, math.inf)
    ]
    least = own_at_least(noise, 16)
    assert 0 < least <= min(told)

    privacy = AppPrivacySection(clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, noise=noise)
    with PeerLedger(tmp_path, "run", 1, 0, 1e-5) as ledger:
        ledger.adversary = Adversary(colluding=1)
        ledger.own = max(told)
        ledger.least_own = least
        ledger.name_lines(7)
        assert ledger.charge_witnessed({5: 3}, privacy, 10) == 3
        (release,) = ledger.spent.releases
    assert release == Release("full", 1.0, 1, 1, 2.0 * least, 3, against=((1, 2.0),))


def test_strength_falls_with_the_noise_left_in_models():
    strengths = [best_strength(15, 13, left) for left in (0.0, 0.5, 4.0)]
    assert strengths == sorted(strengths, reverse=True)
    assert strengths[0] > strengths[-1]


# Sessions, and who vouches for them.


@pytest.fixture
def introduced(tmp_path: Path) -> list[Introductions]:
    folders = [tmp_path / str(peer) for peer in range(3)]
    identities = [Identity(folder) for folder in folders if not folder.mkdir()]
    known = {peer: identity.public for peer, identity in enumerate(identities)}
    result = []
    for peer, folder in enumerate(folders):
        keys = KnownPeers(folder)
        keys.meet({other: key for other, key in known.items() if other != peer})
        result.append(Introductions(peer, identities[peer], keys, RUN))
    return result


def session_in(folder: Path, name: str, terms: PairTerms = TERMS) -> PairSession:
    return PairSession.opened(terms, 0, folder / name, durable=False)


def test_both_ends_draw_the_same_noise_with_opposite_signs(introduced, tmp_path):
    sessions = [session_in(tmp_path, f"s{peer}") for peer in range(3)]
    total = np.zeros(40_000)
    for peer in range(3):
        others = [other for other in range(3) if other != peer]
        announced = {other: introduced[other].announce(sessions[other], peer) for other in others}
        partners = partners_of(introduced[peer], sessions[peer], announced, pytest.fail)
        step = StepPairs(peer, 1, sessions[peer], partners, colluding=0, examples=1.0)
        noised = step.noised(np.zeros(40_000), 3.0, 1.0)
        total += noised
        own = own_noise(TERMS, [TERMS] * 2, 0)
        assert noised.std() == pytest.approx(3.0 * np.sqrt(own**2 + TERMS.strength**2), rel=0.03)
    assert total.std() == pytest.approx(3.0 * own * np.sqrt(3), rel=0.03)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_another_weight_than_announced_adds_independent_noise(weight, introduced, tmp_path):
    session = session_in(tmp_path, "one")
    other = introduced[1].announce(session_in(tmp_path, "other"), 0)
    partners = partners_of(introduced[0], session, {1: other}, pytest.fail)
    step = StepPairs(0, 1, session, partners, colluding=0, examples=1.0)
    assert step.noised(np.zeros(20_000), 3.0, weight).std() == pytest.approx(3.0, rel=0.03)
    assert session.last_round == 0


def test_a_round_is_drawn_for_once_in_a_session(introduced, tmp_path):
    session = session_in(tmp_path, "one")
    other = introduced[1].announce(session_in(tmp_path, "other"), 0)
    partners = partners_of(introduced[0], session, {1: other}, pytest.fail)
    step = StepPairs(0, 5, session, partners, colluding=0, examples=1.0)
    assert step.noised(np.zeros(20_000), 3.0, 1.0).std() > 4.5
    assert step.noised(np.zeros(20_000), 3.0, 1.0).std() == pytest.approx(3.0, rel=0.03)
    assert not session.begin(4)
    assert session.is_current(TERMS)
    # What an old context, or an old folder, has is no session any more.
    assert not replace(session, last_round=4).is_current(TERMS)
    assert not session.is_current(replace(TERMS, needed=4.0))
    session.path.unlink()
    assert not session.is_current(TERMS)


def test_a_changed_or_anothers_announcement_is_refused(introduced, tmp_path):
    mine = session_in(tmp_path, "mine")
    theirs = session_in(tmp_path, "theirs")
    good = introduced[1].announce(theirs, 0)
    assert introduced[0].heard(mine, 1, good).terms == TERMS
    for place in (0, KEY, len(good) - MAC - 1, len(good) - 1):
        changed = bytearray(good)
        changed[place] ^= 1
        with raises(RefusedError, "noise.app-partner", "did not announce"):
            introduced[0].heard(mine, 1, bytes(changed))
    for wrong in (b"", good[:-1], good[KEY:], introduced[1].announce(theirs, 2), introduced[2].announce(theirs, 0)):
        with raises(RefusedError, "noise.app-partner", "did not announce"):
            introduced[0].heard(mine, 1, wrong)
    with raises(RefusedError, "noise.app-partner", "did not announce"):  # its own, sent back to it
        introduced[0].heard(mine, 1, introduced[0].announce(mine, 1))
    with raises(RefusedError, "noise.app-partner", "did not announce"):  # of another run
        introduced[0].heard(mine, 1, replace(introduced[1], run=b"other").announce(theirs, 0))


@pytest.mark.parametrize(
    "terms",
    [
        replace(TERMS, needed=float("nan")),
        replace(TERMS, needed=float("inf")),
        replace(TERMS, needed=0.0),
        replace(TERMS, needed=1e300),
        replace(TERMS, needed=1e-300),
        replace(TERMS, own=0.0),
        replace(TERMS, own=float("nan")),
        replace(TERMS, own=1.5),
        replace(TERMS, strength=1e9),
        replace(TERMS, partners=0),
    ],
)
def test_terms_no_honest_peer_has_make_no_partner(terms, introduced, tmp_path):
    theirs = introduced[1].announce(session_in(tmp_path, "theirs", terms), 0)
    with raises(RefusedError, "noise.app-partner", "no partner in noise"):
        introduced[0].heard(session_in(tmp_path, "mine"), 1, theirs)


def test_equal_keys_and_low_order_points_make_no_secret(introduced, tmp_path):
    mine = session_in(tmp_path, "mine")
    with raises(RefusedError, "noise.app-partner", "own key"):
        introduced[0].heard(mine, 1, introduced[1].announce(mine, 0))

    class Weak(PairSession):
        public = bytes(KEY)

    weak = Weak(bytes(KEY), TERMS, 0, tmp_path / "weak", durable=False)
    with raises(RefusedError, "noise.app-partner", "no partner in noise"):
        introduced[0].heard(mine, 1, introduced[1].announce(weak, 0))


def test_large_models_draw_the_same_in_pieces():
    one = np.zeros(70_001)
    add_drawn_(one, bytes(32), 2.0)
    again = np.zeros(70_001)
    add_drawn_(again, bytes(32), 2.0)
    assert (one == again).all()
    assert len(np.unique(one)) == 70_001
    assert one.std() == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("noise", "owners", "pinned", "code"),
    [
        ({"colluding": 7}, 0, True, "noise.app-partners"),
        ({"colluding": 3, "absent": 4}, 0, True, "noise.app-partners"),
        ({"colluding": 2}, None, True, "noise.app-owner"),
        ({"colluding": 2}, 2, False, "noise.app-owner"),
        ({"colluding": 2}, 3, True, "noise.app-colluding"),
    ],
)
def test_noise_that_cannot_cancel_is_refused(noise, owners, pinned, code):
    section = AppNoiseSection(kind="cancelling", **noise)
    with raises(RunError, code):
        check_pairs(section, 8, owners, pinned)
    check_pairs(AppNoiseSection(kind="cancelling", colluding=3, absent=3), 8, 3, pinned=True)
