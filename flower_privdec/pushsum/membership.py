"""The list of a federation's members: append-only, signed by its authority, and passed on from peer to peer.

A scenario says who the peers are when a federation begins. What changes later is an *entry* of one list. It is numbered
from 1, has the hash of the entry before it, and changes one thing:

    add      a peer joins, with the next number, an identity and an address
    leave    a peer leaves for good, and hands its push-sum mass over
    revoke   a peer is shut out: its certificates count no more
    renew    of a peer's certificates only this one counts from now on
    address  a peer is reached elsewhere
    extend   the run has more rounds

    content    PURPOSE, and a line of JSON: the number, the hash of the entry before, the change
    first      the entry before the first is the federation itself: its name, and the identities of its first peers
    signature  of the content, by the key of the authority that signs the peers' certificates

So there is one history. A peer keeps the list in its folder. Every call reports how many entries the caller has
(`LedgerReport.entries`), and a peer that has more hands on what its neighbour lacks.

The attacker is a member: a neighbour, or one farther away. It may

- *forge* an entry, or change one: its signature is not the authority's. It is dropped and named. After MOST_REFUSED
  such entries that neighbour is heard again once it brings the very next one, signed by the authority, as one does
  whose list was mended meanwhile. So each call of a liar costs one look at a signature, and no line in the log.
- *replay* an old list, or put an old one into a folder: entries that are known change nothing.
- *reorder* entries, or leave one out: an entry counts only after the one before it.
- *withhold* entries: the other neighbours have them, or the operator puts the list into a peer's folder. A peer all of
  whose neighbours withhold an entry does not know of it, which no list can mend.
- bring an entry of *another federation*, of the same authority: the first entry names the federation.

The authority alone can *fork* the list, by signing two entries with one number, as an operator does with an old copy of
it. A peer stays with the entry that it has, refuses the other, and says so in its log and its status. So an operator
asks the peers before it signs, see `network.members`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.formatting import shown
from flower_privdec.scenario.sections import MOST_ROUNDS, checked_address, checked_identity, place_of

_log = logging.getLogger(__name__)

PURPOSE = b"flower_privdec members 1\n"
SHUT_OUT = "call.revoked"  # the code of a refusal: the caller was shut out
MORE_ROUNDS = "call.more-rounds"  # of another: the caller has been given more rounds, and the called one has not yet
MOST_REFUSED = 4  # entries of one neighbour that were wrong: of more only the next one counts
ENTRIES_AT_ONCE = 2**16  # bytes of entries in a call
MOST_LINE = 2**13  # bytes of an entry's line
MOST_ENTRIES = 2**20

# What a change of each kind says beside its kind.
CHANGES: dict[str, dict[str, type]] = {
    "add": {"peer": int, "identity": str, "address": str},
    "leave": {"peer": int},
    "revoke": {"peer": int},
    "renew": {"peer": int, "certificate": str},
    "address": {"peer": int, "address": str},
    "extend": {"rounds": int},
}
Verify = Callable[[bytes, bytes], bool]  # of a content and a signature: whether the authority signed it
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True)
class MemberEntries:
    """Entries that one peer hands on to another.

    Attributes:
        sender, receiver: peers.
        lines: of the list, in their order, each with its newline.
    """

    sender: int
    receiver: int
    lines: bytes


@dataclass(frozen=True)
class Member:
    """One peer of a federation, as the list has it.

    Attributes:
        number: the peer's.
        identity: that its certificate is for.
        address: HOST:PORT; None for the one that the scenario has.
        certificate: the SHA-256 of its only certificate that counts, as hexadecimal; "" if any of the authority does.
        left, revoked: the entry by which it left or was shut out; 0 if it was not.
    """

    number: int
    identity: str
    address: str | None = None
    certificate: str = ""
    left: int = 0
    revoked: int = 0

    @property
    def is_present(self) -> bool:
        """Return whether it takes part."""
        return not (self.left or self.revoked)


@dataclass(frozen=True)
class MemberEntry:
    """One line of the list.

    Attributes:
        number: from 1.
        before: the hash of the entry before, as hexadecimal.
        change: its kind, and what belongs to it.
        signature: of the authority, of `content`.
    """

    number: int
    before: str
    change: dict[str, Any]
    signature: bytes = b""

    @property
    def content(self) -> bytes:
        """Return what is signed."""
        facts = {"number": self.number, "before": self.before, "change": self.change}
        return PURPOSE + _json(facts)

    @property
    def hash(self) -> str:
        """Return its hash, which the next entry has."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def line(self) -> bytes:
        """Return it as a line of the list."""
        facts = {"number": self.number, "before": self.before, "change": self.change, "signature": self.signature.hex()}
        return _json(facts) + b"\n"

    @classmethod
    def of(cls, line: bytes) -> MemberEntry:
        """Read a line, of which there is only one form.

        Raises:
            ValueError: it is not an entry's.
        """
        if len(line) > MOST_LINE:
            raise ValueError("it is too long")
        facts = json.loads(line)
        if not isinstance(facts, dict) or not isinstance(facts.get("change"), dict):
            raise ValueError("it is no entry")
        number = facts.get("number")
        before = facts.get("before")
        signature = facts.get("signature")
        if type(number) is not int or not 1 <= number <= MOST_ENTRIES:
            raise ValueError(f"it must have a number from 1 to {MOST_ENTRIES}")
        if not isinstance(before, str) or not isinstance(signature, str):
            raise ValueError("it lacks a hash or a signature")
        entry = cls(number, before, facts["change"], bytes.fromhex(signature))
        if entry.line.rstrip(b"\n") != line.rstrip(b"\n"):
            raise ValueError("it is written otherwise than entries are")
        return entry

    def says(self) -> str:
        """Return its change in words."""
        change = self.change
        kind = change.get("kind")
        peer = f"peer {change.get('peer')}"
        if kind == "add":
            return f"{peer} joins as {change['identity']} at {change['address']}"
        if kind == "leave":
            return f"{peer} leaves for good"
        if kind == "revoke":
            return f"{peer} is shut out"
        if kind == "renew":
            return f"of {peer} only the certificate {change['certificate'][:16]}... counts"
        if kind == "address":
            return f"{peer} is at {change['address']}"
        if kind == "extend":
            return f"the run has {change['rounds']} rounds"
        return f"a change of kind {kind!r}"


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


@dataclass(frozen=True)
class Members:
    """Who the peers of a federation are, after some entries.

    Attributes:
        name: of the federation.
        all: every peer that there ever was, by number.
        rounds: how many the run had at first, and after each entry that gave it more.
    """

    name: str
    all: tuple[Member, ...]
    rounds: tuple[int, ...] = (1,)

    @classmethod
    def first(cls, name: str, identities: Iterable[str], rounds: int = 1) -> Members:
        """Return those of a scenario, before any entry."""
        return cls(name, tuple(Member(number, identity) for number, identity in enumerate(identities)), (rounds,))

    @property
    def hash(self) -> str:
        """Return the hash that the first entry has, of the federation that `first` made."""
        facts = {"name": self.name, "identities": [one.identity for one in self.all]}
        return hashlib.sha256(PURPOSE + _json(facts)).hexdigest()

    @property
    def present(self) -> tuple[int, ...]:
        """Return the numbers of the peers that take part."""
        return tuple(one.number for one in self.all if one.is_present)

    def dialling(self, addresses: Sequence[str | None]) -> list[int]:
        """Return who takes part and only dials out.

        Args:
            addresses: the scenario's, which the list may have changed.
        """
        places = enumerate(addresses)
        return [peer for peer, place in places if place is None and not self.all[peer].address and peer in self.present]

    @property
    def revoked(self) -> dict[int, str]:
        """Return why each peer that was shut out is refused."""
        return {one.number: shut_out(one) for one in self.all if one.revoked}

    def after(self, entry: MemberEntry) -> Members:
        """Return them after an entry.

        Raises:
            ScenarioError: it cannot be: of a kind that there is not, of a peer that does not take part, or twice.
        """
        change = _checked(entry)
        kind = change["kind"]
        if kind == "add":
            return replace(self, all=(*self.all, self._joined(change)))
        if kind == "extend":
            return replace(self, rounds=(*self.rounds, self._extended(change["rounds"])))

        peer = change["peer"]
        if not 0 <= peer < len(self.all) or not self.all[peer].is_present:
            raise ScenarioError(
                f"peer {peer} does not take part: peers that do are {_listed(self.present)}", code="members.peer"
            )
        member = self.all[peer]
        if kind == "leave":
            if len(self.present) <= 2:
                raise ScenarioError(
                    f"peer {peer} cannot leave: only {_listed(self.present)} are left, and one peer by itself has "
                    "nobody to hand its part to; stop it instead",
                    code="members.last",
                )
            member = replace(member, left=entry.number)
        elif kind == "revoke":
            member = replace(member, revoked=entry.number)
        elif kind == "renew":
            member = replace(member, certificate=change["certificate"])
        else:
            member = replace(member, address=change["address"])
        return replace(self, all=(*self.all[:peer], member, *self.all[peer + 1 :]))

    def _extended(self, rounds: int) -> int:
        """Return to how many rounds the run is extended."""
        if not self.rounds[-1] < rounds <= MOST_ROUNDS:
            raise ScenarioError(
                f"a run that is extended has more rounds than before: {rounds} must be more than {self.rounds[-1]}, "
                f"and at most {MOST_ROUNDS}",
                code="members.rounds",
            )
        return rounds

    def _joined(self, change: dict[str, Any]) -> Member:
        """Return a peer that joins."""
        peer = change["peer"]
        identity = change["identity"]
        address = change["address"]
        if peer != len(self.all):
            raise ScenarioError(
                f"a peer that joins has the next number, {len(self.all)}, and not {peer}: no number is given twice",
                code="members.number",
            )
        if any(one.identity == identity for one in self.all):
            raise ScenarioError(f"the identity {identity} is that of a peer: give another one", code="members.identity")
        taken = [place_of(one.address) for one in self.all if one.is_present and one.address is not None]
        if place_of(address) in taken:
            raise ScenarioError(f"the address {address} is that of a peer: give another one", code="members.address")
        return Member(peer, identity, address)


def shut_out(member: Member) -> str:
    """Return why a peer that was shut out is refused."""
    return f"{member.identity} was shut out by entry {member.revoked} of the list of members"


def _listed(peers: Sequence[int]) -> str:
    return ", ".join(map(str, peers)) or "none"


def _checked(entry: MemberEntry) -> dict[str, Any]:
    """Return the change of an entry, if it has what its kind has, and nothing else."""
    change = entry.change
    kind = change.get("kind")
    if kind not in CHANGES:
        raise ScenarioError(
            f"it is of kind {kind!r}, and here are {', '.join(CHANGES)}: update this peer", code="members.kind"
        )
    expected = CHANGES[kind]
    has_all = change.keys() == {"kind", *expected}
    if not has_all or any(type(change[name]) is not form for name, form in expected.items()):
        raise ScenarioError(f"of kind {kind} it must have {', '.join(expected)}", code="members.form")

    for name, check in FORMS.items():
        if name in expected:
            try:
                check(change[name])
            except ArgumentError as error:
                raise ScenarioError(f"{name} {shown(change[name], 80)} {error}", code="members.form") from error
    return change


def _checked_fingerprint(value: str) -> str:
    if not FINGERPRINT.fullmatch(value):
        raise ArgumentError("must be a SHA-256 in hexadecimal", code="members.form")
    return value


FINGERPRINT = re.compile("[0-9a-f]{64}")
FORMS = {"address": checked_address, "identity": checked_identity, "certificate": _checked_fingerprint}


class MemberList:
    """The list as one peer, or the operator, has it; see the module.

    Args:
        first: the federation before any entry.
        verify: says whether the authority signed something.
        keep: puts the whole list on disk, before anything follows from it; nothing by default.

    Attributes:
        entries: in their order.
        members: who the peers are after the last of them.
        problem: what is wrong with an entry that came last, which the list does not take; "" if nothing is.
    """

    def __init__(self, first: Members, verify: Verify, keep: Callable[[bytes], None] = lambda content: None) -> None:
        self.first = first
        self.entries: list[MemberEntry] = []
        self.members = first
        self.problem = ""
        self._verify = verify
        self._keep = keep
        self._refused = Counter[str]()  # wrong entries, by who brought them

    @property
    def head(self) -> str:
        """Return the hash that the next entry has to have."""
        return self.entries[-1].hash if self.entries else self.first.hash

    @property
    def content(self) -> bytes:
        """Return the whole list, as it is kept."""
        return b"".join(entry.line for entry in self.entries)

    def after(self, height: int) -> bytes:
        """Return the lines after an entry, as many as go into a call; at least one if there is one."""
        lines = b""
        for entry in self.entries[height:]:
            if lines and len(lines) + len(entry.line) > ENTRIES_AT_ONCE:
                break
            lines += entry.line
        return lines

    def append(self, change: dict[str, Any], sign: Sign) -> MemberEntry:
        """Add an entry of the authority's.

        Raises:
            ScenarioError: it cannot be.
        """
        unsigned = MemberEntry(len(self.entries) + 1, self.head, change)
        members = self.members.after(unsigned)
        entry = replace(unsigned, signature=sign(unsigned.content))
        if not self._verify(entry.content, entry.signature):
            raise ScenarioError(
                "the key does not belong to the authority that the peers trust: give the key of its certificate",
                code="members.key",
            )
        try:
            MemberEntry.of(entry.line)
        except ValueError as error:
            raise ScenarioError(
                f"no peer could read the entry, and none that follows it: {error}; give a shorter address",
                code="members.unreadable",
            ) from error
        self._keep(self.content + entry.line)
        self.entries.append(entry)
        self.members = members
        return entry

    def take(self, lines: bytes, whence: str, is_own: bool = False, is_trusted: bool = False) -> int:
        """Take in what is new of some lines, and return how many entries that is.

        Args:
            lines: each with its newline; one without, as a file that was half written ends with, does not count.
            whence: who brought them, in words.
            is_own: whether it is what was kept, which is no news.
            is_trusted: whether it is looked at however often it was wrong, as a file of the operator's is that was
                mended.
        """
        if self._refused[whence] >= MOST_REFUSED and not is_trusted:
            if not self._has_next(lines):
                return 0
            del self._refused[whence]

        new: list[MemberEntry] = []
        members = self.members
        refused = self._refused[whence]
        whole, _, _ = lines.rpartition(b"\n")
        for line in whole.split(b"\n") if whole else ():
            height = len(self.entries) + len(new)
            try:
                entry = MemberEntry.of(line)
            except (ValueError, RecursionError) as error:
                self._refuse(whence, f"a line is no entry ({error})")
                break
            known = self._known(entry.number, new)
            if entry == known:
                continue  # as nearly always: it is known
            if entry.number > height + 1:
                break  # those between are missing, and come by themselves
            if not self._verify(entry.content, entry.signature):
                self._refuse(whence, f"entry {entry.number} is not signed by the authority")
                break

            head = new[-1].hash if new else self.head
            if known is not None and entry.hash == known.hash:
                continue  # signed a second time
            if known is not None or entry.before != head:
                self._refuse(
                    whence,
                    f"entry {entry.number} ({entry.says()}) is of another list: the authority has signed two that "
                    "differ from there on, or one of another federation; this peer stays with its own: take it by "
                    "`privdec members SCENARIO merge`, then make the change again",
                )
                break
            try:
                members = members.after(entry)
            except ScenarioError as error:
                self._refuse(whence, f"entry {entry.number}: {error}")
                break
            new.append(entry)

        if not new:
            return 0
        self._keep(self.content + b"".join(entry.line for entry in new))
        self.entries += new
        self.members = members
        if self._refused[whence] == refused:
            self.problem = ""
        for entry in () if is_own else new:
            _log.info("entry %d of the list of members, from %s: %s", entry.number, whence, entry.says())
        return len(new)

    def _has_next(self, lines: bytes) -> bool:
        """Return whether the entry after the last one is among some lines, signed by the authority."""
        number = len(self.entries) + 1
        whole, _, _ = lines.rpartition(b"\n")
        for line in whole.split(b"\n"):
            try:
                entry = MemberEntry.of(line)
            except (ValueError, RecursionError):
                return False
            if entry.number == number:
                return entry.before == self.head and self._verify(entry.content, entry.signature)
        return False

    def _known(self, number: int, new: list[MemberEntry]) -> MemberEntry | None:
        """Return the entry of a number, of the list or of those that are new; None if there is none yet."""
        place = number - 1
        if place < len(self.entries):
            return self.entries[place]
        place -= len(self.entries)
        return new[place] if place < len(new) else None

    def _refuse(self, whence: str, why: str) -> None:
        self._refused[whence] += 1
        problem = f"the list of members from {whence} is refused: {why}"
        if problem != self.problem:
            _log.warning("%s", problem)
        self.problem = problem


class MemberNews:
    """What a session hands on of the list, and to whom.

    Args:
        peer: this one.
        known: its list.
        again: seconds until entries that may not have come are sent again.
    """

    def __init__(self, peer: int, known: MemberList, again: float) -> None:
        self.list = known
        self._peer = peer
        self._again = again
        self._heights: dict[int, int] = {}  # how many entries each neighbour has, as far as it said
        self._sent: dict[int, float] = {}

    @property
    def height(self) -> int:
        """Return how many entries this peer has."""
        return len(self.list.entries)

    def hear(self, neighbour: int, height: int) -> None:
        """Record how many entries a neighbour has."""
        if self._heights.get(neighbour) != height:
            self._heights[neighbour] = height
            self._sent.pop(neighbour, None)

    def take(self, message: MemberEntries) -> None:
        """Take in what a neighbour hands on."""
        try:
            self.list.take(message.lines, f"peer {message.sender}")
        except OSError as error:
            _log.warning("new entries of the list of members cannot be kept, and do not count yet: %s", error)

    def has_entries(self, neighbour: int, now: float) -> bool:
        """Return whether a neighbour is to be sent entries by now."""
        lacks = self._heights.get(neighbour, self.height) < self.height
        return lacks and now >= self._sent.get(neighbour, -math.inf) + self._again

    def entries_for(self, neighbour: int, now: float) -> MemberEntries | None:
        """Return what to send to a neighbour now; None if nothing is."""
        if not self.has_entries(neighbour, now):
            return None
        self._sent[neighbour] = now
        return MemberEntries(self._peer, neighbour, self.list.after(self._heights[neighbour]))
