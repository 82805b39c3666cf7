"""Where the peers of a federation are now, and whose certificates count: what a transport looks up at every call."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from flower_privdec.common.errors import ScenarioError
from flower_privdec.pushsum.membership import Members
from flower_privdec.scenario.sections import is_anywhere

KNOWN = 64  # certificates whose hash is remembered


@lru_cache(KNOWN)
def fingerprint_of_certificate(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (PEM, the peer's own first), as hexadecimal; "" if it cannot be read."""
    text = certificate.decode("ascii", "replace")
    first = text.partition("-----END CERTIFICATE-----")[0]
    begin = first.find("-----BEGIN CERTIFICATE-----")
    try:
        der = ssl.PEM_cert_to_DER_cert(f"{first[max(0, begin) :]}-----END CERTIFICATE-----\n")
    except ValueError:
        return ""
    return hashlib.sha256(der).hexdigest()


@dataclass(frozen=True)
class Directory:
    """All peers, by number.

    Attributes:
        addresses: HOST:PORT of each; None for one that only dials out.
        identities: the DNS name that each one's certificate is for.
        refused: why nothing is said to some of them, and nothing taken from them.
        certificates: of some, the only certificate that counts, see `fingerprint_of_certificate`.
    """

    addresses: tuple[str | None, ...]
    identities: tuple[str, ...]
    refused: Mapping[int, str] = field(default_factory=dict)
    certificates: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Members, addresses: Sequence[str | None]) -> Directory:
        """Return the directory of a list of members; `addresses` are the scenario's, which it may have changed."""
        return cls(
            tuple(one.address or addresses[one.number] for one in members.all),
            tuple(one.identity for one in members.all),
            members.revoked,
            {one.number: one.certificate for one in members.all if one.certificate},
        )

    def numbers(self) -> dict[str, int]:
        """Return the number of each peer by its identity."""
        return {identity: peer for peer, identity in enumerate(self.identities)}

    def check_dialled(self, own: int | None = None) -> None:
        """Refuse an address at which no other device reaches a peer.

        Args:
            own: the peer of this device, which nobody dials here.

        Raises:
            ScenarioError: one stands for all of a device's own.
        """
        for peer, address in enumerate(self.addresses):
            if peer != own and address is not None and is_anywhere(address):
                raise ScenarioError(
                    f"network.peers: {address} of peer {peer} stands for all addresses of a device, and cannot be "
                    "dialled: give the one at which the others reach it, and this one as listen",
                    code="peer.anywhere",
                )

    def problem(self, peer: int, certificate: bytes) -> str:
        """Return why a peer's certificate does not count; "" if it does."""
        if peer in self.refused:
            return self.refused[peer]
        only = self.certificates.get(peer)
        if only is not None and fingerprint_of_certificate(certificate) != only:
            return (
                f"the certificate of {self.identities[peer]} was replaced by another one ({only[:16]}...), by the list "
                "of members: give its device the new files"
            )
        return ""
