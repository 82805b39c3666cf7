"""What peers promise to add while somebody is gone: others count no more than is kept, whatever is lost or replayed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from roster_members import RING, ROUNDS, Member, Named, begin, carry, ring, spread

from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.pushsum.attendance import SILENT
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.promises import LASTS, MOST_STEP, MOST_VAIN, SENT, UNITS, Promise, Promises, signed_promise


class Half:
    """A plan by which half of what a peer needs is enough if somebody is gone."""

    def worth_promising(self, peer: int, gone: Collection[int], first: int, end: int) -> float:
        return 0.5 if gone else 0.0


class Varied:
    """A plan by which everybody promises something else in each step."""

    def worth_promising(self, peer: int, gone: Collection[int], first: int, end: int) -> float:
        return 0.2 * len(gone) + 0.07 * ((first + peer) % 4) if gone else 0.0


GONE_AT = 5
NOTICED = GONE_AT + SILENT + 1


def without_one(rounds: int) -> dict[int, Member]:
    """Return the members of a ring that have begun so many rounds, of which peer 1 has stopped; a round is a step."""
    members = ring(Half())
    spread(members)
    for k in range(rounds):
        begin({peer: member for peer, member in members.items() if peer != 1 or k < GONE_AT}, k)
        spread({peer: member for peer, member in members.items() if peer != 1 or k < GONE_AT})
    return {peer: member for peer, member in members.items() if peer != 1}


def signed(peer: int, public: bytes, number: int, first: int, end: int, level: int = UNITS // 2) -> Promise:
    promise = Promise(peer, number, public, first, end, level)
    return replace(promise, signature=Named(peer).sign(signed_promise(b"run", promise))[0])


def counted(member: Member, other: int, step: int, *promises: Promise) -> float:
    """Return what a member counts of another in a step after some promises were brought."""
    for promise in promises:
        member.roster.receive(Promises(member.neighbours[0], member.peer, (promise,)))
    member.roster.begin_round(step)
    return member.secrets.promised(other, step)


def test_peers_count_on_what_others_promise() -> None:
    """From the round after they noticed; neighbours and others alike."""
    members = without_one(NOTICED + 2)
    for one, member in members.items():
        for other in set(members) - {one}:
            assert member.secrets.promised(other, NOTICED + 1) == 0.5
        assert member.secrets.promised(one, NOTICED + 1) == 0.5


def test_nothing_is_promised_for_steps_that_are_taken() -> None:
    members = without_one(NOTICED + 2)
    for step in range(NOTICED):
        assert members[0].secrets.promised(0, step) == 0
        assert members[0].secrets.promised(2, step) == 0


def test_nothing_is_promised_while_all_are_there() -> None:
    members = ring(Half())
    for k in range(LASTS):
        begin(members, k)  # keys come late, too
        assert not members[0].secrets.promised(0, k)
        spread(members, times=1)
        assert not members[0].roster._book.newest


def test_a_promise_is_renewed_while_somebody_is_gone() -> None:
    """So that it never runs out, and is signed few times."""
    members = without_one(NOTICED + 1)
    signatures = 0
    for k in range(NOTICED + 1, ROUNDS):
        before = members[2].roster._promised
        begin(members, k)
        signatures += members[2].roster._promised - before
        assert members[0].secrets.promised(2, k) == 0.5
        spread(members)
    assert signatures <= 2 * (ROUNDS - NOTICED) / LASTS + 1


def test_all_add_what_was_planned_once_all_are_back() -> None:
    members = without_one(NOTICED + 2)
    members[1] = Member(1, boot=2, plan=Half())
    spread(members, 1000.0, times=8)
    for k in range(NOTICED + 2, NOTICED + 2 + LASTS + 1):
        begin(members, k)
        spread(members, 2000.0 + 1000 * k)
    for one, member in members.items():
        assert all(member.secrets.promised(other, k) == 0 for other in RING), one


def test_an_old_promise_replaces_no_newer_one() -> None:
    member = Member(0)
    other = Member(2)
    member.take(1, other.record)
    old = signed(2, other.secrets.public, 1, 0, 4)
    new = signed(2, other.secrets.public, 2, 2, 9, UNITS // 4)
    assert counted(member, 2, 3, new, old) == 0.25
    assert counted(member, 2, 8) == 0.25
    assert counted(member, 2, 9) == 0


def test_no_promise_outlives_its_process() -> None:
    """Whatever was promised for an earlier key of the peer, from whichever folder its new process was started."""
    member = Member(0)
    before = Member(2)
    member.take(1, before.record)
    promise = signed(2, before.secrets.public, 5, 0, ROUNDS)
    assert counted(member, 2, 0, promise) == 0.5

    member.take(1, Member(2, counter=2).record)
    assert counted(member, 2, 1) == 0
    assert counted(member, 2, 2, promise) == 0
    assert 2 not in member.roster._book.newest


def test_a_promise_counts_for_the_key_that_is_learned() -> None:
    """Not before the round in which the key is, and not with the secret of another."""
    secrets = AgreedSecrets([0], b"run", ["0", "1"], partners=[1])
    there = [AgreedSecrets([1], b"run", ["0", "1"], partners=[0]) for _ in range(2)]
    secrets.hear(1, there[0].public, 0, 9, 0.5)
    assert secrets.promised(1, 3) == 0
    secrets.learn(1, there[0].public)
    assert secrets.promised(1, 3) == 0.5
    secrets.learn(1, there[1].public)
    assert secrets.promised(1, 3) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"level": UNITS},
        {"end": 50},
        {"first": 0},
        {"number": 2},
        {"peer": 3},
        {"signature": b""},
    ],
)
def test_changed_promises_count_for_nothing(change: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    member = Member(0)
    for other in (Member(2), Member(3)):
        member.take(1, other.record)
    changed = replace(signed(2, member.roster.records[2].public, 1, 1, 9), **change)
    if "peer" in change:
        changed = replace(changed, public=member.roster.records[3].public)
    assert counted(member, changed.peer, 1, changed) == 0
    assert "does not count" in caplog.text


def test_a_promise_of_another_run_counts_for_nothing() -> None:
    member = Member(0)
    other = Member(2)
    member.take(1, other.record)
    promise = Promise(2, 1, other.secrets.public, 0, 9, UNITS)
    elsewhere = replace(promise, signature=Named(2).sign(signed_promise(b"another run", promise))[0])
    assert counted(member, 2, 0, elsewhere) == 0


def test_a_flood_of_wrong_promises_is_not_looked_at() -> None:
    member = Member(0)
    other = Member(2)
    member.take(1, other.record)
    member.signatures.checked = 0
    right = signed(2, other.secrets.public, 1000, 0, 9)
    for number in range(1, 100):
        wrong = replace(right, number=number)
        member.roster.receive(Promises(1, 0, (wrong,)))
    assert member.signatures.checked == MOST_VAIN
    member.roster.receive(Promises(3, 0, (right,)))  # by another neighbour
    assert counted(member, 2, 0) == 0.5


def test_a_promise_is_sent_until_it_is_heard() -> None:
    member = Member(0)
    other = Member(2)
    member.take(1, other.record)
    promise = signed(2, other.secrets.public, 1, 0, 9)
    counted(member, 2, 0, promise)
    assert member.roster.promises_for(1) is None  # which brought it

    sent = [member.roster.promises_for(3) for _ in range(SENT + 2)]
    assert [one.promises for one in sent if one is not None] == [(promise,)] * SENT
    member.roster.meet(3, 2)
    assert member.roster.promises_for(3) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"level": 0},
        {"level": UNITS + 1},
        {"level": 2**64 - 1},
        {"end": 1},
        {"end": MOST_STEP + 1},
        {"first": 9},
        {"number": 0},
        {"peer": 4},
    ],
)
def test_impossible_promises_are_refused_with_their_frame(change: dict[str, int]) -> None:
    codec = FrameCodec(b"run")
    codec.members = 4
    right = Promise(2, 1, b"k" * 32, 1, 9, UNITS, b"s")
    assert codec.decode(b"".join(codec.encode(Promises(0, 1, (right,))))) == Promises(0, 1, (right,))
    for promises in ((replace(right, **change),), (right, right)):
        with raises(RefusedError, "frame.promises", names="peer 0"):
            codec.decode(b"".join(codec.encode(Promises(0, 1, promises))))


def test_what_is_heard_is_no_level_counts_for_nothing() -> None:
    secrets = AgreedSecrets([0], b"run", ["0", "1"], partners=[1])
    there = AgreedSecrets([1], b"run", ["0", "1"], partners=[0])
    secrets.learn(1, there.public)
    for level in (math.nan, math.inf, 1e25, -1.0, 0.0):
        secrets.hear(1, there.public, 0, 9, level)
        assert secrets.promised(1, 3) == 0


def test_a_process_is_bound_only_for_steps_to_come() -> None:
    """What it promised before it keeps, so a lower promise may be said to hold since then."""
    secrets = AgreedSecrets([0], b"run", ["0", "1"])
    assert secrets.promised(0, 5) == 0
    assert secrets.promise(3, 10, 0.5) == (6, 10)
    assert [secrets.promised(0, step) for step in (5, 6, 7)] == [0, 0.5, 0.5]
    assert secrets.promise(6, 20, 0.25) == (6, 20)
    assert secrets.promise(6, 30, 0.75) == (8, 30)
    assert secrets.promise(0, 3, 0.5)[0] >= 3
    assert [secrets.promised(0, step) for step in (8, 15, 29, 30)] == [0.75, 0.75, 0.75, 0]


events = st.lists(
    st.tuples(st.sampled_from(list(RING)), st.integers(0, 1), st.sampled_from(["call", "round", "round", "restart"])),
    min_size=20,
    max_size=150,
)


@settings(max_examples=60, deadline=None)
@given(events, st.integers(0, 2**20))
def test_no_peer_counts_on_more_than_is_kept(schedule: list[tuple[int, int, str]], losses: int) -> None:
    """In no step, whatever is late, lost, repeated or restarted, of no process."""
    members = ring(Varied())
    boots = dict.fromkeys(RING, 1)
    rounds = dict.fromkeys(RING, 0)
    kept: dict[tuple[bytes, int], float] = {}
    counts = defaultdict[tuple[bytes, int], float](float)
    repeated: list[Promises] = []
    spread(members)
    for number, (peer, side, kind) in enumerate(schedule):
        member = members[peer]
        if kind == "restart" and number % 7 == 0:
            boots[peer] += 1
            members[peer] = Member(peer, boot=boots[peer], plan=Varied())
        elif kind == "round":
            step = rounds[peer]
            rounds[peer] = step + 1
            member.roster.begin_round(step)
            for other in set(RING) - {peer}:
                if member.secrets.knows(peer, other):
                    process = member.roster.records[other].public
                    counts[process, step] = max(counts[process, step], member.secrets.promised(other, step))
            kept[member.secrets.public, step] = member.secrets.promised(peer, step)
            repeated.append(Promises(peer, RING[peer][side], tuple(member.roster._book.newest.values())))
        elif losses >> number % 20 & 1:
            carry(members, peer, RING[peer][side], number * 1.0)
        elif repeated:
            old = repeated[number % len(repeated)]
            members[old.receiver].roster.receive(old)

    for process, step in counts.keys() & kept.keys():
        assert counts[process, step] <= kept[process, step], step
