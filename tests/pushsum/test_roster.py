"""Session keys that are passed on: the newest of each peer wins, whatever is withheld, replayed, forged or repeated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from roster_members import RING, ROUNDS, Member, Named, begin, carry, ring, spread

from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.pushsum.attendance import SILENT
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import FrameCodec
from flower_privdec.pushsum.roster import (
    HEARTBEAT,
    MOST_COUNTER,
    MOST_REFUSED,
    RECORDS_AT_ONCE,
    KeyRecord,
    KeyRecords,
    Presence,
    Roster,
    signed_content,
)


def test_all_pairs_of_a_ring_have_a_secret() -> None:
    members = ring()
    assert not members[0].roster.is_settled
    spread(members)
    begin(members, 0)
    for one in RING:
        assert members[one].roster.is_settled
        for other in set(RING) - {one}:
            assert members[one].secrets.of(one, other) == members[other].secrets.of(one, other)


def test_each_record_goes_to_a_neighbour_once() -> None:
    members = ring()
    spread(members)
    for one, member in members.items():
        for other in member.neighbours:
            assert members[one].roster.records_for(other, 1e9) is None
            assert not members[one].roster.has_records(other, 1e9)


def test_a_new_process_of_a_neighbour_is_told_everything() -> None:
    members = ring()
    spread(members)
    members[1] = Member(1, counter=2, boot=2)
    spread(members, 1000.0)
    begin(members, 1)
    assert members[1].roster.is_settled
    assert members[3].secrets.of(1, 3) == members[1].secrets.of(1, 3)


@pytest.mark.parametrize("counter", [1, 2, 500, 2**50, MOST_COUNTER])
@pytest.mark.parametrize("again", [1, 3, 2**50, MOST_COUNTER - ROUNDS - 1])
def test_the_last_process_of_a_peer_counts(counter: int, again: int) -> None:
    """Whatever its clock was or the one before it had: a counter that is too low is made higher once it is met."""
    members = ring()
    members[1] = Member(1, counter=min(counter, MOST_COUNTER - ROUNDS - 1))
    spread(members)
    begin(members, 5)
    spread(members)
    members[1] = Member(1, counter=again, boot=2)
    spread(members, 1000.0, times=8)
    begin(members, 6)
    for other in (0, 2, 3):
        assert members[other].roster.records[1] == members[1].record
        assert members[other].secrets.of(1, other) == members[1].secrets.of(1, other)


def test_an_old_record_replaces_no_newer_one() -> None:
    members = ring()
    old = members[1].record
    members[1] = Member(1, counter=2, boot=2)
    spread(members)
    members[3].take(2, old)
    assert members[3].roster.records[1] == members[1].record
    assert not members[3].roster.refused


def test_forged_records_are_refused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    member = Member(0)
    stranger = Member(2).record
    for forged in (replace(stranger, peer=3), replace(stranger, counter=2), replace(stranger, public=b"p" * 32)):
        member.take(1, forged)
        assert forged.peer not in member.roster.records
        assert "peer 1 brought" in member.roster.refused[forged.peer]
        assert f"session key of peer {forged.peer}" in caplog.messages[-1]
    member.take(1, stranger)
    assert member.roster.records[2] == stranger


def test_a_record_of_another_run_is_refused() -> None:
    member = Member(0)
    secrets = AgreedSecrets([2], b"run", ["0", "1", "2", "3"])
    other = Roster(2, 4, RING[2], b"another run", secrets, Named(2), ROUNDS)
    member.take(1, other.records[2])
    assert 2 not in member.roster.records


def test_a_forged_record_of_oneself_changes_nothing() -> None:
    member = Member(0, counter=7)
    before = member.record
    member.take(1, replace(before, public=b"p" * 32, counter=MOST_COUNTER))
    assert member.record == before
    member.take(1, before)
    assert member.record == before


def test_a_flood_of_wrong_records_is_not_looked_at() -> None:
    member = Member(0)
    for counter in range(2, 100):
        member.take(1, replace(Member(2).record, counter=counter))
    assert member.signatures.checked == MOST_REFUSED
    assert len(member.roster.refused) == 1

    member.take(3, Member(2).record)  # by another neighbour
    assert 2 in member.roster.records


def test_a_flood_of_new_keys_is_passed_on_slowly() -> None:
    """A member that signs key after key costs each neighbour of a neighbour one a second, and one in memory."""
    members = ring()
    passed = 0
    for counter in range(2, 200):
        now = counter / 100
        members[0].take(1, Member(1, counter).record)
        records = members[0].roster.records_for(3, now)
        if records is not None:
            members[0].roster.arrived(records)
            passed += sum(record.peer == 1 for record in records.records)
    assert 1 <= passed <= 3
    assert len(members[0].roster.records) == 2


def test_a_key_that_makes_no_secret_is_refused() -> None:
    member = Member(0)
    record = KeyRecord(2, 5, bytes(32))
    signature, certificates = Named(2).sign(signed_content(b"run", record))
    member.take(1, replace(record, signature=signature, certificates=certificates))
    member.roster.begin_round(0)
    assert not member.secrets.knows(0, 2)
    assert "no secret" in member.roster.refused[2]


def test_records_are_sent_in_pieces() -> None:
    members = {peer: Member(peer, size=RECORDS_AT_ONCE // 3) for peer in RING}
    codec = FrameCodec(b"run")
    codec.members = 4
    spread(members)
    members[1] = Member(1, boot=2, counter=2)
    members[0].roster.meet(1, 2)
    got = set[int]()
    for turn in range(8):
        records = members[0].roster.records_for(1, 1000.0 + 10 * turn)
        if records is None:
            break
        assert sum(map(len, codec.encode(records))) <= codec.roster_cap
        assert len(records.records) <= 2
        got |= {record.peer for record in records.records}
        members[0].roster.arrived(records)
    assert got == {0, 1, 2, 3}


# --- presence ---


def test_a_silent_peer_is_absent_until_it_is_back() -> None:
    """All see it alike, near and far; a round that it has taken is still shared."""
    members = ring()
    spread(members)
    for k in range(5):
        begin(members, k)
        spread(members)

    left = {peer: member for peer, member in members.items() if peer != 1}
    for k in range(5, 6 + SILENT + 2):
        begin(left, k)
        spread(left)
        for peer, member in left.items():
            assert member.secrets.knows(peer, 1) == (k - 5 <= SILENT), k
            assert all(member.secrets.knows(peer, other) for other in set(left) - {peer})

    members[1] = Member(1, counter=1, boot=2)
    spread(members, 1000.0, times=8)
    begin(members, 20)
    for other in (0, 2, 3):
        assert members[other].secrets.knows(other, 1)
        assert members[other].secrets.of(1, other) == members[1].secrets.of(1, other)


def test_a_slow_peer_is_present() -> None:
    members = ring()
    spread(members)
    for k in range(60):
        begin({peer: member for peer, member in members.items() if peer != 2}, k)
        if k % (SILENT - 2) == 0:
            members[2].roster.begin_round(k // (SILENT - 2))
        spread(members)
        assert members[0].secrets.knows(0, 2)


def test_a_peer_that_is_ahead_is_present() -> None:
    """It has taken the steps that this peer takes now, and may have left."""
    members = ring()
    spread(members)
    for k in range(ROUNDS):
        members[2].roster.begin_round(min(2 * k, ROUNDS))
        spread(members)
        members[0].roster.begin_round(k)
        assert members[0].secrets.knows(0, 2)


def test_a_late_peer_shares_the_last_rounds() -> None:
    """Those that are done, and may have left, have taken the steps that it takes now, the last one too."""
    rounds = 30
    members = ring()
    spread(members)
    for k in range(rounds):
        begin({peer: member for peer, member in members.items() if peer != 0}, k)
        members[0].roster.begin_round(k // 2)
        spread(members)
    for peer in (1, 2, 3):
        members[peer].roster.end_rounds(rounds)
    spread(members)
    for k in range(rounds // 2, rounds):
        members[0].roster.begin_round(k)
        assert all(members[0].secrets.knows(0, other) for other in (1, 2, 3)), k


def test_nobody_makes_a_present_peer_absent() -> None:
    """Whatever a neighbour says of it: a heartbeat that is lower, higher than any, or of a process to come."""
    members = ring()
    spread(members)
    for k in range(2 * SILENT):
        begin(members, k)
        spread(members)
        for lie in (0, -(2**63), 2**63 - 1, ROUNDS + 2):
            lies = np.full(4, lie, HEARTBEAT).tobytes()
            members[0].roster.receive(Presence(1, 0, lies))
        assert all(members[0].secrets.knows(0, other) for other in (1, 2, 3))


@pytest.mark.parametrize("lie", [-(2**63), -1, 0, ROUNDS + 2, 2**62, 2**63 - 1])
def test_impossible_heartbeats_change_nothing(lie: int) -> None:
    members = ring()
    spread(members)
    before = members[0].roster._heartbeats.copy()
    members[0].roster.receive(Presence(1, 0, np.full(4, lie, HEARTBEAT).tobytes()))
    assert np.array_equal(members[0].roster._heartbeats, before)


def test_a_neighbour_is_told_of_presence_once() -> None:
    members = ring()
    spread(members)
    roster = members[0].roster
    roster.presence_for(1)
    assert roster.presence_for(1) is None
    roster.begin_round(1)
    assert roster.presence_for(1) is not None
    assert roster.presence_for(1) is None


def test_an_expired_identity_shares_nothing_more() -> None:
    members = ring()
    spread(members)
    begin(members, 0)
    assert members[0].secrets.knows(0, 2)
    members[0].signatures.expired = True
    begin(members, 1)
    assert not members[0].secrets.knows(0, 2)


# --- under any schedule ---

calls = st.lists(
    st.tuples(st.sampled_from(list(RING)), st.integers(0, 1), st.sampled_from(["call", "lost", "restart", "round"])),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(calls)
def test_all_agree_after_any_schedule_of_calls_and_restarts(events) -> None:
    members = ring()
    boots = dict.fromkeys(RING, 1)
    rounds = dict.fromkeys(RING, 0)
    now = 0.0
    for peer, side, kind in events:
        now += 0.3
        if kind == "restart":
            boots[peer] += 1
            members[peer] = Member(peer, counter=1, boot=boots[peer])  # its clock is always that of the first
        elif kind == "round":
            rounds[peer] = min(rounds[peer] + 1, ROUNDS)
            members[peer].roster.begin_round(rounds[peer])
        else:
            carry(members, peer, RING[peer][side], now, is_lost=kind == "lost")

    spread(members, now + 1000, times=12)
    begin(members, max(rounds.values()) + 1)
    for one in RING:
        for other in set(RING) - {one}:
            assert members[one].roster.records[other] == members[other].record
            assert members[one].secrets.of(one, other) == members[other].secrets.of(one, other)
        assert not members[one].roster.refused


# --- frames ---


def test_a_frame_holds_members_records_in_order() -> None:
    codec = FrameCodec(b"run")
    codec.members = 3
    record = KeyRecord(1, 5, b"k" * 32, b"s", b"c")
    for records in ((record, record), (replace(record, peer=3),), (replace(record, counter=0),)):
        frame = b"".join(codec.encode(KeyRecords(0, 1, records)))
        with raises(RefusedError, "frame.records", names="peer 0"):
            codec.decode(frame)
    with raises(RefusedError, "frame.length"):
        codec.decode(b"".join(codec.encode(Presence(0, 1, bytes(16)))))
