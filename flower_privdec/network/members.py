"""What an operator does to the list of members: entries that the authority signs, and certificates that go with them.

The list lies beside the certificates, in the operator's folder. It is handed to one peer that runs, or to several: they
pass it on.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.network.peer.peer_files import MEMBERS, first_members, verifier
from flower_privdec.network.transport.directory import fingerprint_of_certificate
from flower_privdec.network.transport.signing import signed
from flower_privdec.network.transport.tls import AUTHORITY, AUTHORITY_KEY, Authority, content_of, files_of
from flower_privdec.pushsum.membership import MemberEntry, MemberList, Members
from flower_privdec.scenario.sections import HasPeers, NetworkSection, is_anywhere


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
