"""The files of a peer's device that may change while it runs: its certificate and key, and the list of members.

They lie in the folder of its certificates, into which its owner or the operator puts new ones: a renewed certificate
with its key, and `members`, the list. What the peer has of the list, also from its neighbours, it keeps in its own
folder. A file that is half written, or does not fit the other, counts for nothing until it does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.record_signatures import CertificateSignatures
from flower_privdec.network.transport.signing import is_signed
from flower_privdec.network.transport.tls import AUTHORITY, Credentials, content_of, files_of, identities
from flower_privdec.pushsum.membership import MemberList, Members, Verify
from flower_privdec.scenario.sections import HasPeers

_log = logging.getLogger(__name__)

MEMBERS = "members"  # the list, in the folder of certificates and in the peer's own
Stamp = tuple[tuple[int, int, int] | None, ...]


def verifier(authority: Callable[[], bytes]) -> Verify:
    """Return what checks a signature of the authority's; `authority` returns its certificates (PEM)."""

    def verify(content: bytes, signature: bytes) -> bool:
        keys = [one.public_key() for one in x509.load_pem_x509_certificates(authority())]
        return any(is_signed(key, signature, content) for key in keys)

    return verify


def first_members(scenario: HasPeers) -> Members:
    """Return the members of a scenario, before any entry of the list."""
    return Members.first(scenario.name, identities(scenario), scenario.rounds)


class PeerFiles:
    """What a peer reads of its device's files, again and again; see the module.

    Args:
        scenario: says who the peers are at first, and where.
        peer: its number.
        folder: its own; None for a program that only looks, and keeps no list.
        certificates: the folder with its certificate, its key and the authority's certificate.
        option: that gives its number, for messages.

    Attributes:
        members: the list.
        credentials: of the files as they last fitted.

    Raises:
        ScenarioError: the files do not fit, or the list has no such peer.
    """

    def __init__(
        self, scenario: HasPeers, peer: int, folder: Path | None, certificates: Path, option: str = "--id"
    ) -> None:
        self._peer = peer
        self._addresses = [one.address for one in scenario.network.peers or ()]
        self._own = None if folder is None else folder / MEMBERS
        self._given = certificates / MEMBERS
        self._files = files_of(certificates, peer)
        self._authority = content_of(certificates / AUTHORITY)

        self.members = MemberList(first_members(scenario), verifier(lambda: self._authority), self._keep)
        self._seen: Stamp = ()
        self._seen_certificate: Stamp = ()
        self._wrong: Stamp = ()  # of files that did not fit, at the last look
        if self._own is not None:
            self._take(self._own)
        self._take(self._given)
        self._seen = _stamp(self._given)

        everybody = self.members.members.all
        if peer >= len(everybody):
            raise ScenarioError(
                f"{option} {peer} must be 0 to {len(everybody) - 1}: n_peers={scenario.n_peers}, and the list of "
                f"members has {len(self.members.entries)} entries; one that adds peer {peer} goes to {self._given} "
                "(`privdec members`)",
                code="peer.id",
            )
        self.identity = everybody[peer].identity
        self._seen_certificate = _stamp(*self._files)
        self.credentials = Credentials.read(*self._files, self.identity)

        # One that is shut out is told so once it runs; one whose certificate was replaced would only be refused by all.
        member = everybody[peer]
        problem = self.directory().problem(peer, self.credentials.certificate)
        if problem and not member.revoked:
            raise ScenarioError(f"{self._files[0]}: {problem}", code="certificate.replaced")

    def _keep(self, content: bytes) -> None:
        """Put the list into the peer's own folder, if it has one."""
        if self._own is None:
            return
        self._own.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._own, content, public=True)

    def _take(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        self.members.take(content, str(path), is_own=path == self._own, is_trusted=True)

    def directory(self) -> Directory:
        """Return where the peers are now, and whose certificates count."""
        return Directory.of(self.members.members, self._addresses)

    def signatures(self) -> CertificateSignatures:
        """Return what signs session keys, by the certificate as it is now, and checks those of others."""
        names = [one.identity for one in self.members.members.all]
        return CertificateSignatures(self.credentials, names, self.directory)

    def look(self) -> None:
        """Read again what changed."""
        given = _stamp(self._given)
        if given != self._seen:
            self._seen = given
            try:
                self._take(self._given)
            except OSError as error:
                self._seen = ()  # again at the next look
                _log.warning("the list of members cannot be read or kept: %s", error)

        certificate = _stamp(*self._files)
        if certificate == self._seen_certificate:
            return
        try:
            renewed = Credentials.read(*self._files, self.identity)
        except ScenarioError as error:
            # Two files cannot be replaced at one moment. If they are still the same at the next look, it is a mistake.
            if certificate == self._wrong:
                self._seen_certificate = certificate
                _log.warning("the certificate in use stays, for the new files cannot be used: %s", error)
            self._wrong = certificate
            return

        self._seen_certificate = certificate
        if renewed != self.credentials:
            self._authority = renewed.authority
            self.credentials = renewed
            _log.info("the certificate of %s was renewed", self.identity)


def _stamp(*paths: Path) -> Stamp:
    """Return what changes when one of some files is replaced, or written to."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(stamps)
