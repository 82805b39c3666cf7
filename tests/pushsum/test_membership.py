"""The list of members: one history, whoever forges, replays, reorders, withholds or forks its entries."""

from __future__ import annotations

import hmac
import random
from dataclasses import replace
from typing import Any

import pytest
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.pushsum.membership import MOST_LINE, MOST_REFUSED, MemberEntry, MemberList, MemberNews, Members

FIRST = Members.first("ward", [f"peer-{peer}.ward" for peer in range(4)])
ADD = {"kind": "add", "peer": 4, "identity": "peer-4.ward", "address": "10.0.0.5:7100"}
CHANGES: list[dict[str, Any]] = [
    {"kind": "address", "peer": 2, "address": "10.0.0.9:7100"},
    ADD,
    {"kind": "renew", "peer": 1, "certificate": "ab" * 32},
    {"kind": "leave", "peer": 0},
    {"kind": "revoke", "peer": 3},
]


def sign(content: bytes, key: bytes = b"authority") -> bytes:
    return hmac.digest(key, content, "sha256")


def verify(content: bytes, signature: bytes) -> bool:
    return signature == sign(content)


def listed(changes: list[dict[str, Any]] = CHANGES, first: Members = FIRST) -> MemberList:
    made = MemberList(first, verify)
    for change in changes:
        made.append(change, sign)
    return made


def test_a_list_says_who_the_members_are() -> None:
    members = listed().members
    assert members.present == (1, 2, 4)
    assert members.all[2].address == "10.0.0.9:7100"
    assert members.all[1].certificate == "ab" * 32
    assert members.all[0].left == 4
    assert "peer-3.ward was shut out by entry 5" in members.revoked[3]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"kind": "leave", "peer": 7}, "members.peer"),
        ({"kind": "revoke", "peer": 3}, "members.peer"),
        ({"kind": "address", "peer": 0, "address": "10.0.0.1:1"}, "members.peer"),
        (ADD, "members.number"),
        (ADD | {"peer": 5, "identity": "peer-3.ward"}, "members.identity"),
        (ADD | {"peer": 5, "identity": "peer-5.ward"}, "members.address"),
        ({"kind": "promote", "peer": 1}, "members.kind"),
        ({"kind": "leave", "peer": True}, "members.form"),
        ({"kind": "address", "peer": 1, "address": "a" * MOST_LINE + ":7100"}, "members.unreadable"),
        ({"kind": "leave", "peer": 1, "more": 2}, "members.form"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: dict[str, Any], code: str) -> None:
    made = listed()
    with raises(ScenarioError, code):
        made.append(change, sign)
    assert made.content == listed().content


def test_two_peers_are_left_at_least() -> None:
    made = listed()
    made.append({"kind": "leave", "peer": 1}, sign)
    with raises(ScenarioError, "members.last"):
        made.append({"kind": "leave", "peer": 2}, sign)
    made.append({"kind": "revoke", "peer": 2}, sign)  # a thief is shut out, whoever is left


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_in_any_order_make_one_history(seed: int) -> None:
    """Lines come cut anywhere, repeated, in any order: the list is always a beginning of the authority's, and grows."""
    draw = random.Random(seed)
    whole = listed()
    lines = [entry.line for entry in whole.entries]
    peer = MemberList(FIRST, verify)
    for _ in range(30):
        first = draw.randrange(len(lines))
        piece = b"".join(lines[first : first + draw.randint(1, 3)])
        if draw.random() < 0.3:
            piece = piece[: draw.randrange(len(piece))]
        before = len(peer.entries)
        peer.take(piece, "a neighbour")
        assert len(peer.entries) >= before
        assert peer.entries == whole.entries[: len(peer.entries)]
    peer.take(whole.content, "the operator")
    assert peer.members == whole.members


def forged(entry: MemberEntry) -> MemberEntry:
    return replace(entry, change={"kind": "leave", "peer": 1})


LIES = {
    "changed": lambda entries: [forged(entries[0])],
    "signed by another": lambda entries: [replace(entries[0], signature=sign(entries[0].content, b"member"))],
    "of another federation": lambda entries: listed(CHANGES[:1], Members.first("other", ["a", "b", "c"])).entries,
    "later ones exchanged": lambda entries: [entries[0], replace(entries[2], number=2)],
    "not an entry": lambda entries: [],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_named_and_changes_nothing(lie: str) -> None:
    whole = listed()
    peer = MemberList(FIRST, verify)
    lines = b"".join(entry.line for entry in LIES[lie](whole.entries)) or b'{"number": 1}\n'
    peer.take(lines, "peer 3")
    assert peer.entries == whole.entries[: len(peer.entries)]
    assert len(peer.entries) <= 1
    assert "from peer 3 is refused" in peer.problem
    peer.take(whole.content, "peer 2")
    assert peer.members == whole.members


def test_a_fork_is_refused_and_named() -> None:
    peer = listed()
    fork = listed([*CHANGES[:3], {"kind": "leave", "peer": 2}])
    assert peer.take(fork.content, "peer 1") == 0
    assert "entry 4 (peer 2 leaves for good) is of another list" in peer.problem
    assert peer.members == listed().members


def test_a_rolled_back_list_does_nothing() -> None:
    peer = listed()
    assert peer.take(listed(CHANGES[:2]).content, "a file") == 0
    assert not peer.problem
    assert len(peer.entries) == len(CHANGES)


def test_who_forges_costs_one_look_at_a_signature() -> None:
    looked: list[bytes] = []

    def counting(content: bytes, signature: bytes) -> bool:
        looked.append(content)
        return verify(content, signature)

    peer = MemberList(FIRST, counting)
    entries = listed().entries
    lies = forged(entries[0]).line + b"".join(entry.line for entry in entries[1:])
    for _ in range(MOST_REFUSED):
        peer.take(lies, "peer 3")
    problem = peer.problem
    looked.clear()
    for more in (lies, entries[1].line, b"no entry\n"):
        assert peer.take(more, "peer 3") == 0
    assert len(looked) == 1
    assert peer.problem == problem
    assert peer.take(listed().content, "peer 1") == len(CHANGES)


@pytest.mark.parametrize("height", [0, 2])
def test_a_mended_list_ends_the_refusal(height: int) -> None:
    """A neighbour held another list of the authority's, and has the right one now: nobody else brings what is new."""
    peer = listed(CHANGES[:height])
    fork = listed([*CHANGES[:height], {"kind": "leave", "peer": 2}])
    other = listed([*CHANGES[:height], {"kind": "leave", "peer": 1}])
    peer.take(listed(CHANGES[: height + 1]).content, "peer 1")
    for _ in range(2 * MOST_REFUSED):
        assert peer.take(fork.content, "peer 3") == 0
        assert peer.take(other.content, "peer 3") == 0
    assert "is of another list" in peer.problem

    assert peer.take(listed().content, "peer 3") == len(CHANGES) - height - 1
    assert peer.members == listed().members
    assert not peer.problem
    peer.take(forged(listed([*CHANGES, {"kind": "leave", "peer": 2}]).entries[-1]).line, "peer 3")
    assert "from peer 3 is refused" in peer.problem  # it is named again, as at first


def test_an_operators_file_is_read_again_however_often_wrong() -> None:
    peer = MemberList(FIRST, verify)
    for _ in range(2 * MOST_REFUSED):
        assert peer.take(forged(listed().entries[0]).line, "a file", is_trusted=True) == 0
    assert peer.problem
    peer.take(listed(CHANGES[:1]).content, "peer 1")
    assert not peer.problem
    peer.take(forged(listed().entries[1]).line, "a file", is_trusted=True)
    assert peer.problem  # as it was looked at again
    assert peer.take(listed().content, "a file", is_trusted=True) == len(CHANGES) - 1
    assert peer.members == listed().members


def test_what_cannot_be_kept_does_not_count() -> None:
    def full(content: bytes) -> None:
        raise OSError("full")

    peer = MemberList(FIRST, verify, full)
    with pytest.raises(OSError, match="full"):
        peer.take(listed().content, "peer 1")
    assert peer.members == FIRST
    assert not peer.entries


def test_news_is_sent_until_it_is_there() -> None:
    here = MemberNews(0, listed(), again=1.0)
    there = MemberNews(1, MemberList(FIRST, verify), again=1.0)
    assert here.entries_for(1, 0.0) is None  # it has not said what it has
    here.hear(1, there.height)
    assert here.entries_for(1, 0.0) is not None
    assert here.entries_for(1, 0.5) is None
    again = here.entries_for(1, 1.5)  # the first call was lost
    assert again is not None
    there.take(again)
    here.hear(1, there.height)
    assert here.entries_for(1, 9.0) is None
    assert there.list.members == here.list.members
