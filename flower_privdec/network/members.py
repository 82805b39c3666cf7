"""What an operator does to the list of members: entries that the authority signs, and certificates that go with them.

The list lies beside the certificates, in the operator's folder. It is handed to one peer that runs, or to several: they
pass it on.

An entry that is signed on an older copy of the list is another one than the peers have of that number, and all refuse
it: who shuts a stolen device out so has shut nobody out. So before anything is signed, peers are asked for the list
that they have (`Operator.catch_up`). What is new in theirs is taken. If theirs is another list, nothing is signed until
the operator has taken it in place of the own one (`Operator.merge`). No peer can lie about this: each list is verified.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.network.peer.peer_files import MEMBERS, first_members, verifier
from flower_privdec.network.peer.status import members_request
from flower_privdec.network.transport.directory import fingerprint_of_certificate
from flower_privdec.network.transport.signing import signed
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import (
    AUTHORITY,
    AUTHORITY_KEY,
    Authority,
    Credentials,
    content_of,
    files_of,
)
from flower_privdec.pushsum.membership import MemberEntry, MemberList, Members
from flower_privdec.scenario.sections import HasPeers, NetworkSection, is_anywhere

ASKED = 16  # peers at most
ASK_SECONDS = 2.0  # for a peer to answer
ENTRIES_CAP = 1 << 20  # bytes of an answer


@dataclass(frozen=True)
class AskedPeers:
    """What peers said when they were asked for the list that they have.

    Attributes:
        taken: how many entries of theirs the operator's list lacked, and has now.
        dropped: what entries of the operator's list said that theirs has not, after `Operator.merge`.
        other: peers that have another list, in words; they are few, else it is an error.
        answered: who answered.
        silent: why others did not.
    """

    taken: int = 0
    dropped: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    answered: tuple[int, ...] = ()
    silent: Mapping[int, str] = field(default_factory=dict)


def read_members(scenario: HasPeers, folder: Path) -> MemberList:
    """Return the list that lies in a folder of certificates, verified; without entries if there is none.

    Raises:
        ScenarioError: not all of it is the authority's, for this scenario.
    """
    path = folder / MEMBERS
    authority = content_of(folder / AUTHORITY)
    made = MemberList(first_members(scenario), verifier(lambda: authority))
    content = path.read_bytes() if path.exists() else b""
    made.take(content, str(path), is_own=True)
    if made.problem or made.content != content:
        why = made.problem or "its last line is not whole"
        raise ScenarioError(
            f"{path}: {why}; take the newest copy, from the operator's folder or a peer's", code="members.unverified"
        )
    return made


class Operator:
    """The holder of the authority's key, who writes the list.

    Args:
        scenario: who the peers are at first.
        folder: of certificates, with the list.
        authority_key: of the authority; by default the one in the folder.

    Raises:
        ScenarioError: the list, or the authority, cannot be read.
    """

    def __init__(self, scenario: HasPeers, folder: Path, authority_key: Path | None = None) -> None:
        self._folder = folder
        self._authority = Authority.read(folder / AUTHORITY, authority_key or folder / AUTHORITY_KEY)
        self._key_file = authority_key or folder / AUTHORITY_KEY
        self._scenario = scenario
        self._list = read_members(scenario, folder)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the list against another command: two entries with one number would be two lists."""
        with open(self._key_file, "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            self._list = read_members(self._scenario, self._folder)
            yield

    def _append(self, change: dict[str, Any]) -> MemberEntry:
        entry = self._list.append(change, lambda content: signed(self._authority.key, content))
        write_atomically(self._folder / MEMBERS, self._list.content, public=True)
        return entry

    def _issue(self, peer: int, identity: str) -> bytes:
        """Put a new certificate and its key for a peer into the folder, and return the certificate."""
        made = self._authority.issue(identity)
        certificate, key, _ = files_of(self._folder, peer)
        write_atomically(key, made.key)
        write_atomically(certificate, made.certificate, public=True)
        return made.certificate

    # --- the list that the peers have ---

    def catch_up(self, without: int | None = None) -> AskedPeers:
        """Take what is new in the lists that peers have, so that what is signed next follows from it.

        Args:
            without: a peer that is not asked, as it is about to be shut out.

        Raises:
            ScenarioError: half of those that answer, or more, have another list; nothing was changed.
        """
        with self._alone():
            theirs, silent = self._ask(without)
            other = {peer: why for peer, one in theirs.items() if (why := _difference(self._list, one))}
            if other and 2 * len(other) >= len(theirs):
                raise ScenarioError(
                    f"{self._folder / MEMBERS} is another list than peers {', '.join(map(str, other))} have: "
                    f"{next(iter(other.values()))}. It was continued from an older copy, and no peer takes what is "
                    "signed on it; nothing was signed. Take the peers' list first, by `privdec members SCENARIO merge` "
                    "with the same --certs, then give this command again",
                    code="members.fork",
                )

            taken = 0
            for peer, one in theirs.items():
                if peer not in other:
                    taken += self._list.take(one.content, f"peer {peer}")
            if taken:
                write_atomically(self._folder / MEMBERS, self._list.content, public=True)
            differing = tuple(f"peer {peer} has another list: {why}" for peer, why in other.items())
            return AskedPeers(taken, (), differing, tuple(theirs), silent)

    def merge(self, source: Path | None = None) -> AskedPeers:
        """Take the list that the peers have in place of the own one, which is kept under another name.

        Args:
            source: a peer's list, which is taken as it is; by default most of the peers that answer are believed.

        Raises:
            ScenarioError: the source is not the authority's list; no peer answers; or they are divided.
        """
        silent: dict[int, str] = {}
        with self._alone():
            own = self._list
            theirs: dict[int, MemberList] = {}
            if source is not None:
                chosen = self._verified(source)
            else:
                theirs, silent = self._ask(None)
                chosen = _chosen(theirs, silent)

            common = _common(own, chosen)
            dropped = tuple(f"entry {one.number}: {one.says()}" for one in own.entries[common:])
            if not dropped and len(chosen.entries) <= common:
                return AskedPeers(0, (), (), tuple(theirs), silent)
            path = self._folder / MEMBERS
            if dropped:
                write_atomically(path.with_name(f"{MEMBERS}.{own.head[:16]}"), own.content, public=True)
            write_atomically(path, chosen.content, public=True)
            return AskedPeers(len(chosen.entries) - common, dropped, (), tuple(theirs), silent)

    def _ask(self, without: int | None) -> tuple[dict[int, MemberList], dict[int, str]]:
        """Return the lists that peers have, and why others did not say."""
        network = self._scenario.network
        members = self._list.members
        places = [place.address for place in network.peers or ()]
        addresses: dict[int, str] = {}
        for peer in members.present:
            address = members.all[peer].address
            if address is None and peer < len(places):
                address = places[peer]
            if address is not None and peer != without:
                addresses[peer] = address

        # The operator asks as one of the peers, with a certificate that is made for this and kept nowhere.
        free = [peer for peer in members.present if peer != without and not members.all[peer].certificate]
        if not addresses or network.transport != "tls":
            return {}, {}
        if not free:
            return {}, dict.fromkeys(addresses, "of every peer only one certificate counts, which is on its device")
        credentials = self._authority.issue(members.all[free[0]].identity, days=1)

        asked = list(addresses.items())[:ASKED]
        found: dict[int, MemberList] = {}
        silent: dict[int, str] = {}
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = {peer: pool.submit(self._list_of, peer, address, credentials) for peer, address in asked}
        for peer, answer in answers.items():
            try:
                found[peer] = answer.result()
            except RunError as error:
                silent[peer] = str(error)
        return found, silent

    def _list_of(self, peer: int, address: str, credentials: Credentials) -> MemberList:
        """Return the list that a peer has, as far as it is the authority's.

        Raises:
            RunError: it does not answer.
        """
        identity = self._list.members.all[peer].identity
        found = self._empty()
        connection = StreamConnection(address, identity, credentials, ENTRIES_CAP)
        try:
            while True:
                lines = connection.call([members_request(len(found.entries))], ASK_SECONDS)
                if not found.take(bytes(lines), f"peer {peer}"):
                    return found
        finally:
            connection.close()

    def _empty(self) -> MemberList:
        return MemberList(first_members(self._scenario), verifier(lambda: content_of(self._folder / AUTHORITY)))

    def _verified(self, path: Path) -> MemberList:
        """Read a peer's list.

        Raises:
            ScenarioError: it cannot be read, or not all of it is the authority's.
        """
        remedy = "give the file members in the folder of a peer"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ScenarioError(
                f"{path}: cannot be read ({error.strerror}); {remedy}", code="members.source"
            ) from error
        found = self._empty()
        found.take(content, str(path))
        if found.problem or found.content != content:
            why = found.problem or "its last line is not whole"
            raise ScenarioError(f"{path}: {why}; {remedy}", code="members.unverified")
        return found

    # --- changes ---

    def change(self, kind: str, peer: int, **more: str) -> MemberEntry:
        """Add an entry about a peer that takes part."""
        if "address" in more:
            _check_dialled(more["address"])
        with self._alone():
            return self._append({"kind": kind, "peer": peer, **more})

    def leave(self, peer: int, check: Callable[[Members], None]) -> MemberEntry:
        """Let a peer leave for good.

        Args:
            check: refuses that it leaves if the others could not go on; asked if some joined, or only dial out.

        Raises:
            ScenarioError: the others would wait for it.
        """
        if self._scenario.network.mode == "synchronous":
            raise ScenarioError(
                "no peer can leave a run with network.mode=synchronous, whose peers wait for each other: let the run "
                "end, and begin another one without it",
                code="members.no-leave",
            )
        with self._alone():
            change = {"kind": "leave", "peer": peer}
            after = self._after(change)
            if self._may_lack_edges(after):
                check(after)
            return self._append(change)

    def extend(self, rounds: int) -> MemberEntry:
        """Give the run more rounds: so many in all."""
        with self._alone():
            return self._append({"kind": "extend", "rounds": rounds})

    def revoke(self, peer: int, check: Callable[[Members], None]) -> tuple[MemberEntry, str]:
        """Shut a peer out; return the entry, and why the others cannot go on as planned, "" if they can.

        Args:
            check: see `leave`; a peer is shut out whatever becomes of the others.
        """
        with self._alone():
            entry = self._append({"kind": "revoke", "peer": peer})
            problem = ""
            try:
                if self._may_lack_edges(self._list.members):
                    check(self._list.members)
            except PrivdecError as error:
                problem = str(error)
            return entry, problem

    def _may_lack_edges(self, after: Members) -> bool:
        """Return whether there may be no graph over the members that all of them reach."""
        addresses = [place.address for place in self._scenario.network.peers or ()]
        return len(after.all) > self._scenario.n_peers or len(after.dialling(addresses)) > 1

    def _after(self, change: dict[str, Any]) -> Members:
        """Return who the members are after a change that is not made yet."""
        return self._list.members.after(MemberEntry(len(self._list.entries) + 1, self._list.head, change))

    def add(self, address: str, identity: str | None, check: Callable[[Members], None]) -> MemberEntry:
        """Let a peer join, and make its certificate.

        Args:
            address: HOST:PORT where the others reach it.
            identity: by default like those of the others.
            check: refuses members with whom the run could not go on.
        """
        with self._alone():
            number = len(self._list.members.all)
            usual = NetworkSection().identities(self._scenario.name, number + 1)[number]
            own = identity or usual
            change = {"kind": "add", "peer": number, "identity": own, "address": address}
            _check_dialled(address)
            check(self._after(change))
            self._check_is_new(number)
            self._issue(number, own)
            return self._append(change)

    def _check_is_new(self, peer: int) -> None:
        """Refuse the number of a peer that has a key: an old copy of the list would give it to another one."""
        there = next((path for path in files_of(self._folder, peer)[:2] if path.exists()), None)
        if there is not None:
            raise ScenarioError(
                f"{there} is there, and the list of members has no peer {peer}: it may be an old copy. Put the newest "
                "one in its place, from a peer's folder; or delete the file if no device has it",
                code="members.old-list",
            )

    def renew(self, peer: int, only: bool) -> MemberEntry | None:
        """Make a peer a new certificate; with `only` the ones before it count no more, which is the entry.

        A peer of which only one certificate counts gets an entry in any case: without, the new one would not count.
        """
        with self._alone():
            members = self._list.members
            if peer not in members.present:
                raise ScenarioError(
                    f"peer {peer} does not take part: peers that do are {', '.join(map(str, members.present))}",
                    code="members.peer",
                )
            certificate = self._issue(peer, members.all[peer].identity)
            if not only and not members.all[peer].certificate:
                return None
            return self._append({"kind": "renew", "peer": peer, "certificate": fingerprint_of_certificate(certificate)})


def _check_dialled(address: str) -> None:
    """Refuse an address at which no other device reaches a peer.

    Raises:
        ScenarioError: it stands for all of a device's own.
    """
    if is_anywhere(address):
        raise ScenarioError(
            f"--address {address} stands for all addresses of a device, and cannot be dialled: give the one at which "
            "the others reach it; the device itself listens there by `privdec peer --listen`",
            code="members.anywhere",
        )


def _common(one: MemberList, other: MemberList) -> int:
    """Return how many entries two lists have in common."""
    for place, (here, there) in enumerate(zip(one.entries, other.entries, strict=False)):
        if here.hash != there.hash:
            return place
    return min(len(one.entries), len(other.entries))


def _difference(own: MemberList, theirs: MemberList) -> str:
    """Return where another list differs from one's own; "" if one of the two continues the other."""
    place = _common(own, theirs)
    if place == min(len(own.entries), len(theirs.entries)):
        return ""
    return f"entry {place + 1} says here: {own.entries[place].says()}; there: {theirs.entries[place].says()}"


def _chosen(theirs: Mapping[int, MemberList], silent: Mapping[int, str]) -> MemberList:
    """Return the list that most peers have, or a beginning of it.

    Raises:
        ScenarioError: none answered, or they are divided.
    """
    if not theirs:
        why = "; ".join(silent.values()) or "none has an address"
        raise ScenarioError(
            f"no peer said which list it has ({why}): start one, or give the list from its folder by --from",
            code="members.no-answer",
        )

    support: dict[str, int] = {}
    for one in theirs.values():
        support[one.head] = sum(not _difference(one, other) for other in theirs.values())
    longest = max(theirs.values(), key=lambda one: (support[one.head], len(one.entries)))
    rivals = [one for one in theirs.values() if support[one.head] == support[longest.head]]
    if any(_difference(longest, one) for one in rivals):
        raise ScenarioError(
            "as many peers have one list as another: choose one, and give it from a peer's folder by --from",
            code="members.divided",
        )
    return longest
